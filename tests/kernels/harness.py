"""Oracles, cached for all entries, and the one comparison with them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import kernel_registry
from ejkernel.kernels._spec import Case, OpSpec

# The matrix compiles much and runs little.
QUICK = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
_WIDER = {"float32": jnp.float64, "bfloat16": jnp.float32, "float16": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Answer:
    """Outputs and gradients of a case, as NumPy arrays in float64."""

    outputs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case made concrete, with its oracle and the naive code's answer in the same dtype."""

    args: Any
    cotangents: tuple[jax.Array, ...]
    wanted: tuple[str, ...]
    oracle: Answer
    naive: Answer


def find_case(op: str, name: str) -> Case:
    return next(case for case in kernel_registry.spec(op).cases() if case.name == name)


@functools.cache
def problem(op: str, name: str, dtype: str) -> Problem:
    spec, case = kernel_registry.spec(op), find_case(op, name)
    args = spec.make(case, jnp.dtype(dtype), jax.random.key(11))
    return solve(spec, args, case.grads)


def solve(spec: OpSpec, args: Any, grads: tuple[str, ...] | None = None) -> Problem:
    """Runs the oracle and the naive code on a call."""
    wanted = tuple(n for n in args.arrays() if n in (grads or spec.differentiable))
    reference = spec.reference_fn()
    outputs = jax.eval_shape(lambda: reference(args))
    keys = jax.random.split(jax.random.key(5), len(outputs))
    cotangents = tuple(
        jax.random.normal(k, o.shape, jnp.float32).astype(o.dtype)
        for k, o in zip(keys, outputs, strict=True)
    )
    naive = _answer(spec, args, cotangents, wanted)
    wider = _WIDER[str(args.query.dtype)] if hasattr(args, "query") else jnp.float64
    with jax.enable_x64(True):
        oracle = _answer(spec, *_cast((args, cotangents), wider), wanted)
    return Problem(args, cotangents, wanted, oracle, naive)


def _cast(tree: Any, dtype: Any) -> Any:
    def widen(x: Any) -> Any:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(widen, tree)


def _answer(spec: OpSpec, args: Any, cotangents: Any, wanted: tuple[str, ...]) -> Answer:
    reference = spec.reference_fn()
    arrays = args.arrays()

    def of_wanted(*values: jax.Array) -> tuple[jax.Array, ...]:
        return reference(args.with_arrays(dict(zip(wanted, values, strict=True))))

    def both(*values: jax.Array) -> Any:
        outputs, pull = jax.vjp(of_wanted, *values)
        return outputs, pull(
            tuple(c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True))
        )

    # one compilation is quicker than one for every operation; ids and lengths stay concrete
    point = tuple(arrays[name] for name in wanted)
    outputs, gradients = jax.jit(both, compiler_options=QUICK)(*point)
    return answer(spec, args, outputs, dict(zip(wanted, gradients, strict=True)))


def answer(spec: OpSpec, args: Any, outputs: Any, gradients: dict[str, Any]) -> Answer:
    names = spec.outputs(args) or tuple(f"out{i}" for i in range(len(outputs)))
    return Answer(
        {n: np.asarray(o, np.float64) for n, o in zip(names, outputs, strict=True)},
        {n: np.asarray(g, np.float64) for n, g in gradients.items()},
    )


def run_entry(entry: Any, made: Problem, cfg: Any, **jit_options: Any) -> Answer:
    """Forward and gradients of one entry, in one compiled function."""
    spec = kernel_registry.spec(entry.op)

    def both(args: Any, cotangents: tuple[jax.Array, ...]) -> Any:
        if entry.derivative == "jax":
            point = tuple(args.arrays()[name] for name in made.wanted)
            outputs, pull = jax.vjp(
                lambda *values: entry.fn(
                    args.with_arrays(dict(zip(made.wanted, values, strict=True))), cfg[0]
                )[0],
                *point,
            )
            return outputs, dict(zip(made.wanted, pull(cotangents), strict=True))
        outputs, residuals = entry.fn(args, cfg[0])
        gradients = entry.backward(
            args, cfg[1], outputs, residuals, cotangents, frozenset(made.wanted)
        )
        return outputs, {name: gradients[name] for name in made.wanted}

    outputs, gradients = jax.jit(both, **jit_options)(made.args, made.cotangents)
    for name, gradient in gradients.items():
        array = made.args.arrays()[name]
        assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype), name
    return answer(spec, made.args, outputs, gradients)


def assert_close_to_oracle(actual: Answer, made: Problem, dtype: Any = None) -> None:
    """Errors at most twice the naive code's, and the same values that are not finite."""
    dtype = dtype or made.args.query.dtype
    assert actual.outputs.keys() == made.oracle.outputs.keys()
    for kind in ("outputs", "gradients"):
        for name, value in getattr(actual, kind).items():
            oracle, naive = getattr(made.oracle, kind)[name], getattr(made.naive, kind)[name]
            compare(name, value, oracle, naive, float(jnp.finfo(dtype).eps))


def compare(name: str, actual: np.ndarray, oracle: np.ndarray, naive: np.ndarray, eps: float):
    assert actual.shape == oracle.shape, (name, actual.shape, oracle.shape)
    finite = np.isfinite(oracle)
    np.testing.assert_array_equal(actual[~finite], oracle[~finite], err_msg=name)
    assert np.isfinite(actual[finite]).all(), f"{name}: not finite where the oracle is"
    if not finite.any():
        return
    actual, oracle, naive = actual[finite], oracle[finite], naive[finite]
    error, allowed, size = np.abs(actual - oracle), np.abs(naive - oracle), np.abs(oracle)
    worst = 2 * allowed.max() + 4 * eps * max(size.max(), 1e-3)
    assert error.max() <= worst, f"{name}: error {error.max():.3g}, allowed {worst:.3g}"
    typical = 2 * _rms(allowed) + 2 * eps * max(_rms(size), 1e-3)
    assert _rms(error) <= typical, f"{name}: rms error {_rms(error):.3g}, allowed {typical:.3g}"


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def matrix(tag: str) -> list[Any]:
    """(op, entry name, case name) for every entry and every case with a tag."""
    return [
        (entry.op, entry.name, case.name)
        for op in kernel_registry.ops()
        for entry in kernel_registry.list(op)
        for case in kernel_registry.spec(op).cases()
        if tag in case.tags
    ]


def find_entry(op: str, name: str) -> Any:
    return next(entry for entry in kernel_registry.list(op) if entry.name == name)


def configs(entry: Any, args: Any, kind: str) -> tuple[Any, Any]:
    """Forward and backward configs: the heuristic's, or small blocks that cut test shapes."""
    if entry.config is None:
        return None, None
    if kind == "heuristic":
        return entry.heuristic(args, "forward"), entry.heuristic(args, "backward")
    return entry.config.testing(args, "forward"), entry.config.testing(args, "backward")
