"""Matrix products in plain JAX: the dtype of their sums, and what must not meet a zero."""

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.precision import xla_precision
from ejkernel.xla_utils.dtypes import wide


def multiply(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of factors of one dtype, summed in the wide one.

    With a transposed factor and batch axes, XLA on CPU refuses bfloat16 x bfloat16 = float32 at run
    time ("Unsupported element type for DotThunk"); widened factors have the same products.
    """
    dtype, exact = wide(a.dtype), xla_precision(a.dtype)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(formula, a, b, precision=exact, preferred_element_type=dtype)

    if a.dtype.itemsize >= 4:
        return product(a, b)
    widened = lambda a, b: product(a.astype(dtype), b.astype(dtype))
    return jax.lax.platform_dependent(a, b, cpu=widened, default=product)


def finite(x: jax.Array) -> jax.Array:
    """Zeros for what is not finite: a masked pair multiplies it by zero, and 0 * nan is nan."""
    return jnp.where(jnp.isfinite(x), x, 0)
