"""NumPy arrays with the dtypes that JAX gives them, for tables made while tests are collected."""

import jax
import jax.numpy as jnp
import numpy as np

_NARROW = {
    "int64": np.int32,
    "uint64": np.uint32,
    "float64": np.float32,
    "complex128": np.complex64,
}


def asarray(values, dtype=None):
    array = np.asarray(values, dtype)
    return array.astype(_NARROW.get(array.dtype.name, array.dtype))


def ones(shape, dtype=float):
    return asarray(np.ones(shape, dtype))


def zeros(shape, dtype=float):
    return asarray(np.zeros(shape, dtype))


def normal(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def to_jax(tree):
    """The same tree with JAX arrays in place of NumPy's."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)
