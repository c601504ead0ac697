"""The oracle of grouped matmul: one plain product a group."""

import jax
import jax.numpy as jnp
import numpy as np


def grouped_matmul(args) -> tuple[jax.Array]:
    """Rows of each group times that group's matrix."""
    common = jnp.promote_types(args.lhs.dtype, args.rhs.dtype)
    wide = jnp.promote_types(common, jnp.float32)
    dtype = jnp.dtype(args.preferred_element_type or common)
    rhs = args.rhs.swapaxes(-1, -2) if args.transpose_rhs else args.rhs

    def times(a, b):
        a, b = a.astype(common), b.astype(common)
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
        return product.astype(dtype)

    if args.lhs.ndim == 4:
        return (times(args.lhs, rhs),)
    out = jnp.zeros((args.lhs.shape[0], rhs.shape[-1]), dtype)
    if args.existing_out is not None:
        out = args.existing_out.astype(dtype)
    first = 0 if args.group_offset is None else int(np.asarray(args.group_offset))
    start = 0
    for group, size in enumerate(np.asarray(args.group_sizes)):
        rows = slice(start, start + size)
        if size and 0 <= group - first < rhs.shape[0]:
            out = out.at[rows].set(times(args.lhs[rows], rhs[group - first]))
        start += size
    return (out,)
