"""The linear recurrence as a formula that JAX can differentiate any number of times.

Forward mode and second order use it: token by token, which compiles soonest, each chunk of tokens
computed again when differentiated.
"""

from typing import Any

import jax

from ejkernel.kernels._xla.linear_recurrence import config, fwd


def linear_recurrence(args: Any) -> tuple[jax.Array, ...]:
    """Outputs of `linear_recurrence`."""
    return fwd.outputs(args, config.Config(recurrent=True), jax.checkpoint)
