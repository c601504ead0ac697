"""Random calls of every op, of which every kernel that serves them must give the oracle's numbers.

`make test` only traces one call of each op; `make test-all` computes a few. For a hunt:
`pytest tests/kernels/test_random_calls.py -m slow --random-calls 50 --random-seed 1000 --op OP`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _oracle, kernel_registry
from ejkernel.kernels._oracle import Answer
from ejkernel.ops.core.kernel import BACKWARD
from tests.kernels import harness, random_calls

# kernels that run here, in an interpreter or compiled
HERE = ("xla/any", "xla/any@-1", "triton/gpu", "pallas/tpu")
OPS = kernel_registry.ops()
KINDS = ("testing", "heuristic")
# calls of two dtypes, whose gradients have a third
MIXED = {"grouped_matmul": (4, 10)}


def pytest_generate_tests(metafunc):
    if "seed" not in metafunc.fixturenames:
        return
    first, count = (metafunc.config.getoption(f"--random-{n}") for n in ("seed", "calls"))
    rows = []
    for op in OPS:
        if metafunc.function is test_no_kernel_needs_implicit_promotion:
            derived = kernel_registry.spec(op).lowers_to is not None
            late = [pytest.mark.slow] if derived else []
            rows += [pytest.param(op, seed, marks=late) for seed in MIXED.get(op, (1,))]
        else:
            rows += [pytest.param(op, seed) for seed in range(first, first + count)]
    metafunc.parametrize(("op", "seed"), rows)


def serving(op, args):
    entries = (e for e in kernel_registry.list(op) if e.name in HERE)
    return [e for e in entries if e.why_not(args) is None]


def both(entry, args, cfg, wanted):
    """Outputs and gradients, for shapes and dtypes alone."""
    outputs, residuals = entry.fn(args, cfg[0])
    if entry.derivative == "jax" or not wanted or entry.why_not(args, direction=BACKWARD):
        return outputs, {}
    ones = tuple(map(jnp.ones_like, outputs))
    made = entry.backward(args, cfg[1], outputs, residuals, ones, frozenset(wanted))
    return outputs, {name: made[name] for name in wanted}


def test_no_kernel_needs_implicit_promotion(op, seed):
    """Nor axes that JAX puts in front of a shape; results have the shapes and dtypes promised."""
    args, spec = random_calls.make(op, seed).args, kernel_registry.spec(op)
    wanted = tuple(name for name in args.arrays() if name in spec.differentiable)
    promised = jax.eval_shape(lambda: spec.reference_fn()(args))
    kind = lambda x: (x.shape, x.dtype)
    for entry in serving(op, args):
        cfg = harness.configs(entry, args, "testing")
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            trace = lambda args, entry=entry, cfg=cfg: both(entry, args, cfg, wanted)
            outputs, gradients = jax.eval_shape(trace, args)
        assert list(map(kind, outputs)) == list(map(kind, promised)), entry.name
        for name, gradient in gradients.items():
            assert kind(gradient) == kind(args.arrays()[name]), (entry.name, name)


def solve(op, seed, data=0):
    spec = kernel_registry.spec(op)
    with jax.numpy_rank_promotion("raise"):
        return harness.solve(spec, random_calls.make(op, seed, data=data).args)


def together(draws):
    """All draws of one call's numbers, stacked: an error is compared with the typical one."""

    def joined(pick):
        found = [pick(draw) for draw in draws]
        stack = lambda kind: {
            n: np.stack([getattr(x, kind)[n] for x in found]) for n in getattr(found[0], kind)
        }
        return Answer(stack("outputs"), stack("gradients"))

    made = draws[0][1]
    oracle, naive = joined(lambda draw: draw[1].oracle), joined(lambda draw: draw[1].naive)
    return joined(lambda draw: draw[0]), dataclasses.replace(made, oracle=oracle, naive=naive)


def without_cancelled(actual, made):
    """The answer without gradients that are nothing but rounding errors, as of a single key.

    They have no size to compare an error with; they must still be small.
    """
    eps = float(jnp.finfo(_oracle._leading_dtype(made.args)).eps)
    kept = dict(actual.gradients)
    for name, gradient in made.oracle.gradients.items():
        nothing = np.abs(gradient).max(initial=0.0) < 1e-2 * eps
        if name in kept and nothing and np.abs(kept[name]).max(initial=0.0) < 300 * eps:
            del kept[name]
    return dataclasses.replace(actual, gradients=kept)


@pytest.mark.slow
def test_matches_oracle(op, seed):
    made = solve(op, seed)
    for entry in serving(op, made.args):
        cfg = lambda args, entry=entry: harness.configs(entry, args, KINDS[seed % len(KINDS)])
        run = lambda x, entry=entry, cfg=cfg: harness.run_entry(
            entry, x, cfg(x.args), compiler_options=harness.QUICK
        )
        actual, problem = run(made), made
        if _oracle.mismatch(actual, made) is not None:
            more = [solve(op, seed, data) for data in range(1, 5)]
            actual, problem = together([(actual, made), *((run(x), x) for x in more)])
        reason = _oracle.mismatch(without_cancelled(actual, problem), problem)
        assert reason is None, (entry.name, reason, random_calls.make(op, seed).chosen)
