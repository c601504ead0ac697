"""Random calls of `recurrent` for tests of its kernels."""

import jax.numpy as jnp
import numpy as np


def values(cell_type, b, t, i, d, both, dtype, factor):
    """Public arguments: `both` directions or one, numbers of about `factor`."""
    rng = np.random.default_rng(7)
    m, ways = {"lstm": 4, "gru": 3, "rnn": 1}[cell_type] * d, ("", "_reverse") if both else ("",)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) * factor, dtype)
    shapes = {"w_ih": (m, i), "w_hh": (m, d), "b_ih": (m,), "b_hh": (m,)}
    states = [normal(*((2,) if both else ()), b, d) for _ in range(2)]
    return {
        "inputs": normal(b, t, i),
        "hidden": tuple(states) if cell_type == "lstm" else states[0],
        "weights": {n + way: normal(*shape) for way in ways for n, shape in shapes.items()},
        "cell_type": cell_type,
        "bidirectional": both,
    }
