"""The precision of matrix products: float32 stays float32, unless the user lowered it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import Precision

# Values of `jax.default_matmul_precision` that ask for less than float32. Names that are not here,
# such as "BF16_BF16_F32_X6", ask for more than TensorFloat-32 gives, and count as float32.
_LOWERED = {
    **dict.fromkeys(("high", "tensorfloat32", "TF32_TF32_F32"), Precision.HIGH),
    **dict.fromkeys(("default", "bfloat16"), Precision.DEFAULT),
    **dict.fromkeys(("F16_F16_F16", "F16_F16_F32"), Precision.DEFAULT),
    **dict.fromkeys(("BF16_BF16_BF16", "BF16_BF16_F32"), Precision.DEFAULT),
    **{
        f"ANY_F8_ANY_F8_{kind}": Precision.DEFAULT
        for kind in ("F32", "F32_FAST_ACCUM", "ANY", "ANY_FAST_ACCUM")
    },
}
_LEVELS = frozenset({None, "default", "high", "highest", "bfloat16", "tensorfloat32", "float32"})


def dot_precision(dtype: Any) -> Precision:
    """The least precision that products of factors of a dtype must have.

    A kernel without that precision takes the next higher one. A product of two factors narrower
    than float32 is exact in float32, whatever the precision.
    """
    if jnp.dtype(dtype).itemsize < 4:
        return Precision.DEFAULT
    return _LOWERED.get(jax.config.jax_default_matmul_precision, Precision.HIGHEST)


def xla_precision(dtype: Any) -> Precision | None:
    """The `precision` of a product that XLA computes, which also knows algorithms by name.

    None lets JAX take the algorithm that the user named.
    """
    named = jax.config.jax_default_matmul_precision not in _LEVELS
    return None if named else dot_precision(dtype)


def wide(dtype: Any) -> Any:
    """The dtype of logits and sums."""
    return jnp.float64 if jnp.dtype(dtype).itemsize == 8 else jnp.float32


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
