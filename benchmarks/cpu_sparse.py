"""`blocksparse_attention` on CPU beside our dense `flash_attention`: what leaving blocks out saves.

An eighth of the blocks is listed. The peer computes every block, without a mask: its answer is
another, so agreement is tested with a mask of all blocks.
"""

import functools

import common
import jax
import jax.numpy as jnp

from ejkernel.modules import block_mask, blocksparse_attention, flash_attention
from ejkernel.ops import policy_override

_TOKENS, _HEADS, _DIM = 4096, 8, 64


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (1, _TOKENS, _HEADS, _DIM)) for key in keys]


def table(size, heads):
    """An eighth of the blocks, chosen at random for each row of blocks (and head)."""
    count = _TOKENS // size // 8
    tables = [
        block_mask.random(count, seed).build(_TOKENS, _TOKENS, size) for seed in range(heads or 1)
    ]
    return jnp.stack(tables) if heads else jnp.asarray(tables[0])


def program(fn, backward):
    both = common.with_gradient(fn, 3)
    return both if backward else lambda q, k, v, *rest: fn(q, k, v, *rest[:-1])


def check(size):
    xs = [x[:, :1024, :2] for x in arrays()]
    everything = jnp.ones((1024 // size, 1024 // size), bool)
    ours = lambda q, k, v: blocksparse_attention(q, k, v, everything, size)
    common.agree(jax.jit(program(ours, True))(*xs), jax.jit(program(flash_attention, True))(*xs))


def make(size, heads, backward):
    check(size)
    mask = table(size, heads)
    ours = lambda q, k, v, mask: blocksparse_attention(q, k, v, mask, size)
    peer = lambda q, k, v, mask: flash_attention(q, k, v)
    *xs, dout = arrays()
    return program(ours, backward), program(peer, backward), [*xs, mask, dout]


def comparisons():
    made = []
    for size in (64, 128):
        for heads in (0, _HEADS):
            for backward in (False, True):
                label = f"block {size}, {'a mask a head' if heads else 'one mask'}"
                label += ", fwd+bwd" if backward else ", fwd"
                made.append(
                    common.Comparison(
                        label,
                        # heads that share no mask share no tile, and small products use one core
                        2.5 if size == 64 and heads else 3.0,
                        functools.partial(make, size, heads, backward),
                        tolerance=1e6,  # see above
                    )
                )
    return made


if __name__ == "__main__":
    with policy_override(autotune=False):
        common.main(
            __doc__,
            "cpu_sparse",
            f"batch 1, {_TOKENS} tokens, {_HEADS} heads, d={_DIM}, float32, 1/8 of the blocks; ms",
            comparisons(),
        )
