"""Gradients of a grouped product from two products of a backend."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared import groups


def gradients(
    products: Any, args: Any, cfg: Any, rows: Any, dout: jax.Array, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments.

    `products` has `multiply` and `outer`, and `rows` are the groups as these take them.
    """
    lhs, rhs, dout = groups.flat(args.lhs, 2), groups.flat(args.rhs, 3), groups.flat(dout, 2)
    grads = {}
    if "lhs" in wanted:
        dlhs = products.multiply(
            dout, rhs, rows, cfg, transpose_rhs=not args.transpose_rhs, dtype=lhs.dtype
        )
        grads["lhs"] = dlhs.reshape(args.lhs.shape)
    if "rhs" in wanted:
        left, right = (dout, lhs) if args.transpose_rhs else (lhs, dout)
        grads["rhs"] = products.outer(left, right, rows, cfg, rhs.dtype).reshape(args.rhs.shape)
    if "existing_out" in wanted:
        owned = groups.of_call(args).owned(lhs.shape[0])[:, None]
        grads["existing_out"] = jnp.where(owned, jnp.zeros((), dout.dtype), dout)
    return grads
