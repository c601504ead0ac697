"""Loads, stores, copies, barriers, and exchanges between the lanes of a warp."""

from typing import Any, NamedTuple

import numpy as np

from tools.ptx import faults, text
from tools.ptx.table import UNSIGNED, as_kind, handles

_WHAT = r"(?P<vector>\.v[24])?\.(?P<type>[bsuf](?:8|16|32|64))"
_HINTS = r"(?:\.L1::\w+)?(?:\.L2::cache_hint)?"


@handles(r"ld\.param\.(?P<type>[bsu](?:32|64))")
def load_parameter(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, source = operands
    if not isinstance(source, text.Address) or not isinstance(source.base, str) or source.offset:
        raise faults.UnknownInstructionError("a part of a parameter")
    number = block.parameters[source.base] & ((1 << options["bits"]) - 1)
    value = np.full(block.threads, number, UNSIGNED[options["bits"]])
    block.write(to, value, mask, options["signed"])


@handles(rf"(?P<op>ld|st)\.global{_HINTS}{_WHAT}")
def global_access(block: Any, operands: Any, options: Any, mask: Any) -> None:
    load, size = options["op"] == "ld", _bytes(options)
    active = block.everyone if mask is None else mask
    addresses = block.addresses(operands[1 if load else 0], 64)[active]
    places = block.memory.offsets(addresses, size, write=not load)
    _transfer(block, operands, options, block.memory.data, places, mask)


@handles(rf"(?P<op>ld|st)\.shared(?:::cta)?{_WHAT}")
def shared_access(block: Any, operands: Any, options: Any, mask: Any) -> None:
    load, size = options["op"] == "ld", _bytes(options)
    active = block.everyone if mask is None else mask
    addresses = block.addresses(operands[1 if load else 0], 32)[active]
    block.shared.check(addresses, size, size)
    if load:
        block.shared.load(addresses, size, block.warp[active])
    else:
        block.shared.store(addresses, size, block.warp[active], copy=False)
    _transfer(block, operands, options, block.shared.data, addresses, mask)


def _bytes(options: dict[str, Any]) -> int:
    return int((options["vector"] or ".v1")[2:]) * options["bits"] // 8


def _transfer(
    block: Any, operands: Any, options: Any, data: np.ndarray, places: np.ndarray, mask: Any
) -> None:
    """Moves registers from or to bytes of `data` at the places of the active threads."""
    load, width = options["op"] == "ld", options["bits"] // 8
    registers = operands[0 if load else 1]
    registers = registers if isinstance(registers, tuple) else (registers,)
    active = block.everyone if mask is None else mask
    kind = UNSIGNED[options["bits"]]
    words = data[: data.size // width * width].view(kind)
    for i, register in enumerate(registers):
        if load:
            value = np.zeros(block.threads, kind)
            value[active] = words[places // width + i]
            block.write(register, value, mask, options["signed"])
        else:
            words[places // width + i] = block.value(register, options["bits"])[active]


@handles(r"(?P<op>atom|red)\.global\.gpu\.(?:relaxed|acq_rel)\.add\.f32")
def atomic_add(block: Any, operands: Any, options: Any, mask: Any) -> None:
    *to, address, amount = operands
    active = np.flatnonzero(block.everyone if mask is None else mask)
    places = block.memory.offsets(block.addresses(address, 64)[active], 4, write=True)
    words = block.memory.data.view(np.float32)
    before, amounts = np.zeros(block.threads, np.float32), block.floats(amount)
    for thread, word in zip(active, places // 4, strict=True):
        before[thread] = words[word]
        words[word] += amounts[thread]
    for register in to:
        block.write(register, before.view(np.uint32), mask)


# Copies that run beside the program


class Copy(NamedTuple):
    """A copy in flight, of its active threads."""

    to: np.ndarray
    places: np.ndarray  # in global memory
    size: int
    given: np.ndarray  # bytes that are read; the rest becomes 0
    warps: np.ndarray


@handles(r"cp\.async\.(?:ca|cg)\.shared\.global(?:\.L2::\w+)?")
def begin_copy(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, source, count, *rest = operands
    active, size = block.everyone if mask is None else mask, count.value
    given = block.value(rest[0], 32)[active] if rest else np.full(active.sum(), size)
    given = given.astype(np.int64)
    target, addresses = (block.addresses(x, b)[active] for x, b in ((to, 32), (source, 64)))
    places = np.zeros(len(target), np.int64)
    places[given > 0] = block.memory.offsets(addresses[given > 0], size, write=False)
    block.shared.check(target, size, size)
    block.shared.store(target, size, block.warp[active], copy=True)
    block.copies.add(Copy(target, places, size, given, block.warp[active]))


@handles(r"cp\.async\.commit_group")
def close_copies(block: Any, operands: Any, options: Any, mask: Any) -> None:
    block.copies.close_group()


@handles(r"cp\.async\.wait_group")
def await_copies(block: Any, operands: Any, options: Any, mask: Any) -> None:
    for copy in block.copies.finish(but=operands[0].value):
        _end_copy(block, copy)


def _end_copy(block: Any, copy: Copy) -> None:
    block.shared.end_copy(copy.to, copy.size, copy.warps)
    steps = np.arange(copy.size)
    read = steps < copy.given[:, None]  # [threads, bytes]
    source = np.where(read, copy.places[:, None] + steps, 0)
    block.shared.data[copy.to[:, None] + steps] = np.where(read, block.memory.data[source], 0)


# Barriers


@handles(r"(?:bar|barrier)\.(?:cta\.)?sync")
def barrier(block: Any, operands: Any, options: Any, mask: Any) -> None:
    if mask is not None or len(operands) != 1:
        raise faults.UnknownInstructionError("a barrier of some of the threads")
    block.shared.barrier()


@handles(r"bar\.warp\.sync")
def warp_barrier(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Orders the lanes of a warp, which run in lockstep here."""


@handles(r"fence\.proxy\.async(?:\.shared::cta)?")
def fence(block: Any, operands: Any, options: Any, mask: Any) -> None:
    block.shared.fence()


# Lanes


@handles(r"shfl\.sync\.(?P<how>bfly|idx|up|down)\.b32")
def shuffle(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, source, amount, clamp, members = operands
    how = options["how"]
    whole = clamp == text.Number(0 if how == "up" else 31) and members == text.Number(-1)
    if not whole or mask is not None:
        raise faults.UnknownInstructionError("a shuffle within a part of a warp")
    value = block.value(source, 32).reshape(-1, 32)
    by = block.value(amount, 32).reshape(-1, 32).astype(np.int64)
    lane = np.arange(32)
    asked = {"bfly": lane ^ by, "idx": by & 31, "up": lane - by, "down": lane + by}[how]
    asked = np.where((asked >= 0) & (asked < 32), asked, lane)
    block.write(to, np.take_along_axis(value, asked, 1).ravel(), None)


_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@handles(r"redux\.sync\.(?P<op>add|min|max|and|or|xor)\.(?P<type>[bsu]32)")
def reduce_warp(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, source, members = operands
    if mask is not None or not (block.value(members, 32) == 0xFFFFFFFF).all():
        raise faults.UnknownInstructionError("a reduction of a part of a warp")
    value = as_kind(block.value(source, 32), options["signed"]).reshape(-1, 32)
    result = _REDUCTIONS[options["op"]].reduce(value, axis=1, dtype=value.dtype)
    block.write(to, np.repeat(result.view(np.uint32), 32), None)
