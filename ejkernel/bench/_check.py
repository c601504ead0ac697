"""Numbers before times: ours against the oracle, and everybody against the first of ours."""

import threading
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.bench._programs import Call
from ejkernel.bench._workloads import BOTH
from ejkernel.kernels import _oracle, kernel_registry
from ejkernel.ops.core.kernel import BACKWARD, FORWARD

# relative to the largest value of an array
_TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
_SIZES = ("block_q", "block_k", "block_m", "block_t")
# On a CPU the oracle spends most of its time in the compiler.
_QUICK = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}


class _Solved(threading.local):
    """The oracle's arrays of one call, which are enough for a thread to keep."""

    key: str = ""
    problem: _oracle.Problem | None = None


_solved = _Solved()
# what was said of a kernel on calls that are the same once they are small
_said: dict[tuple[Any, str], str | None] = {}
_begun: set[tuple[Any, str]] = set()  # what is compared, or was, before its row
_lock = threading.Lock()  # of `_begun`


def against_oracle(
    call: Call, entry: Any, mode: str, target: Any, chosen: dict[str, Any]
) -> str | None:
    """Why an entry's numbers are wrong; None when they are right, or cannot be compared yet.

    Compares on a small call with the same options, or on the call itself where there is none, with
    the configurations that were `chosen` for the call, by direction. A call without data is
    compared for the memory of later ones: not where there is no small call, and not where another
    thread does it already.
    """
    spec = kernel_registry.spec(call.op)
    block = max(16, *(getattr(c, name, 1) for c in chosen.values() for name in _SIZES), 16)
    args = spec.reduced(call.args, block) or _small(spec, call)
    wanted = ()
    if mode == BOTH:
        wanted = tuple(n for n in args.arrays() if n in spec.differentiable)
    configs = _fitting(entry, args, chosen, target)
    key = (entry.fn, str((configs, _key(spec, args, wanted))))
    if not call.has_data and (args is call.args or not _begin(key)):
        return None
    if key not in _said or args is call.args:
        problem = _solve(spec, args, wanted, target)
        outputs, gradients = _run(entry, problem, configs)
        answer = _oracle.answer(spec, problem.args, outputs, gradients)
        _said[key] = _oracle.mismatch(answer, problem)
    return _said[key]


def _begin(key: tuple[Any, str]) -> bool:
    """Whether nobody has begun with this question before."""
    with _lock:
        new = key not in _begun and key not in _said
        _begun.add(key)
    return new


def _fitting(entry: Any, args: Any, chosen: dict[str, Any], target: Any) -> dict[str, Any]:
    """The chosen configurations; the entry's own guess where there is none that fits."""
    made = {}
    for direction in (FORWARD, BACKWARD):
        fits = direction in chosen
        fits = fits and entry.misfit(args, direction, chosen[direction], target) is None
        guess = entry.heuristic(args, direction, target)
        made[direction] = chosen[direction] if fits else guess
    return made


def _small(spec: Any, call: Call) -> Any:
    """A benchmark case that is made for comparing, with the options of a call; else the call."""
    for case in spec.work.benchmarks() if spec.work is not None else ():
        if "check" in case.tags:
            made = spec.make(case, jnp.dtype(call.workload.dtype), jax.random.key(2))
            if made.statics() == call.args.statics():
                return made
    return call.args


def _key(spec: Any, args: Any, wanted: tuple[str, ...]) -> str:
    """Tells small calls apart, whose numbers are drawn from their shapes and options."""
    shapes = {n: (x.shape, str(x.dtype)) for n, x in args.arrays().items()}
    return str((spec.name, wanted, shapes, args.statics()))


def _solve(spec: Any, args: Any, wanted: tuple[str, ...], target: Any) -> _oracle.Problem:
    key = _key(spec, args, wanted)
    if _solved.problem is None or _solved.key != key:
        options = _QUICK if target.kind == "cpu" else _oracle.compiler_options(target)
        _solved.problem = None  # makes room before the next one is solved
        _solved.key, _solved.problem = key, _oracle.solve(spec, args, wanted, options)
    return _solved.problem


def _run(entry: Any, problem: _oracle.Problem, cfg: dict[str, Any]) -> Any:
    """Outputs and gradients of an entry."""
    args, wanted = problem.args, frozenset(problem.wanted)

    @jax.jit
    def run(args: Any, cotangents: Any) -> Any:
        if not wanted:
            return entry.fn(args, cfg[FORWARD])[0], {}
        if entry.derivative == "jax":
            point = {name: args.arrays()[name] for name in wanted}
            outputs, pull = jax.vjp(
                lambda some: tuple(entry.fn(args.with_arrays(some), cfg[FORWARD])[0]), point
            )
            return outputs, pull(tuple(cotangents))[0]
        outputs, residuals = entry.fn(args, cfg[FORWARD])
        return outputs, entry.backward(args, cfg[BACKWARD], outputs, residuals, cotangents, wanted)

    outputs, gradients = run(args, problem.cotangents)
    return outputs, {name: gradients[name] for name in problem.wanted if name in gradients}


def disagreement(actual: Any, expected: Any, tolerance: float | None = None) -> str | None:
    """Why two results are not the same to what their dtype allows; compared on the device."""
    ours, theirs = jax.tree.leaves(actual), jax.tree.leaves(expected)
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return f"gives {[x.shape for x in ours]}, not {[x.shape for x in theirs]}"
    for index, (a, e) in enumerate(zip(ours, theirs, strict=True)):
        allowed = tolerance or _TOLERANCES.get(str(e.dtype), 0.0)
        error, limit = _errors(a, e)
        limit = allowed * max(limit, 1e-30)
        if not error <= limit:
            return f"result {index} is off by {error:.3g}, at most {limit:.3g} is allowed"
    return None


@jax.jit
def _errors(a: jax.Array, e: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest difference where the expected value is finite, and the largest value."""
    finite = jnp.isfinite(e)
    a, e = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (a, e))
    difference = jnp.where(finite, jnp.abs(a - jnp.where(finite, e, 0)), a != e)
    # a nan of ours must not pass as small
    difference = jnp.where(jnp.isnan(a) & finite, jnp.inf, difference)
    largest = jnp.where(finite, jnp.abs(e), 0).max(initial=0)
    return difference.max(initial=0), largest
