"""Grouped matmul on a TPU: the ragged form, and the batched one as groups of equal size."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu.grouped_matmul import config, products
from ejkernel.kernels._shared import groups
from ejkernel.kernels._specs.grouped_matmul import out_dtype


def rows_of(args: Any) -> groups.Groups:
    """The rows of each matrix of `rhs`, counted over all rows of `lhs`."""
    if args.lhs.ndim == 4:
        *lead, m, _ = args.lhs.shape
        start = jnp.arange(lead[0] * lead[1], dtype=jnp.int32) * m
        return groups.Groups(start, start + m)
    m, count = args.lhs.shape[0], args.rhs.shape[0]
    return groups.of_sizes(args.group_sizes, args.group_offset, count, m)


def flat(x: jax.Array, ndim: int) -> jax.Array:
    """An array of the batched form with batch, groups and rows as one axis."""
    return x.reshape(-1, *x.shape[1 - ndim :]) if x.ndim == 4 else x


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array], tuple[()]]:
    """The output; there are no residuals."""
    out = products.multiply(
        flat(args.lhs, 2),
        flat(args.rhs, 3),
        rows_of(args),
        cfg,
        transpose_rhs=args.transpose_rhs,
        dtype=out_dtype(args),
        existing=args.existing_out,
    )
    shape = (*args.lhs.shape[:-1], out.shape[-1])
    return (out.reshape(shape),), ()
