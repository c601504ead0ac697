"""`attention_fn` for flax's `MultiHeadDotProductAttention`, of linen and of NNX.

Needs: pip install ejkernel flax

Pass it to the layer and everything else stays as it is. Run as a script, it compares both layers
with flax's own function. Two things differ from that function: a query that sees no key gives 0
instead of the mean of the values, and dropout draws other random numbers.
"""

import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from ejkernel.modules import flash_attention
from ejkernel.ops import policy_override
from ejkernel.types import MaskInfo


def attention_fn(  # noqa: PLR0913
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
) -> jax.Array:
    """`flash_attention` with the arguments of flax's `dot_product_attention`."""
    if module is not None:
        raise ValueError("`attention_fn` has no weights to sow; call with `sow_weights=False`.")
    if precision is not None:
        raise ValueError(
            f"`attention_fn` takes no `precision`, got {precision!r}; use "
            "`jax.default_matmul_precision` around the call."
        )
    dropout = 0.0 if deterministic else dropout_rate
    if dropout and broadcast_dropout:
        raise ValueError(
            "`attention_fn` drops weights of each batch row and head apart; pass "
            "`broadcast_dropout=False` to the layer."
        )
    seed = jax.random.bits(dropout_rng, (2,), jnp.uint32) if dropout else None
    dtype = dtype or jnp.result_type(query, key, value)
    batch, (t, s) = query.shape[:-3], (query.shape[-3], key.shape[-3])
    # flax takes any number of batch axes, flash_attention one
    q, k, v = (x.astype(dtype).reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    # flax aligns the first query with the first key; with t == s that is what `causal` does
    positions = MaskInfo().apply_positions(jnp.arange(t)[None]) if is_causal and t != s else None
    out = flash_attention(
        q,
        k,
        v,
        attention_mask=_rank_4(None if mask is None else mask != 0, batch),
        bias=_rank_4(None if bias is None else bias.astype(dtype), batch),
        causal=is_causal,
        dropout_prob=dropout,
        dropout_seed=seed,
        mask_info=positions,
    )
    return out.reshape(*batch, *out.shape[-3:])


def _rank_4(x: jax.Array | None, batch: tuple[int, ...]) -> jax.Array | None:
    """A mask or bias that broadcasts to [batch..., h, t, s] as [b or 1, h, t, s]."""
    if x is None:
        return None
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    if any(n > 1 for n in x.shape[:-3]):
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
    return x.reshape(-1, *x.shape[-3:])


def compare_linen(x: jax.Array, mask: jax.Array) -> float:
    """Largest difference between linen's layer with its own function and with this one."""
    theirs = nn.MultiHeadDotProductAttention(num_heads=4)
    ours = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn)
    params = theirs.init(jax.random.key(1), x)
    results = [layer.apply(params, x, mask=mask) for layer in (theirs, ours)]
    return float(jnp.abs(results[0] - results[1]).max())


def compare_nnx(x: jax.Array, mask: jax.Array) -> float:
    """The same for NNX."""
    options = {"num_heads": 4, "in_features": x.shape[-1], "decode": False}
    theirs = nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(1))
    ours = nnx.MultiHeadAttention(**options, attention_fn=attention_fn, rngs=nnx.Rngs(1))
    return float(jnp.abs(theirs(x, mask=mask) - ours(x, mask=mask)).max())


def main() -> int:
    x = jax.random.normal(jax.random.key(0), (2, 24, 32))
    mask = nn.make_causal_mask(jnp.ones((2, 24)))
    with policy_override(autotune=False):  # measuring takes longer than this comparison
        differences = {"linen": compare_linen(x, mask), "nnx": compare_nnx(x, mask)}
    for name, difference in differences.items():
        print(f"{name}: outputs differ by {difference:.1e}")
    return int(max(differences.values()) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
