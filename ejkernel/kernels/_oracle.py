"""Answers of an op's oracle, and the one comparison with them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._spec import OpSpec
from ejkernel.ops.execution import benchmark

_WIDER = {"float32": jnp.float64, "float64": jnp.float64}


@dataclasses.dataclass(frozen=True)
class Answer:
    """Outputs and gradients of a call, as NumPy arrays in float64."""

    outputs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A concrete call with its oracle's answer, and the naive code's in the call's own dtype."""

    args: Any
    cotangents: tuple[jax.Array, ...]
    wanted: tuple[str, ...]
    oracle: Answer
    naive: Answer
    # what gradients would be if nothing cancelled, where an op knows it: see `OpSpec.magnitudes`
    magnitudes: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def compiler_options(target: Any) -> dict[str, Any] | None:
    """How an oracle is compiled for a device.

    XLA tries several kernels for every matrix product on a GPU, which takes longer than the whole
    comparison; the oracle runs once, and needs the right numbers only.
    """
    if target is None or target.kind != "gpu":
        return None
    return {"xla_gpu_autotune_level": 0}


def solve(spec: OpSpec, args: Any, wanted: tuple[str, ...], options: Any = None) -> Problem:
    """Runs the oracle and the naive code on concrete arguments; `options` go to the compiler."""
    outputs = jax.eval_shape(lambda: spec.reference_fn()(args))
    keys = jax.random.split(jax.random.key(5), len(outputs))
    cotangents = tuple(
        jax.random.normal(k, o.shape, jnp.float32).astype(o.dtype)
        for k, o in zip(keys, outputs, strict=True)
    )
    naive, _ = _reference(spec, args, cotangents, wanted, options)
    benchmark.look()
    wider = _WIDER.get(str(_leading_dtype(args)), jnp.float32)
    with jax.enable_x64(True):
        wide_args, wide_cotangents = _cast((args, cotangents), wider)
        oracle, sizes = _reference(spec, wide_args, wide_cotangents, wanted, options, sizes=True)
    return Problem(args, cotangents, wanted, oracle, naive, sizes)


def _leading_dtype(args: Any) -> Any:
    floats = (x.dtype for x in args.arrays().values() if jnp.issubdtype(x.dtype, jnp.floating))
    return next(floats, jnp.dtype(jnp.float32))


def _cast(tree: Any, dtype: Any) -> Any:
    def widen(x: Any) -> Any:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(widen, tree)


def _reference(
    spec: OpSpec,
    args: Any,
    cotangents: Any,
    wanted: tuple[str, ...],
    options: Any,
    sizes: bool = False,
) -> tuple[Answer, dict[str, np.ndarray]]:
    """The answer of the reference and, if asked for, the magnitudes of its gradients."""
    reference = spec.reference_fn()
    magnitudes = spec.magnitudes_fn() if sizes and wanted else lambda *_: {}
    # one compilation is quicker than one for every operation; ids and lengths stay concrete
    traced = {n: x for n, x in args.arrays().items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def both(traced: dict[str, jax.Array], cotangents: tuple[jax.Array, ...]) -> Any:
        here = args.with_arrays(traced)
        outputs, pull = jax.vjp(
            lambda *xs: reference(here.with_arrays(dict(zip(wanted, xs, strict=True)))),
            *(traced[name] for name in wanted),
        )
        pairs = zip(cotangents, outputs, strict=True)
        pulled = pull(tuple(c.astype(o.dtype) for c, o in pairs))
        return outputs, pulled, magnitudes(here, outputs, cotangents)

    outputs, gradients, found = jax.jit(both, compiler_options=options)(traced, cotangents)
    made = answer(spec, args, outputs, dict(zip(wanted, gradients, strict=True)))
    return made, {name: np.asarray(x, np.float64) for name, x in found.items()}


def answer(spec: OpSpec, args: Any, outputs: Any, gradients: dict[str, Any]) -> Answer:
    """An answer from what a kernel returned."""
    names = spec.outputs(args) or tuple(f"out{i}" for i in range(len(outputs)))
    return Answer(
        {n: np.asarray(o, np.float64) for n, o in zip(names, outputs, strict=True)},
        {n: np.asarray(g, np.float64) for n, g in gradients.items()},
    )


def mismatch(actual: Answer, problem: Problem) -> str | None:
    """What is wrong with an answer: errors over twice the naive code's, or other non-finites."""
    eps = float(jnp.finfo(_leading_dtype(problem.args)).eps)
    for kind in ("outputs", "gradients"):
        for name, value in getattr(actual, kind).items():
            oracle, naive = (getattr(x, kind)[name] for x in (problem.oracle, problem.naive))
            size = problem.magnitudes.get(name) if kind == "gradients" else None
            if (reason := compare(value, oracle, naive, eps, size)) is not None:
                return f"{name}: {reason}"
    return None


def compare(
    actual: np.ndarray,
    oracle: np.ndarray,
    naive: np.ndarray,
    eps: float,
    magnitude: np.ndarray | None = None,
) -> str | None:
    """Why an array is not the oracle's; None when it is.

    Rounding errors of numbers as large as `magnitude` are allowed even where the oracle is 0.
    """
    if actual.shape != oracle.shape:
        return f"shape {actual.shape}, not {oracle.shape}"
    finite = np.isfinite(oracle)
    if not np.array_equal(actual[~finite], oracle[~finite], equal_nan=True):
        return "other values where the oracle's are not finite"
    if not np.isfinite(actual[finite]).all():
        return "not finite where the oracle is"
    if not finite.any():
        return None
    actual, oracle, naive = actual[finite], oracle[finite], naive[finite]
    error, allowed, size = np.abs(actual - oracle), np.abs(naive - oracle), np.abs(oracle)
    magnitude = np.zeros(1) if magnitude is None or not magnitude.size else magnitude
    worst = 2 * allowed.max() + eps * max(4 * size.max(), 4e-3, magnitude.max())
    if error.max() > worst:
        return f"error {error.max():.3g}, allowed {worst:.3g}"
    typical = 2 * _rms(allowed) + eps * max(2 * _rms(size), 2e-3, _rms(magnitude))
    if _rms(error) > typical:
        return f"rms error {_rms(error):.3g}, allowed {typical:.3g}"
    return None


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
