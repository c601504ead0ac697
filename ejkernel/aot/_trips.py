"""How often the loops and branches of a Pallas kernel run, from its scalars alone.

The integers that decide come from program ids and from tables that are copied to SMEM beforehand.
They are computed for all grid steps at once, with NumPy; everything else of the kernel is left out.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel.aot._schedule import Control

_MOST_STEPS = 1 << 22
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "neg": np.negative, "sign": np.sign, "abs": np.abs,
    "shift_left": np.left_shift, "shift_right_arithmetic": np.right_shift,
    "div": lambda a, b: np.trunc(a / np.where(b == 0, 1, b)).astype(a.dtype),
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.choose(which.astype(np.int32), cases),
    "multiple_of": lambda x: x, "copy": lambda x: x, "stop_gradient": lambda x: x,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A Pallas kernel of a traced program."""

    name: str
    grid: tuple[int, ...]
    jaxpr: Any
    tables: tuple[np.ndarray | None, ...]  # what is copied to SMEM, where it is known

    @property
    def steps(self) -> int:
        return math.prod(self.grid)


def kernels(closed: Any, inputs: Sequence[np.ndarray | None]) -> list[Kernel]:
    """The kernels of a program; `inputs` are its arguments where they are known."""
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values = consts | dict(zip(closed.jaxpr.invars, inputs, strict=True))
    return list(_find(closed.jaxpr, values.get))


def _find(jaxpr: Any, outside: Callable[[Any], Any]) -> Iterator[Kernel]:
    known = _resolver(jaxpr, outside)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            mapping = eqn.params["grid_mapping"]
            if mapping.num_dynamic_grid_bounds:
                continue
            tables = [known(v) for v in eqn.invars[: mapping.num_index_operands]]
            held = tuple(None if t is None else np.asarray(t) for t in tables)
            yield Kernel(_name(eqn), tuple(mapping.grid), eqn.params["jaxpr"], held)
            continue
        for inner, consts in _inner(eqn):
            given: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=True))
            if len(inner.invars) == len(eqn.invars):
                pairs = zip(inner.invars, eqn.invars, strict=True)
                yield from _find(inner, _passed(given, dict(pairs), known))
            else:
                yield from _find(inner, given.get)


def _passed(given: dict[Any, Any], outer: dict[Any, Any], known: Any) -> Callable[[Any], Any]:
    return lambda var: given[var] if var in given else known(outer[var]) if var in outer else None


def _name(eqn: Any) -> str:
    return eqn.params.get("name") or str(eqn.params.get("name_and_src_info", "kernel")).split()[0]


def _inner(eqn: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    for value in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ):
        if hasattr(value, "consts") and hasattr(value, "jaxpr"):
            yield value.jaxpr, value.consts
        elif hasattr(value, "eqns"):
            yield value, ()


def _resolver(jaxpr: Any, outside: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that gives a variable's value, computed from what is known, or None."""
    producers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    made: dict[Any, Any] = {}

    def known(var: Any) -> Any:
        if hasattr(var, "val"):
            return var.val
        if var in made:
            return made[var]
        eqn = producers.get(var)
        if eqn is None:
            return outside(var)
        inputs = [known(v) for v in eqn.invars]
        if any(x is None for x in inputs) or eqn.primitive.name == "pallas_call":
            made.update(dict.fromkeys(eqn.outvars))
            return None
        if eqn.primitive.name in _CALLS:
            inner, consts = next(_inner(eqn))
            outs = jax.core.eval_jaxpr(inner, consts, *inputs)
        else:
            outs = eqn.primitive.bind(*inputs, **eqn.params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        made.update(zip(eqn.outvars, outs, strict=True))
        return made[var]

    return known


# Inside a kernel


@dataclasses.dataclass
class _Walk:
    """Values by variable for all grid steps; None is unknown. Also counts matrix products."""

    ids: np.ndarray  # [axes of the grid, steps]
    grid: tuple[int, ...]
    control: list[Control | None] = dataclasses.field(default_factory=list)
    flops: float = 0.0

    def run(self, jaxpr: Any, env: dict[Any, Any], weight: np.ndarray) -> None:
        """`weight` is how often each grid step comes here."""
        for eqn in jaxpr.eqns:
            outs = self._results(eqn, env, weight)
            env.update(zip(eqn.outvars, outs or [None] * len(eqn.outvars), strict=True))

    def _results(self, eqn: Any, env: dict[Any, Any], weight: np.ndarray) -> list[Any] | None:
        name = eqn.primitive.name
        values = [self._value(v, env) for v in eqn.invars]
        special = {
            "program_id": self._program_id, "num_programs": self._num_programs,
            "get": self._get, "cond": self._cond, "while": self._while, "scan": self._scan,
            "dot_general": self._product,
        }  # fmt: skip
        if name in special:
            return special[name](eqn, values, weight)
        if name in _CALLS:
            return self._call(eqn, values, weight)
        if (
            name == "convert_element_type"
            and values[0] is not None
            and not eqn.outvars[0].aval.shape
        ):
            return [values[0].astype(eqn.outvars[0].aval.dtype)]
        scalar = all(not getattr(v.aval, "shape", (1,)) for v in (*eqn.outvars, *eqn.invars))
        if name in _NUMPY and scalar and all(x is not None for x in values):
            return [_NUMPY[name](*values)]
        return None

    def _value(self, var: Any, env: dict[Any, Any]) -> Any:
        if not hasattr(var, "val"):
            return env.get(var)
        if getattr(var.aval, "shape", ()):
            return None
        return np.full(self.ids.shape[1], var.val, var.aval.dtype)

    def _program_id(self, eqn: Any, values: Any, weight: Any) -> list[Any]:
        return [self.ids[eqn.params["axis"]]]

    def _num_programs(self, eqn: Any, values: Any, weight: Any) -> list[Any]:
        return [np.full(self.ids.shape[1], self.grid[eqn.params["axis"]], np.int32)]

    def _get(self, eqn: Any, values: list[Any], weight: Any) -> list[Any] | None:
        """A number of a table."""
        table, index = values[0], values[1:]
        fits = isinstance(table, np.ndarray) and len(index) == table.ndim
        if not fits or eqn.outvars[0].aval.shape or any(i is None for i in index):
            return None
        place = tuple(np.clip(i, 0, n - 1) for i, n in zip(index, table.shape, strict=True))
        return [table[place]]

    def _call(self, eqn: Any, values: list[Any], weight: np.ndarray) -> list[Any] | None:
        inner = next(iter(_inner(eqn)))[0]
        if len(inner.invars) != len(values):
            return None
        env = dict(zip(inner.invars, values, strict=True))
        self.run(inner, env, weight)
        return [self._value(v, env) for v in inner.outvars]

    def _cond(self, eqn: Any, values: list[Any], weight: np.ndarray) -> None:
        which, operands = values[0], values[1:]
        branches = [getattr(b, "jaxpr", b) for b in eqn.params["branches"]]
        full = [i for i, branch in enumerate(branches) if branch.eqns]
        taken = [None if which is None else (which.astype(np.int32) == i) for i in full]
        if len(full) == 1:
            share = None if taken[0] is None else _mean(taken[0], weight)
            self.control.append(None if share is None else Control("branch", share))
        elif len(full) > 1:
            self.control.append(None)  # two bodies: the schedule's branches tell nothing
        for i, chosen in zip(full, taken, strict=True):
            here = weight if chosen is None else weight * chosen
            self.run(branches[i], dict(zip(branches[i].invars, operands, strict=True)), here)

    def _while(self, eqn: Any, values: list[Any], weight: np.ndarray) -> None:
        """A `fori_loop` whose bounds are values."""
        params = eqn.params
        skip = params["cond_nconsts"]
        test, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        consts = values[skip : skip + params["body_nconsts"]]
        carry = values[skip + params["body_nconsts"] :]
        trips: Any = None
        low: Any = None
        index = 0
        if len(test.eqns) == 1 and test.eqns[0].primitive.name == "lt" and not skip:
            place = {v: i for i, v in enumerate(test.invars)}
            ends = [place.get(v) if not hasattr(v, "val") else None for v in test.eqns[0].invars]
            low, high = (None if i is None else carry[i] for i in ends)
            if low is not None and high is not None:
                trips, index = np.maximum(high - low, 0), ends[0] or 0
        self.control.append(None if trips is None else Control("loop", _mean(trips, weight)))
        unknown: list[Any] = [None] * len(carry)
        if trips is None or trips.sum() > _MOST_STEPS:
            env = dict(zip(body.invars, [*consts, *unknown], strict=True))
            self.run(body, env, weight if trips is None else weight * trips)
            return
        # every trip of every grid step is a step of its own, so that the loop's index is known
        step = np.repeat(np.arange(trips.size), trips)
        unknown[index] = low[step] + _counts(trips).astype(low.dtype)
        consts = [c[step] if isinstance(c, np.ndarray) and c.shape == trips.shape else c
                  for c in consts]  # fmt: skip
        inside = _Walk(self.ids[:, step], self.grid, self.control)
        inside.run(body, dict(zip(body.invars, [*consts, *unknown], strict=True)), weight[step])
        self.flops += inside.flops

    def _scan(self, eqn: Any, values: list[Any], weight: np.ndarray) -> None:
        body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        known = values[: _num_consts(eqn.params)]
        rest = [None] * (len(body.invars) - len(known))
        env = dict(zip(body.invars, [*known, *rest], strict=True))
        self.run(body, env, weight * eqn.params["length"])

    def _product(self, eqn: Any, values: list[Any], weight: np.ndarray) -> None:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        depth = math.prod(left[i] for i in contracted)
        self.flops += 2.0 * depth * math.prod(eqn.outvars[0].aval.shape) * float(weight.sum())


def _counts(lengths: np.ndarray) -> np.ndarray:
    """0, 1, .. up to each of the lengths, one after the other."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) - np.repeat(starts, lengths)


def _num_consts(params: Mapping[str, Any]) -> int:
    """Of a scan; JAX 0.12 has a tree of constants, carry and inputs in place of their numbers."""
    if "num_consts" in params:
        return params["num_consts"]
    return len(jax.tree.leaves(params["ft_in"][0], is_leaf=lambda x: x is None))


def _mean(values: np.ndarray, weight: np.ndarray) -> float:
    total = float(weight.sum())
    return float((values * weight).sum() / total) if total else 0.0


def control(kernel: Kernel) -> tuple[list[Control] | None, float | None]:
    """Loops and branches in order, None when one is unknown; and flops of the matrix products."""
    if kernel.steps > _MOST_STEPS:
        return None, None
    ids = np.indices(kernel.grid, np.int32).reshape(len(kernel.grid), -1)
    if not kernel.grid:
        ids = np.zeros((0, 1), np.int32)
    walk = _Walk(ids, kernel.grid)
    env: dict[Any, Any] = dict(zip(kernel.jaxpr.invars, kernel.tables, strict=False))
    walk.run(kernel.jaxpr, env, np.ones(ids.shape[1]))
    unknown = any(c is None for c in walk.control)
    known = [c for c in walk.control if c is not None]
    return (None, None) if unknown else (known, walk.flops)


def example_inputs(spec: Any, args: Any, names: Sequence[str]) -> Mapping[str, np.ndarray]:
    """Representative ids, lengths and tables of a call, by name."""
    made = spec.examples(args)
    return {name: np.asarray(made[name]) for name in names if name in made}
