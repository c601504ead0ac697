"""Long sums that keep their digits on every device."""

import jax
import jax.numpy as jnp


def by_head(x: jax.Array) -> jax.Array:
    """The sum of [b, t, h, x] over everything but heads, [h], in pairs of pairs.

    On a CPU XLA adds the numbers of a reduction one after the other, and rounds each time to the
    digits of what it has by then. Numbers of either sign, as the gradients by all tokens of a gate
    that they share, may then lose more than they had; sums of pairs are short.
    """
    x = jnp.moveaxis(x.sum(axis=3), 2, 0)  # [h, b, t]
    x = x.reshape(x.shape[0], -1)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        pairs = x[:, :half] + x[:, half : 2 * half]
        x = jnp.concatenate([pairs, x[:, 2 * half :]], axis=1)
    return x.sum(axis=1)
