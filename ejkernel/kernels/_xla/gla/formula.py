"""Gated linear attention as a formula that JAX can differentiate any number of times."""

from typing import Any

import jax

from ejkernel.kernels._xla.gla import fwd
from ejkernel.kernels._xla.linear_recurrence import formula


def gla(args: Any) -> tuple[jax.Array, ...]:
    """Outputs of `gla`."""
    return formula.linear_recurrence(fwd.as_recurrence(args))
