"""Grouped matmul in Triton: the ragged form, and the batched one as groups of equal size."""

from typing import Any

import jax

from ejkernel.kernels._shared import groups
from ejkernel.kernels._specs.grouped_matmul import out_dtype
from ejkernel.kernels._triton.grouped_matmul import config, products


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array], tuple[()]]:
    """The output; there are no residuals."""
    config.check(args, cfg)
    out = products.multiply(
        groups.flat(args.lhs, 2),
        groups.flat(args.rhs, 3),
        products.groups_of(args),
        cfg,
        transpose_rhs=args.transpose_rhs,
        dtype=out_dtype(args),
        existing=args.existing_out,
    )
    return (out.reshape(*args.lhs.shape[:-1], out.shape[-1]),), ()
