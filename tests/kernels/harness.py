"""Oracles, cached for all entries, and runs of entries to compare with them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _oracle, kernel_registry
from ejkernel.kernels._oracle import Answer, Problem
from ejkernel.kernels._spec import Case, OpSpec
from ejkernel.ops.core.kernel import BACKWARD, FORWARD
from tests.backend import BACKEND
from tests.kernels import oracles

# The matrix compiles much and runs little.
QUICK = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}


def find_case(op: str, name: str) -> Case:
    return next(case for case in kernel_registry.spec(op).cases() if case.name == name)


@functools.cache
def problem(op: str, name: str, dtype: str, seed: int = 11, here: bool = False) -> Problem:
    """A case with its answers, which a CPU makes for GPUs too: its compiler is quicker.

    `here`: the device of this run makes them.
    """
    spec, case = kernel_registry.spec(op), find_case(op, name)
    backend = BACKEND if here else "cpu"

    def make() -> Problem:
        with jax.numpy_rank_promotion("raise"), _on(backend):
            args = spec.make(case, jnp.dtype(dtype), jax.random.key(seed))
            return solve(spec, args, case.grads)

    return oracles.remember((op, name, dtype, seed), backend, make)


def _on(backend: str) -> contextlib.AbstractContextManager[Any]:
    if backend == BACKEND:
        return contextlib.nullcontext()
    return jax.default_device(jax.local_devices(backend=backend)[0])


def solve(spec: OpSpec, args: Any, grads: tuple[str, ...] | None = None) -> Problem:
    """The oracle's answer for a call, with gradients of all that is differentiable."""
    wanted = tuple(n for n in args.arrays() if n in (grads or spec.differentiable))
    return _oracle.solve(spec, args, wanted, QUICK)


def run_entry(entry: Any, made: Problem, cfg: Any, **jit_options: Any) -> Answer:
    """Forward and the gradients that an entry offers, in one compiled function.

    A user may forbid JAX to add axes in front of a shape; no kernel may need that.
    """
    with jax.numpy_rank_promotion("raise"):
        program = jax.jit(program_of(entry, made, cfg), **jit_options)
        outputs, gradients = program(made.args, made.cotangents)
    for name, gradient in gradients.items():
        array = made.args.arrays()[name]
        assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype), name
    return _oracle.answer(kernel_registry.spec(entry.op), made.args, outputs, gradients)


def program_of(entry: Any, made: Problem, cfg: Any, target: Any = None) -> Callable[..., Any]:
    """The function of arguments and cotangents that gives outputs and gradients by name."""
    differentiable = entry.why_not(made.args, target, BACKWARD) is None

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
        if not made.wanted or not differentiable:
            return outputs, {}
        gradients = entry.backward(
            args, cfg[1], outputs, residuals, cotangents, frozenset(made.wanted)
        )
        return outputs, {name: gradients[name] for name in made.wanted}

    return both


def assert_close_to_oracle(actual: Answer, made: Problem) -> None:
    """Errors at most twice the naive code's, and the same values that are not finite."""
    assert actual.outputs.keys() == made.oracle.outputs.keys()
    reason = _oracle.mismatch(actual, made)
    assert reason is None, reason


def pooled(draws: Sequence[tuple[Answer, Problem]]) -> tuple[Answer, Problem]:
    """The first draw, with its smallest arrays those of all draws.

    Of two or three numbers the naive code may get all right to the last bit by luck, which says
    nothing of its typical error: the bound is then taken over several draws of the inputs.
    """

    def joined(pick: Any) -> Answer:
        first, *rest = [pick(draw) for draw in draws]
        join = lambda kind: {
            name: np.stack([value, *(getattr(other, kind)[name] for other in rest)])
            if value.size < 64
            else value
            for name, value in getattr(first, kind).items()
        }
        return Answer(join("outputs"), join("gradients"))

    made = draws[0][1]
    oracle, naive = joined(lambda draw: draw[1].oracle), joined(lambda draw: draw[1].naive)
    return joined(lambda draw: draw[0]), dataclasses.replace(made, oracle=oracle, naive=naive)


def interpreted(entry: Any) -> bool:
    """Whether an entry runs here in an interpreter, which is slow."""
    here = ("any", BACKEND)
    return entry.backend not in here and entry.platform in ("triton", "pallas", "cuda")


def instead(op: str, entry_name: str) -> str | None:
    """The case that `make test` runs of a kernel that refuses `cover00`, everything at once."""
    cases = {
        ("blocksparse_attention", "pallas/tpu"): "causal_window_sinks",
        ("linear_recurrence", "triton/gpu"): "packed_reverse",
    }
    return cases.get((op, entry_name))


def computes_first(entry: Any) -> bool:
    """Whether an entry of a derived op computes arrays of the base, and their gradients back."""
    return entry.base is not None and bool(kernel_registry.spec(entry.op).lowers_to.made)


def is_schedule(entry: Any) -> bool:
    """Whether an entry calls an entry of another op, whose cases are its own tests."""
    return hasattr(getattr(entry.fn, "__self__", None), "inner")


def marks(entry: Any, quick: bool = True) -> list[Any]:
    """The device that an entry needs; what is not quick is left out where it is interpreted."""
    if entry.backend in ("any", BACKEND):
        return []
    if interpreted(entry):
        return [] if quick else [pytest.mark.slow]
    return [getattr(pytest.mark, str(entry.backend))]


def matrix(tag: str) -> list[tuple[str, str, str]]:
    """(op, entry name, case name) for every entry and every case with a tag."""
    return [
        (entry.op, entry.name, case.name)
        for op in kernel_registry.ops()
        for entry in kernel_registry.list(op)
        for case in kernel_registry.spec(op).cases()
        if tag in case.tags
    ]


def marked(rows: Sequence[tuple[str, ...]], quick: bool = True) -> list[Any]:
    """Rows that begin with op and entry name, as parameters of a test."""
    return [pytest.param(*row, marks=marks(find_entry(*row[:2]), quick)) for row in rows]


def find_entry(op: str, name: str) -> Any:
    return next(entry for entry in kernel_registry.list(op) if entry.name == name)


def configs(entry: Any, args: Any, kind: str, target: Any = None) -> tuple[Any, Any]:
    """Forward and backward configs: the heuristic's, or small blocks that cut test shapes."""
    if entry.config is None:
        return None, None
    if kind == "heuristic":
        return tuple(entry.heuristic(args, d, target) for d in (FORWARD, BACKWARD))
    return entry.config.testing(args, FORWARD), entry.config.testing(args, BACKWARD)
