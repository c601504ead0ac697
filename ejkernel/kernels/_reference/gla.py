"""The oracle of gated linear attention: the recurrence with gates of the state's rows."""

import jax

from ejkernel.kernels._reference import linear_recurrence


def gla(args) -> tuple[jax.Array, ...]:
    """Output, and the last states when asked for."""
    return linear_recurrence.recur(args, gk=args.g, g_gamma=args.g_gamma)
