"""Copies of tiles that a descriptor describes (TMA), and the barriers in shared memory they signal.

A copy runs when the program waits for its barrier, as late as the code allows.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tools.ptx import faults, text
from tools.ptx.table import handles

_DESCRIPTOR = 128  # bytes
_SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 6: 2, 7: 4, 10: 2}  # bytes of an element, by `elemtype`
_SWIZZLES = {1: 32, 2: 64, 3: 128}  # bytes of a row of the pattern, by `swizzle_mode`


class Tile(NamedTuple):
    """A copy in flight; 16 bytes at each address of shared memory."""

    to: np.ndarray
    data: np.ndarray  # [addresses, 16] of uint8


@dataclasses.dataclass
class Barrier:
    """Of each phase, how many arrivals it needs and had, and which copies it waits for."""

    needed: int
    phase: int = 0
    arrived: int = 0
    expected: int = 0  # bytes
    copies: list[Tile] = dataclasses.field(default_factory=list)

    @property
    def complete(self) -> bool:
        copied = sum(tile.data.size for tile in self.copies)
        return self.arrived == self.needed and copied == self.expected


def _one(values: np.ndarray, mask: np.ndarray | None) -> int:
    """The value that all active threads have."""
    values = values if mask is None else values[mask]
    if (values != values[0]).any():
        raise faults.UnknownInstructionError("threads that name different places")
    return int(values[0])


def _touch(block: Any, place: int, size: int, mask: Any, write: bool) -> None:
    """Checks an access of `size` bytes by the warps of the active threads."""
    active = block.everyone if mask is None else mask
    warps = np.unique(block.warp[active])
    places = np.full(len(warps), place, np.int64)
    block.shared.check(places, size, 8)
    if write:
        block.shared.store(places, size, warps, copy=False)
    else:
        block.shared.load(places, size, warps)


# Descriptors


@handles(r"tensormap\.replace\.tile\.(?P<field>\w+)\.shared::cta\.b1024\.b(?P<bits>32|64)")
def describe(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Sets a member of a descriptor in shared memory; `operands` are place, axis and value."""
    place, *axis, value = operands
    if mask is not None and not mask.any():
        return
    here = _one(block.addresses(place, 64), mask)
    _touch(block, here, _DESCRIPTOR, mask, write=True)
    index = axis[0].value if axis else 0
    number = _one(block.value(value, int(options["bits"])), mask)
    block.descriptors.setdefault(here, {})[options["field"], index] = number


@handles(
    r"tensormap\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release\.gpu"
    r"\.sync\.aligned"
)
def publish_descriptor(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Copies a descriptor to global memory, which is the compiler's own."""
    to, source, _ = operands
    here = _one(block.addresses(source, 64), mask)
    _touch(block, here, _DESCRIPTOR, mask, write=False)
    block.descriptors[_one(block.addresses(to, 64), mask)] = dict(block.descriptors[here])


@handles(
    r"fence\.proxy\.tensormap::generic\.acquire\.gpu|cp\.async\.bulk\.commit_group"
    r"|cp\.async\.bulk\.wait_group\.read"
)
def order_descriptors(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Orders descriptors and copies to global memory; the former are in order here."""


@handles(r"cvta\.global\.u64")
def generic_address(block: Any, operands: Any, options: Any, mask: Any) -> None:
    block.write(operands[0], block.value(operands[1], 64), mask)


# Barriers


@handles(r"mbarrier\.(?P<how>init|inval)\.shared::cta\.b64")
def make_barrier(block: Any, operands: Any, options: Any, mask: Any) -> None:
    if mask is not None and not mask.any():
        return
    place = _one(block.addresses(operands[0], 32), mask)
    _touch(block, place, 8, mask, write=True)
    if options["how"] == "init":
        block.barriers[place] = Barrier(operands[1].value)
    elif block.barriers.pop(place).copies:
        raise faults.Fault("ends a barrier that copies in flight will signal")


def _barrier(block: Any, place: int) -> Barrier:
    if place not in block.barriers:
        raise faults.Fault("there is no barrier at this address")
    return block.barriers[place]


@handles(r"mbarrier\.arrive\.expect_tx\.shared(?:::cta)?\.b64")
def arrive(block: Any, operands: Any, options: Any, mask: Any) -> None:
    _, place, size = operands
    count = block.threads if mask is None else int(mask.sum())
    if not count:
        return
    here = _one(block.addresses(place, 32), mask)
    _touch(block, here, 8, mask, write=False)
    found = _barrier(block, here)
    found.arrived += count
    found.expected += count * size.value
    if found.arrived > found.needed:
        raise faults.Fault("arrives at a barrier before its last phase was waited for")


@handles(r"mbarrier\.try_wait\.parity\.shared(?:::cta)?\.b64")
def await_barrier(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Ends the copies of a phase; their tiles are visible to all threads then."""
    if mask is not None:
        raise faults.UnknownInstructionError("some of the threads wait")
    done, place, parity = operands
    here = _one(block.addresses(place, 32), None)
    _touch(block, here, 8, None, write=False)
    found = _barrier(block, here)
    if found.phase == _one(block.value(parity, 32), None):
        if not found.complete:
            raise faults.Fault("waits for a barrier that nothing completes")
        for tile in found.copies:
            block.shared.end_tile(tile.to, 16)
            block.shared.data[tile.to[:, None] + np.arange(16)] = tile.data
        found.phase, found.arrived, found.expected, found.copies = 1 - found.phase, 0, 0, []
    block.write(done, np.ones(block.threads, bool), None)


@handles(r"elect\.sync")
def elect(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Chooses the first lane of each warp."""
    (lane, chosen), members = operands
    if mask is not None or members != text.Number(-1):
        raise faults.UnknownInstructionError("a choice within a part of a warp")
    block.write(lane, np.zeros(block.threads, np.uint32), None)
    block.write(chosen, np.arange(block.threads) % 32 == 0, None)


# Copies


@handles(
    r"cp\.async\.bulk\.tensor\.2d\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes"
    r"(?:\.L2::cache_hint)?"
)
def begin_tile(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, (described, (column, row)), barrier, *_ = operands
    active = np.flatnonzero(block.everyone if mask is None else mask)
    if not len(active):
        return
    targets, signals = (block.addresses(x, 32) for x in (to, barrier))
    maps = block.addresses(described, 64)
    starts = [block.value(x, 32).view(np.int32).astype(np.int64) for x in (row, column)]
    for thread in active:
        alone = np.arange(block.threads) == thread
        found = _barrier(block, int(signals[thread]))
        _touch(block, int(signals[thread]), 8, alone, write=False)
        members = block.descriptors[int(maps[thread])]
        begin = [int(x[thread]) for x in starts]
        tile = _tile(block, members, int(targets[thread]), begin)
        warps = np.full(len(tile.to), block.warp[thread])
        block.shared.begin_tile(tile.to, 16, warps)
        found.copies.append(tile)


def _tile(block: Any, members: dict[tuple[str, int], int], to: int, begin: list[int]) -> Tile:
    """The numbers of a tile, 0 outside the array, and where they go.

    They are read now: global memory that a copy reads is not written by the same program.
    """
    plain = all(members.get((name, i), 1) == 1 for name in ("element_stride",) for i in (0, 1))
    if members["rank", 0] != 1 or members.get(("interleave_layout", 0)) or not plain:
        raise faults.UnknownInstructionError("a tile that is not of two axes, or has gaps")
    size = _SIZES[members["elemtype", 0]]
    rows, columns = members["box_dim", 1], members["box_dim", 0]
    width = columns * size
    row, column = (first + np.arange(n) for first, n in zip(begin, (rows, columns), strict=True))
    inside = ((row >= 0) & (row < members["global_dim", 1]))[:, None] & (
        (column >= 0) & (column < members["global_dim", 0])
    )
    address = members["global_address", 0] + row[:, None] * members["global_stride", 0]
    address = (address + column * size)[inside]
    places = block.memory.offsets(address, size, write=False)
    data = np.zeros((rows, columns, size), np.uint8)
    data[inside] = block.memory.data[places[:, None] + np.arange(size)]
    if width % 16 or to % 128:
        raise faults.OutOfBoundsError("a tile whose rows or place are not aligned")
    place = to + np.arange(0, rows * width, 16)
    if pattern := _SWIZZLES.get(members.get(("swizzle_mode", 0), 0)):
        if width > pattern:
            raise faults.Fault("a tile is wider than its swizzled pattern")
        place = place ^ (((place >> 7) & (pattern // 16 - 1)) << 4)
    block.shared.check(place, 16, 16)
    return Tile(place, data.reshape(-1, 16))
