"""Dtypes that this library widens to, also where a user forbids JAX to promote by itself."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """The dtype of logits and sums."""
    return jnp.float64 if jnp.dtype(dtype).itemsize == 8 else jnp.float32


def common(*dtypes: Any) -> Any:
    """The dtype that all of them promote to."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)
