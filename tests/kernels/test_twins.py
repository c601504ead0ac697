"""The tuner's gate: every op has a small twin of a call, and a wrong candidate is caught on it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels import _op_kernel, kernel_registry
from ejkernel.ops.core.kernel import BACKWARD, Invocation

OPS = kernel_registry.ops()
DIFFERENTIABLE = [
    op
    for op in OPS
    if kernel_registry.spec(op).differentiable
    and any(e.name == "xla/any" and e.backward is not None for e in kernel_registry.list(op))
]


@functools.cache
def first_call(op):
    spec = kernel_registry.spec(op)
    return spec.make(spec.cases()[0], jnp.float32, jax.random.key(1))


def candidate(op, **more):
    """An invocation of the op's first case, and XLA's kernel for it."""
    inv = Invocation(kernel=_op_kernel.RegisteredKernel(op), call=first_call(op), **more)
    found = inv.kernel.implementations(inv)
    return inv, next(i for i in found if i.name == "xla/any")


def off_by_a_percent(forward):
    """A forward whose first output is wrong."""

    def wrong(args, cfg):
        (first, *rest), residuals = forward(args, cfg)
        return (first * 1.01, *rest), residuals

    return wrong


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_output_is_caught(op):
    assert kernel_registry.spec(op).twin is not None
    inv, right = candidate(op)
    config = right.heuristic(inv.call, "forward")
    wrong = dataclasses.replace(right, forward=off_by_a_percent(right.forward))
    assert inv.kernel.check_candidate(inv, right, config) is None
    reason = inv.kernel.check_candidate(inv, wrong, config)
    assert reason is not None
    assert "error" in reason


# those whose oracle compiles soonest; the gate itself is the same for all
QUICK = ("flash_attention", "grouped_matmul", "gla", "mean_pooling", "recurrent", "sparse_matmul")


@pytest.mark.parametrize(
    "op",
    [op if op in QUICK else pytest.param(op, marks=pytest.mark.slow) for op in DIFFERENTIABLE],
)
def test_a_wrong_gradient_is_caught(op):
    spec = kernel_registry.spec(op)
    wanted = frozenset(n for n in first_call(op).arrays() if n in spec.differentiable)
    inv, right = candidate(op, direction=BACKWARD, wanted=wanted)
    first = min(wanted)

    def backward(*operands):
        found = dict(right.backward(*operands))
        return found | {first: found[first] * 1.01}

    config = right.heuristic(inv.call, BACKWARD)
    assert inv.kernel.check_candidate(inv, right, config) is None
    wrong = dataclasses.replace(right, backward=backward)
    reason = inv.kernel.check_candidate(inv, wrong, config)
    assert reason is not None
    assert reason.startswith(f"{first}: ")


# Sizes of twins


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def ints(*sizes):
    return shape(*sizes, dtype=jnp.int32)


def floats(*sizes):
    return shape(*sizes, dtype=jnp.float32)


QKV = {
    "query": shape(4, 2051, 16, 64),
    "key": shape(4, 1030, 4, 64),
    "value": shape(4, 1030, 4, 96),
}
RECURRENT = {
    "inputs": shape(32, 1003, 40),
    "hidden": shape(32, 24),
    "cell": shape(32, 24),
    "w_ih": shape(1, 96, 40),
    "w_hh": shape(1, 96, 24),
    "b_ih": shape(1, 96),
    "b_hh": None,
    "weights": None,
    "lengths": ints(32),
    "activation": "relu",
}
# op -> arguments of a large call, and shapes of its twin's arrays
LARGE = {
    "attention": (
        QKV
        | {"q_segment_ids": ints(4, 2051), "kv_segment_ids": ints(4, 1030)}
        | {"softmax_scale": 0.1, "sliding_window": (9, 0), "causal": True},
        {"query": (1, 2051 % 128 + 256, 16, 64), "value": (1, 1030 % 128 + 256, 4, 96)},
    ),
    "grouped_matmul": (
        {"lhs": shape(5003, 64), "rhs": shape(60, 96, 64), "group_sizes": ints(64)}
        | {"group_offset": ints(), "transpose_rhs": True, "preferred_element_type": "float32"},
        {"lhs": (5003 % 128 + 256, 64), "rhs": (4, 96, 64), "group_sizes": (4,)},
    ),
    "mean_pooling": (
        {"inputs": shape(7, 5003, 12, 32), "mask": shape(7, 5003, dtype=bool), "chunk_size": 50},
        {"inputs": (2, 153, 2, 32), "mask": (2, 153)},
    ),
    "merge_attention_states": (
        {"out_a": shape(3, 2051, 8, 64), "out_b": shape(3, 2051, 8, 64)}
        | {"lse_a": floats(3, 8, 2051), "lse_b": floats(3, 8, 2051)},
        {"out_a": (1, 2051 % 128 + 256, 2, 64), "lse_b": (1, 2, 2051 % 128 + 256)},
    ),
    "recurrent": (RECURRENT, {"inputs": (2, 1003 % 128 + 256, 40), "hidden": (2, 24)}),
    "sampled_matmul": (
        {"lhs": shape(4003, 48), "rhs": shape(48, 3001), "rows": ints(700), "cols": ints(700)}
        | {"block_size": 32},
        {"lhs": (99, 48), "rhs": (48, 121), "rows": (9,)},
    ),
    "sparse_matmul": (
        {"blocks": shape(700, 32, 32), "rows": ints(700), "cols": ints(700)}
        | {"dense": shape(3001, 48), "shape": (4003, 3001)},
        {"blocks": (9, 32, 32), "dense": (121, 48)},
    ),
}


@pytest.mark.parametrize("op", LARGE)
def test_a_twin_is_small_and_keeps_options_dtypes_and_features(op):
    values, shapes = LARGE[op]
    spec = kernel_registry.spec(op)
    call = spec.args(**values)
    twin = spec.reduced(call, 128)
    for name, expected in shapes.items():
        assert getattr(twin, name).shape == expected
    options = call.statics() | ({"shape": (99, 121)} if op == "sparse_matmul" else {})
    assert twin.statics() == options
    dtypes = lambda args: {name: x.dtype for name, x in args.arrays().items()}
    assert dtypes(twin) == dtypes(call)
    assert sum(x.size for x in twin.arrays().values()) < 800_000


def test_the_twin_of_a_small_call_has_its_shapes():
    for op in LARGE:
        call = first_call(op)
        twin = kernel_registry.spec(op).reduced(call, 128)
        for name, array in call.arrays().items():
            assert all(m <= n for m, n in zip(twin.arrays()[name].shape, array.shape, strict=True))


def test_oracles_over_pages_repeat_no_keys_for_heads():
    """XLA's compiler for GPUs took minutes where each of 128 heads had a copy of all keys."""
    heads, size, tokens = 128, 4, 2
    spec = kernel_registry.spec("mla_page_attention")
    values = {
        "q_nope": jnp.ones((tokens, heads, 16)),
        "q_pe": jnp.ones((tokens, heads, 8)),
        "kv_pages": jnp.ones((3, size, 24)),
        "context_lens": jnp.asarray([5, 7], jnp.int32),
        "block_tables": jnp.asarray([[0, 1], [2, 1]], jnp.int32),
        "query_start_loc": jnp.arange(3, dtype=jnp.int32),
        "num_seqs": jnp.asarray([2], jnp.int32),
        "softmax_scale": 1.0,
    }
    args = spec.canonicalize(spec.complete(values))
    run = lambda pages: spec.reference_fn()(dataclasses.replace(args, kv_pages=pages))
    made = jax.make_jaxpr(run)(args.kv_pages)
    largest = max(x.aval.size for eqn in made.jaxpr.eqns for x in eqn.outvars)
    assert largest == tokens * heads * 24  # the queries
