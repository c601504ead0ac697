"""The oracle of decoding over ranges of keys."""

import jax
import numpy as np

from ejkernel.kernels._reference import page_attention


def ragged_decode_attention(args) -> tuple[jax.Array, ...]:
    """Output, and lse when asked for."""
    start = np.asarray(args.sequence_start)
    end = np.clip(np.asarray(args.sequence_end), 0, args.key.shape[1])
    out, lse = page_attention.decode(args, args.key, args.value, start, end)
    return (out, lse) if args.return_lse else (out,)
