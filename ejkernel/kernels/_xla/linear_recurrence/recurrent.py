"""A chunk token by token, and its gradients: the states of one chunk are kept, of no other."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._xla._blocks import chunks
from ejkernel.kernels._xla.linear_recurrence.chunk import Operands, fade, repeat, row_sums


def run(h: jax.Array, x: Operands, exact: Any) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk, and its outputs [b, h, c, e]."""

    def step(h: jax.Array, x: Operands) -> tuple[jax.Array, jax.Array]:
        h = fade(h, *_decays(x)) + _outer(x.k, x.v)
        return h, jnp.einsum("bhd,bhde->bhe", x.q, h, precision=exact)

    h, out = chunks.scan(step, h, _tokens(x))
    return h, _chunk(out)


def gradients(
    h: jax.Array, dh: jax.Array, x: Operands, dout: jax.Array, exact: Any, gated: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Of the state before, and of q, k, v and log gates if those are wanted."""
    tokens, dout = _tokens(x), jnp.moveaxis(dout, 2, 0)

    def again(h: jax.Array, xs: Any) -> Any:
        x, dout = xs
        kept = fade(h, *_decays(x))
        h = kept + _outer(x.k, x.v)
        return h, (kept if gated else None, jnp.einsum("bhde,bhe->bhd", h, dout, precision=exact))

    def back(dh: jax.Array, xs: Any) -> Any:
        x, dout, kept = xs
        dh = dh + _outer(x.q, dout)
        made = {
            "k": jnp.einsum("bhde,bhe->bhd", dh, x.v, precision=exact),
            "v": jnp.einsum("bhde,bhd->bhe", dh, x.k, precision=exact),
        }
        if gated and x.a is not None:
            made["a"] = row_sums(dh * kept)[..., 0]
            if x.a.shape[-1] == 1:
                made["a"] = row_sums(made["a"])
        if gated and x.b is not None:
            made["b"] = (dh * kept).sum(axis=-2)
        return fade(dh, *_decays(x)), made

    _, (kept, dq) = chunks.scan(again, h, (tokens, dout))
    dh, made = chunks.scan(back, dh, (tokens, dout, kept), reverse=True)
    return dh, jax.tree.map(_chunk, made | {"q": dq})


def _tokens(x: Operands) -> Operands:
    """[b, h, c, x] as [c, b, h, x]."""
    return jax.tree.map(lambda y: jnp.moveaxis(y, 2, 0), repeat(x))


def _chunk(x: jax.Array) -> jax.Array:
    """[c, b, h, x] as [b, h, c, x]."""
    return jnp.moveaxis(x, 0, 2)


def _decays(x: Operands) -> tuple[jax.Array | None, jax.Array | None]:
    rows = None if x.a is None else jnp.exp(x.a)[..., :, None]
    return rows, None if x.b is None else jnp.exp(x.b)[..., None, :]


def _outer(x: jax.Array, y: jax.Array) -> jax.Array:
    return x[..., :, None] * y[..., None, :]
