"""Checks of block-sparse matrices given by the places of their blocks."""

from typing import Any

import numpy as np

from ejkernel.kernels import _spec


def check_indices(op: str, rows: Any, cols: Any, shape: tuple[int, int], size: int) -> None:
    """Refuses known indices beyond a matrix; traced ones pass, and their blocks are dropped."""
    if size < 1 or min(shape) < 0:
        return  # the check of these says more
    for name, index, length in (("rows", rows, shape[0]), ("cols", cols, shape[1])):
        if (host := _spec.known(index)) is None:
            continue
        count = -(-length // size)
        bad = np.flatnonzero((host < 0) | (host >= count))
        if bad.size:
            raise ValueError(
                f"`{op}`: `{name}` must be in [0, {count}), the blocks of {size} that {length} "
                f"{name} make; got {host.flat[bad[0]]} at entry {bad[0]}. Indices are of blocks, "
                f"not of {name}."
            )


def some_places(nnz: int, shape: tuple[int, int], size: int, seed: int) -> tuple[Any, Any]:
    """Random places of blocks, as a pattern without structure has them."""
    rng = np.random.default_rng(seed)
    rows, cols = (
        rng.integers(0, max(-(-length // max(size, 1)), 1), nnz).astype(np.int32)
        for length in shape
    )
    return rows, cols
