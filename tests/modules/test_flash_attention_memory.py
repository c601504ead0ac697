"""Nothing of the size of the pairs is kept, forward or backward."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention

TOKENS, HEADS, SIZE = 8192, 4, 64


def temporaries(fn, *avals):
    return jax.jit(fn).lower(*avals).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sliding_window": 512}])
def test_flash_attention_holds_tiles_and_copies_of_its_arrays(options):
    aval = jax.ShapeDtypeStruct((1, TOKENS, HEADS, SIZE), jnp.float32)
    one, pairs = 4 * TOKENS * HEADS * SIZE, 4 * HEADS * TOKENS**2

    def both(q, k, v, dout):
        out, pull = jax.vjp(lambda *x: flash_attention(*x, **options), q, k, v)
        return out, pull(dout)

    forward = temporaries(lambda q, k, v: flash_attention(q, k, v, **options), aval, aval, aval)
    assert forward < 6 * one < pairs / 16
    assert temporaries(both, aval, aval, aval, aval) < 14 * one < pairs / 8
