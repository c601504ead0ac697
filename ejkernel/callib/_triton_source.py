"""What the text of a Triton kernel, and of the helpers that it calls, refers to."""

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@functools.lru_cache(maxsize=1024)
def constants(kernel: Any) -> tuple[str, ...]:
    """Values read through modules (`sizes.BLOCK`), of which Triton's cache knows nothing."""
    found = set()
    for fn, tree in _functions(kernel):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                value = _value(fn, node)
                value = getattr(value, "value", value)  # of a constexpr
                if isinstance(value, bool | int | float | str | tuple):
                    found.add(f"{ast.unparse(node)}: {type(value).__name__} = {value!r}")
    return tuple(sorted(found))


@functools.lru_cache(maxsize=1024)
def grid_axes(kernel: Any) -> frozenset[int]:
    """The axes of the grid that a kernel may ask for; all where its text does not tell."""
    axes: set[int] = set()
    for _, tree in _functions(kernel):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in ("program_id", "num_programs"):
                given = [*node.args, *(k.value for k in node.keywords if k.arg == "axis")]
                axis = getattr(given[0], "value", None) if given else None
                axes |= {axis} if isinstance(axis, int) else {0, 1, 2}
    return frozenset(axes)


def _functions(kernel: Any) -> Iterator[tuple[Any, ast.AST]]:
    """The Python functions of a kernel and of all its helpers, with their parsed text."""
    waiting, seen = [kernel], {id(kernel)}
    while waiting:
        made = waiting.pop()
        tree = _parsed(made)
        yield made.fn, tree
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                value = _value(made.fn, node)
                known = hasattr(value, "parse") or hasattr(value, "arg_names")
                if hasattr(value, "fn") and known and id(value) not in seen:
                    seen.add(id(value))
                    waiting.append(value)


def _parsed(made: Any) -> ast.AST:
    if hasattr(made, "parse"):
        return made.parse()
    return ast.parse(textwrap.dedent(inspect.getsource(made.fn)))  # under TRITON_INTERPRET=1


def _value(fn: Any, node: ast.AST) -> Any:
    """What a name stands for outside a function; of attributes, those of modules."""
    if isinstance(node, ast.Name):
        if node.id in fn.__code__.co_varnames:
            return _ABSENT
        held = inspect.getclosurevars(fn).nonlocals if fn.__closure__ else {}
        return held.get(node.id, fn.__globals__.get(node.id, _ABSENT))
    if isinstance(node, ast.Attribute):
        base = _value(fn, node.value)
        theirs = isinstance(base, types.ModuleType) and base.__name__.startswith("triton")
        if isinstance(base, types.ModuleType) and not theirs:
            return getattr(base, node.attr, _ABSENT)
    return _ABSENT
