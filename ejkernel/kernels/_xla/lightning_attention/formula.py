"""Lightning attention as a formula that JAX can differentiate any number of times."""

from typing import Any

import jax

from ejkernel.kernels._xla.lightning_attention import fwd
from ejkernel.kernels._xla.linear_recurrence import formula


def lightning_attention(args: Any) -> tuple[jax.Array, ...]:
    """Outputs of `lightning_attention`."""
    return formula.linear_recurrence(fwd.as_recurrence(args))
