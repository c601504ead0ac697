"""Attention over given blocks as a formula that JAX can differentiate any number of times."""

from typing import Any

import jax

from ejkernel.kernels._xla.apply_native_sparse_attention import fwd
from ejkernel.kernels._xla.native_sparse_attention import formula


def apply_native_sparse_attention(args: Any) -> tuple[jax.Array]:
    """Outputs of `apply_native_sparse_attention`."""
    return formula.native_sparse_attention(fwd.as_branch(args))
