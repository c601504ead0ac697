"""Global memory with its bounds, and shared memory with its race check."""

from collections.abc import Callable, Sequence

import numpy as np

from tools.ptx import faults

GLOBAL_BASE = 0x7F0000000000
SHARED_BASE = 1024  # as aligned as any swizzle asks for
_GAP = 256  # bytes between arrays, which nobody may touch
_READ, _WRITE = 1, 2


class GlobalMemory:
    """The arrays of a launch, apart from each other; writes go back by `copy_back`."""

    def __init__(self, arrays: Sequence[np.ndarray], writable: Sequence[bool]) -> None:
        self._arrays, self._writable, self._places = arrays, writable, []
        size = _GAP
        for array in arrays:
            self._places.append(size)
            size += -(-array.nbytes // _GAP) * _GAP + _GAP
        self.data = np.full(size, 0xFF, np.uint8)
        self._allowed = np.zeros(size, np.uint8)
        for array, place, may_write in zip(arrays, self._places, writable, strict=True):
            here = slice(place, place + array.nbytes)
            self.data[here] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._allowed[here] = _READ | (_WRITE if may_write else 0)

    def address(self, index: int) -> int:
        return GLOBAL_BASE + self._places[index]

    def offsets(self, addresses: np.ndarray, size: int, write: bool) -> np.ndarray:
        """Places in `data` of `size` bytes each; raises if they are in no array, or not aligned."""
        at = addresses.astype(np.int64) - GLOBAL_BASE
        if not at.size:
            return at
        if (at % size).any():
            raise faults.OutOfBoundsError(f"an address is not a multiple of {size} bytes")
        inside = at.min() >= 0 and at.max() + size <= self.data.size
        if not inside or not (self._allowed[at] & self._allowed[at + size - 1]).all():
            raise faults.OutOfBoundsError("an address lies outside all arrays")
        if write and not (self._allowed[at] & _WRITE).all():
            raise faults.OutOfBoundsError("writes to an input")
        return at

    def copy_back(self) -> None:
        """Writes what the kernel wrote into the arrays of the launch."""
        for array, place, may_write in zip(self._arrays, self._places, self._writable, strict=True):
            if may_write and array.nbytes:
                here = self.data[place : place + array.nbytes]
                np.copyto(array, here.view(array.dtype).reshape(array.shape))


class SharedMemory:
    """Shared memory of one program, which reports races.

    Between two barriers (an epoch) no warp may read or write what another wrote, nor write what
    another read. Whatever the barriers, nothing may touch the target of a copy in flight, and
    nothing may write what a product in flight reads. Stores need a fence before a product reads
    them; copies are not held to that, since Triton 3.6 makes no fence for them (3.9 does). Cells
    are one byte, or two if the program moves no single bytes.
    """

    def __init__(self, size: int, warps: int, cell: int, report: Callable[[str], None]) -> None:
        self.data = np.full(SHARED_BASE + size, 0xFF, np.uint8)
        self._cell, self._report = cell, report
        cells = self.data.size // cell
        self._epoch = 1
        self._written = np.zeros(cells, np.int32)  # epochs
        self._writer = np.full(cells, -1, np.int16)
        self._read = np.zeros((warps, cells), np.int32)  # epochs
        self._copied = np.zeros(cells, bool)  # copies in flight write these
        self._factors = np.zeros(cells, np.int16)  # number of products in flight that read it
        self._unfenced = np.zeros(cells, bool)  # stored, and not yet visible to products

    def barrier(self) -> None:
        self._epoch += 1

    def fence(self) -> None:
        """Makes stores visible to products, as `fence.proxy.async` does."""
        self._unfenced[:] = False

    def check(self, addresses: np.ndarray, size: int, aligned: int) -> None:
        """Raises for addresses outside shared memory, or not multiples of `aligned`."""
        if not addresses.size:
            return
        if (addresses % aligned).any():
            raise faults.OutOfBoundsError(f"a shared address is not a multiple of {aligned} bytes")
        if addresses.min() < SHARED_BASE or addresses.max() + size > self.data.size:
            raise faults.OutOfBoundsError("a shared address lies outside the program's memory")

    def _cells(self, addresses: np.ndarray, size: int) -> np.ndarray:
        steps = np.arange(0, size, self._cell) // self._cell
        return (addresses // self._cell)[:, None] + steps  # [accesses, cells of one]

    def load(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> None:
        """Checks and remembers reads of `size` bytes at each address by the warp beside it."""
        cells = self._cells(addresses, size)
        self._check_read(cells, self._writer[cells] != warps[:, None])
        self._read[warps[:, None], cells] = self._epoch

    def _check_read(self, cells: np.ndarray, others: np.ndarray) -> None:
        if self._copied[cells].any():
            self._report("reads what a copy in flight writes")
        if ((self._written[cells] == self._epoch) & others).any():
            self._report("reads what another warp wrote since the last barrier")

    def store(self, addresses: np.ndarray, size: int, warps: np.ndarray, copy: bool) -> None:
        """Checks and remembers writes; those of a copy that now begins, or of a store."""
        cells, warps = self._cells(addresses, size), warps[:, None]
        if self._copied[cells].any():
            self._report("writes what a copy in flight writes")
        if self._factors[cells].any():
            self._report("writes what a product in flight reads")
        if ((self._written[cells] == self._epoch) & (self._writer[cells] != warps)).any():
            self._report("writes what another warp wrote since the last barrier")
        for warp, epochs in enumerate(self._read):
            if ((epochs[cells] == self._epoch) & (warps != warp)).any():
                self._report("writes what another warp read since the last barrier")
        self._mark_written(cells, warps)
        self._unfenced[cells] = not copy  # of whoever wrote last
        if copy:
            self._copied[cells] = True

    def _mark_written(self, cells: np.ndarray, warps: np.ndarray) -> None:
        self._written[cells] = self._epoch
        self._writer[cells] = warps

    def end_copy(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> None:
        """A copy arrived: its own warp may read it now, the others after a barrier."""
        cells = self._cells(addresses, size)
        self._copied[cells] = False
        self._mark_written(cells, warps[:, None])

    def begin_tile(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> None:
        """A copy by descriptor begins; it sees stores of before only through a fence."""
        if self._unfenced[self._cells(addresses, size)].any():
            self._report("copies a tile to what was stored without a proxy fence since")
        self.store(addresses, size, warps, copy=True)

    def end_tile(self, addresses: np.ndarray, size: int) -> None:
        """A copy by descriptor arrived, and all who wait for its barrier may read it."""
        cells = self._cells(addresses, size)
        self._copied[cells] = False
        self._written[cells] = 0

    def begin_product(self, addresses: np.ndarray, size: int, group: int) -> None:
        """A group of four warps begins to read factors, until `end_product`."""
        cells = self._cells(addresses, size)
        self._check_read(cells, np.ones(1, bool))  # three of the warps did not write it
        if self._unfenced[cells].any():
            self._report("multiplies what was stored without a proxy fence since")
        self._read[4 * group : 4 * group + 4, cells] = self._epoch
        self._factors[cells] += 1

    def end_product(self, addresses: np.ndarray, size: int, group: int) -> None:
        cells = self._cells(addresses, size)
        self._factors[cells] -= 1
        self._read[4 * group : 4 * group + 4, cells] = self._epoch
