"""Lightning attention forward: the linear recurrence with one decay for each head."""

from typing import Any

import jax

from ejkernel.kernels._specs.linear_recurrence import LinearRecurrenceArgs
from ejkernel.kernels._xla.linear_recurrence import config, fwd


def as_recurrence(args: Any) -> LinearRecurrenceArgs:
    """The same call as one of `linear_recurrence`; the layer is in the decays."""
    shared = args.arrays() | args.statics()
    del shared["layer_idx"], shared["num_layers"]
    return LinearRecurrenceArgs(**shared)


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and the last states when asked for); no residuals."""
    return fwd.forward(as_recurrence(args), cfg)
