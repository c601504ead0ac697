"""What a TPU has no room for: tables in scalar memory are refused before the compiler does."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel import _settings
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.tpu._blocks import capacity, grid
from ejkernel.modules import mean_pooling
from tests.kernels import harness

MOST = 960 * 256  # numbers of 4 bytes


def why_not(op, arrays, **options):
    """The entry's own reason; nothing of the arrays is made."""
    spec, entry, found = kernel_registry.spec(op), harness.find_entry(op, "pallas/tpu"), []

    def ask(arrays):
        found.append(
            entry.requires(spec.canonicalize(spec.unpack(spec.complete(arrays | options))))
        )

    dtypes = {"sparsity_mask": jnp.bool_}
    ids = ("cu_seqlens", "group_sizes", "q_segment_ids", "kv_segment_ids")
    dtypes |= dict.fromkeys(ids, jnp.int32)
    jax.eval_shape(
        ask, {n: jax.ShapeDtypeStruct(s, dtypes.get(n, jnp.bfloat16)) for n, s in arrays.items()}
    )
    return found[0]


def attention(*shape):
    return dict.fromkeys(("query", "key", "value"), shape)


def ids(*shape):
    return dict.fromkeys(("q_segment_ids", "kv_segment_ids"), shape)


ROWS, M = 1 << 22, 1 << 20
# op, arrays that fit, arrays that do not, options
CALLS = {
    "pooled rows": ("mean_pooling", {"inputs": (4, MOST, 8)}, {"inputs": (4, MOST + 4, 8)}, 4),
    "packed rows": (
        "mean_pooling",
        {"inputs": (1, M, 8), "cu_seqlens": (9,)},
        {"inputs": (1, M, 8), "cu_seqlens": (M,)},
        None,
    ),
    "groups": (
        "grouped_matmul",
        {"lhs": (ROWS, 8), "rhs": (8, 8, 8), "group_sizes": (8,)},
        {"lhs": (4 * ROWS, 8), "rhs": (8, 8, 8), "group_sizes": (8,)},
        None,
    ),
    "steps": ("linear_recurrence", attention(1, M, 2, 8), attention(1, 4 * M, 2, 8), None),
    "bounds": ("flash_attention", attention(64, M, 2, 8), attention(1, 8 * M, 2, 8), None),
    "bounds of ids": (
        "flash_attention",
        attention(1, M, 2, 8) | ids(1, M),
        attention(64, M, 2, 8) | ids(64, M),
        None,
    ),
    "lists": (
        "blocksparse_attention",
        attention(2, 1 << 15, 128, 8) | {"sparsity_mask": (2, 128, 256, 256)},
        attention(8, 1 << 15, 128, 8) | {"sparsity_mask": (8, 128, 256, 256)},
        128,
    ),
}


@pytest.mark.parametrize(("op", "fits", "does_not", "size"), CALLS.values(), ids=list(CALLS))
def test_tables_beyond_scalar_memory_are_refused(op, fits, does_not, size):
    name = "chunk_size" if op == "mean_pooling" else "block_size"
    options = {} if size is None else {name: size}
    assert why_not(op, fits, **options) is None
    assert f"at most {MOST} numbers" in str(why_not(op, does_not, **options))


def test_the_rule():
    assert capacity.smem_refusal(MOST) is None
    assert "scalar memory" in str(capacity.smem_refusal(MOST + 1))


def test_a_platform_by_name_refuses_and_auto_does_not():
    x = jax.ShapeDtypeStruct((1, MOST + 1, 8), jnp.float32)
    pool = lambda platform: lambda x: mean_pooling(x, chunk_size=1, platform=platform)
    with _settings.override(interpret=True):
        with pytest.raises(UnsupportedError, match="scalar memory"):
            jax.eval_shape(pool("pallas"), x)
        assert jax.eval_shape(pool("auto"), x).shape == (1, MOST + 1, 8)


def test_blocks_that_a_caller_insists_on_are_checked_too():
    """Scalars and both buffers of a block in scalar memory count with the table."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def run(numbers):
        operands = grid.Operands()
        operands.add_scalars("scalars", jnp.zeros(16))
        spec = pl.BlockSpec((None, 1, 8), lambda i, table: (i, 0, 0), memory_space=pltpu.SMEM)
        operands.add("list", jnp.zeros((2, 1, 8), jnp.int32), spec)
        out = {"out": (jax.ShapeDtypeStruct((8, 128), jnp.float32), pl.BlockSpec((8, 128)))}
        return operands.run(
            "kernel", lambda refs: None, jnp.zeros(numbers, jnp.int32), out, {}, (2,), 1
        )

    jax.eval_shape(lambda: run(MOST - 32))
    with pytest.raises(UnsupportedError, match=f"got {MOST + 1}"):
        jax.eval_shape(lambda: run(MOST - 31))
