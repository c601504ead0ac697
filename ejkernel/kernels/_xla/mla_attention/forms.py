"""A call in one of two forms, which differ in where the up-projections are multiplied.

Expanded: keys kv w_kc and values kv w_vc of each head are made, for one block of keys at a time.
Absorbed: w_kc is multiplied into the queries and w_vc into the output, so that all query heads
share one key head, the latent itself.

Either way the rest is attention of queries [b, g, r, T, d] over tiles of keys [b, g, s, d] and
values [b, g, s, e], and a block of keys is made once, for all queries that see it.
"""

import types
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import finite, multiply
from ejkernel.kernels._xla._blocks import block_ranges, loops
from ejkernel.kernels._xla._blocks.logits import Pairs, Tile, pad
from ejkernel.kernels._xla.mla_attention import config


class Keys(NamedTuple):
    """One block of keys; `latent` and `value` have zeros for what is not finite."""

    latent: jax.Array  # [bb, bk, l]
    key: jax.Array  # [bb, gg, bk, d]
    value: jax.Array  # [bb, gg, bk, e]


class Form:
    """Arrays of a call as its form multiplies them."""

    def __init__(self, args: Any, cfg: config.Config):
        self.args, self.absorb = args, cfg.absorb
        self.latent_dim, self.groups, self.nope = args.w_kc.shape
        groups = 1 if cfg.absorb else self.groups
        key = jax.ShapeDtypeStruct((*args.key_value.shape[:2], groups, 1), args.query.dtype)
        view = types.SimpleNamespace(**vars(args), key=key, q_positions=None, kv_positions=None)
        self.pairs = Pairs(view, config.blocks(args, cfg))
        self.blocks = self.pairs.blocks
        self.chunks = (self.pairs.batch // self.blocks.b, groups // self.blocks.g)
        self.width = self.latent_dim if cfg.absorb else args.w_vc.shape[-1]
        self.latent = pad(args.key_value, 1, self.pairs.padded_s)
        self.rope = None if args.b_k is None else pad(args.b_k, 1, self.pairs.padded_s)
        self.w_kc, self.w_vc = (w.transpose(1, 0, 2) for w in (args.w_kc, args.w_vc))  # [g, l, d]

    def multiply(self, formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """A product in the call's dtype, summed in the wide one."""
        dtype = self.args.query.dtype
        return multiply(formula, a.astype(dtype), b.astype(dtype))

    # Queries and outputs

    def queries(self) -> jax.Array:
        """[b, g, r, T, d], rope part last."""
        q, b_q = self.args.query, self.args.b_q
        q = self.into_latent(q, self.args.w_kc) if self.absorb else q
        if b_q is not None:
            q = jnp.concatenate([q, jnp.broadcast_to(b_q, (*q.shape[:3], b_q.shape[-1]))], axis=-1)
        return self.pairs.queries(q)

    def into_latent(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """[b, t, h, d] times the transpose of [l, g, d]."""
        made = self.multiply("btgrd,lgd->btgrl", self.split(x), weights)
        return made.reshape(*x.shape[:3], self.latent_dim).astype(x.dtype)

    def out_of_latent(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """[b, t, h, l] times [l, g, d]."""
        made = self.multiply("btgrl,lgd->btgrd", self.split(x), weights)
        return made.reshape(*x.shape[:3], weights.shape[-1])

    def split(self, x: jax.Array) -> jax.Array:
        """[b, t, h, d] -> [b, t, g, r, d], with the key heads of the call."""
        return x.reshape(*x.shape[:2], self.groups, -1, x.shape[-1])

    def join(self, x: jax.Array) -> jax.Array:
        """Chunks [chunks, bb, gg, r, T, d] -> [b, t, h, d]."""
        x = x.reshape(*self.chunks, *x.shape[1:]).transpose(0, 2, 5, 1, 3, 4, 6)
        x = x.reshape(self.pairs.batch, self.pairs.padded_t, self.pairs.heads, x.shape[-1])
        return x[:, : self.pairs.t]

    # Keys

    def keys(self, b: Any, g: Any, j: Any) -> Keys:
        """Block j of the keys of one chunk of rows and heads."""
        latent = self._block(self.latent, b, j)
        if self.absorb:
            key = value = latent[:, None]
        else:
            key, value = (
                self.multiply("bsl,gld->bgsd", latent, self._heads(w, g)).astype(latent.dtype)
                for w in (self.w_kc, self.w_vc)
            )
        if self.rope is not None:
            rope = self._block(self.rope, b, j)[:, None]
            rope = jnp.broadcast_to(rope, (*key.shape[:3], rope.shape[-1]))
            key = jnp.concatenate([key, rope], axis=-1)
        # a value that is not finite marks its key: a weight of zero must not meet it
        spoiled = ~jnp.isfinite(value).all(axis=-1, keepdims=True)
        return Keys(finite(latent), jnp.where(spoiled, jnp.nan, key), finite(value))

    def key_bounds(self, b: Any) -> tuple[Any, Any]:
        """Blocks of keys that some query of a block of rows may see."""
        table = self.pairs.table(b)
        return block_ranges.bounds(table.any(axis=0)[None], 0)

    def pull_keys(
        self, keys: Keys, dk: jax.Array, dv: jax.Array, g: Any, wanted: frozenset[str]
    ) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
        """Gradients of a block of keys: of the latent, of the rope part, and of the weights."""
        split = self.latent_dim if self.absorb else self.nope
        dk, drope = dk[..., :split], dk[..., split:].sum(axis=1)
        weights = {}
        if self.absorb:
            dlatent = (dk + dv)[:, 0]
        else:
            parts = (
                self.multiply("bgsd,gld->bsl", x, self._heads(w, g))
                for x, w in ((dk, self.w_kc), (dv, self.w_vc))
            )
            dlatent = cast(jax.Array, sum(parts))  # of two, so not the 0 of none
            for name, x in (("w_kc", dk), ("w_vc", dv)):
                if name in wanted:
                    weights[name] = self.multiply("bsl,bgsd->gld", keys.latent, x)
        return dlatent, None if self.rope is None else drope, weights

    def _block(self, x: jax.Array, b: Any, j: Any) -> jax.Array:
        return loops.take(loops.take(x, b, self.blocks.b, 0), j, self.blocks.k, 1)

    def _heads(self, weights: jax.Array, g: Any) -> jax.Array:
        return loops.take(weights, g, self.blocks.g, 0)

    def rows(self, x: jax.Array, at: Tile) -> jax.Array:
        """A chunk of rows and heads of an array [b, g, r, T, …]."""
        return loops.take(loops.take(x, at.b, self.blocks.b, 0), at.g, self.blocks.g, 1)
