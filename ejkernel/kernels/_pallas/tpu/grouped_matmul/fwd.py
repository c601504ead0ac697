"""Grouped matmul on a TPU: the ragged form, and the batched one as groups of equal size."""

from typing import Any

import jax

from ejkernel.kernels._pallas.tpu.grouped_matmul import config, products
from ejkernel.kernels._shared import groups
from ejkernel.kernels._specs.grouped_matmul import out_dtype


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array], tuple[()]]:
    """The output; there are no residuals."""
    out = products.multiply(
        groups.flat(args.lhs, 2),
        groups.flat(args.rhs, 3),
        groups.of_call(args),
        cfg,
        transpose_rhs=args.transpose_rhs,
        dtype=out_dtype(args),
        existing=args.existing_out,
    )
    shape = (*args.lhs.shape[:-1], out.shape[-1])
    return (out.reshape(shape),), ()
