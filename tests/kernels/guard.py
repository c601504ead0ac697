"""Checks in Triton's interpreter that a kernel reads and writes inside its arrays alone."""

import contextlib

import numpy as np

from ejkernel.callib import _triton_interpret


def _arrays(tree):
    """The NumPy arrays in a kernel's parameter, which may be a bundle."""
    if isinstance(tree, np.ndarray):
        return [tree]
    return [array for member in getattr(tree, "members", ()) for array in _arrays(member)]


@contextlib.contextmanager
def inside_arrays():
    """Every address of a load or store must be in an array of the launch; counts the loads."""
    from triton.runtime import interpreter

    builder, run = interpreter.InterpreterBuilder, _triton_interpret.run
    load, store = builder.create_masked_load, builder.create_masked_store
    ranges, counts = [], {"loads": 0}

    def check(pointers, mask):
        size = pointers.get_element_ty().primitive_bitwidth // 8
        used = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.uint64)
        inside = np.zeros(used.shape, bool)
        for first, last in ranges:
            inside |= (used >= first) & (used + size <= last)
        assert inside.all(), "an address outside of every array"

    def checked_load(self, pointers, mask, *rest):
        counts["loads"] += 1
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def run_in_ranges(kernel, parameters, grid):
        found = [array for tree in parameters for array in _arrays(tree)]
        ranges[:] = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in found]
        return run(kernel, parameters, grid)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    _triton_interpret.run = run_in_ranges
    try:
        yield counts
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        _triton_interpret.run = run
