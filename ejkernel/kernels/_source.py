"""A fingerprint of the code behind a kernel: results of tests are of that code and no other."""

import ast
import functools
import hashlib
import io
import pathlib
import tokenize
from collections.abc import Iterator

from ejkernel.kernels._registry import KernelEntry

_PACKAGE = "ejkernel.kernels"
_ROOT = pathlib.Path(__file__).parent
# what holds for every kernel, and is checked by tests of its own
_FRAMEWORK = frozenset(
    f"{_PACKAGE}.{name}"
    for name in (
        "_registry",
        "_platforms",
        "_spec",
        "_specs",
        "_oracle",
        "_op_kernel",
        "_reference",
    )
)


def fingerprint(entry: KernelEntry) -> str | None:
    """Changes with the code of a kernel and of what it imports; None for one from outside.

    Comments, docstrings and empty lines do not count, but in CUDA sources.
    """
    entry = entry.base or entry  # a derived op runs the kernel of its base
    inner = getattr(getattr(entry.fn, "__self__", None), "inner", None)  # of a schedule around it
    parts = [part for e in (entry, inner) if e for part in (e.fn, e.backward, e.config) if part]
    modules = {getattr(part, "__module__", None) or part.__name__ for part in parts}
    return _of_modules(frozenset(modules)) if all(map(_is_kernel, modules)) else None


@functools.cache
def _of_modules(modules: frozenset[str]) -> str:
    todo, seen = list(modules), set(modules)
    while todo:
        path = _path(todo.pop())
        found = [] if path is None else [m for m in _imports(path) if m not in seen]
        found = [m for m in found if _is_kernel(m)]
        seen.update(found)
        todo += found
    digest = hashlib.sha256()
    for name in sorted(seen):
        if (path := _path(name)) is not None:
            digest.update(f"{name}\n{_code(path.read_text())}\n".encode())
            if path.name == "__init__.py":
                for source in sorted(path.parent.glob("*.cu*")):
                    digest.update(f"{source.name}\n{source.read_text()}\n".encode())
    return digest.hexdigest()[:16]


def _is_kernel(module: str) -> bool:
    if not module.startswith(f"{_PACKAGE}._"):
        return False
    return not any(module == m or module.startswith(f"{m}.") for m in _FRAMEWORK)


@functools.cache
def _path(module: str) -> pathlib.Path | None:
    """The file of a module; None for a name that is none, such as a function's.

    Found by name: importing parent packages would make the answer depend on what is installed.
    """
    path = _ROOT.joinpath(*module.removeprefix(f"{_PACKAGE}.").split("."))
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


@functools.cache
def _imports(path: pathlib.Path) -> tuple[str, ...]:
    """What a file may import: modules, and names that may be modules."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(found)


def _code(text: str) -> str:
    """A file without comments, docstrings and empty lines.

    Cut by positions: what Python prints of a syntax tree differs from version to version.
    """
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for first, last in _docstrings(ast.parse(text)):
        lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """First and last lines."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
