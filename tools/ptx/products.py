"""Tensor cores: products of tiles, and the moves of tiles between registers and shared memory.

A fragment is the part of a tile that a lane holds: rows lane / 4, columns 2 * (lane % 4) and the
next, in the 8 x 8 parts of the tile.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from tools.ptx import faults, floats, table, text
from tools.ptx.table import handles

_LANE = np.arange(32)
_ROW, _COLUMN = _LANE // 4, 2 * (_LANE % 4)
_BYTES = {"bf16": 2, "f16": 2, "tf32": 4}  # of a number in a factor


@handles(
    r"(?P<op>ld|st)matrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared\.b16"
)
def move_matrices(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Moves 8 x 8 tiles; the lanes 8i to 8i+7 of each warp give the rows of tile i."""
    if mask is not None:
        raise faults.UnknownInstructionError("matrices of some of the threads")
    load = options["op"] == "ld"
    registers, address = operands if load else operands[::-1]
    warps = block.threads // 32
    rows = block.addresses(address, 32).reshape(warps, 32)
    words = block.shared.data[: block.shared.data.size // 2 * 2].view(np.uint16)
    for i, register in enumerate(registers):
        here = rows[:, 8 * i : 8 * i + 8]  # [warps, 8]
        block.shared.check(here, 16, 16)
        owner = np.repeat(np.arange(warps, dtype=np.int16), 8)
        if load:
            block.shared.load(here.ravel(), 16, owner)
        else:
            block.shared.store(here.ravel(), 16, owner, copy=False)
        places = (here[:, :, None] + 2 * np.arange(8)) // 2  # [warps, row, column]
        if options["trans"]:
            places = places.swapaxes(1, 2)
        pair = places[:, _ROW, _COLUMN], places[:, _ROW, _COLUMN + 1]  # [warps, 32] each
        if load:
            low, high = (words[place].astype(np.uint32) for place in pair)
            block.write(register, (low | (high << np.uint32(16))).ravel(), None)
        else:
            value = block.value(register, 32).reshape(warps, 32)
            words[pair[0]] = value.astype(np.uint16)
            words[pair[1]] = (value >> np.uint32(16)).astype(np.uint16)


def _halves(block: Any, register: text.Operand, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The two numbers that each lane has in a register: [warps, 32] each."""
    value = block.value(register, 32).reshape(-1, 32)
    low, high = value.astype(np.uint16), (value >> np.uint32(16)).astype(np.uint16)
    return floats.widen(low, kind), floats.widen(high, kind)


def _singles(block: Any, register: text.Operand) -> np.ndarray:
    """The number in TensorFloat-32 that each lane has in a register: [warps, 32]."""
    return floats.widen(block.value(register, 32).reshape(-1, 32), "tf32")


def _left_factor(block: Any, registers: Any, kind: str) -> np.ndarray:
    """The factor of each warp from four registers: [warps, 16, 16], or [warps, 16, 8] in tf32."""
    if kind == "tf32":
        tile = np.zeros((block.threads // 32, 16, 8), np.float32)
        for i, register in enumerate(registers):
            tile[:, _ROW + 8 * (i & 1), _LANE % 4 + 4 * (i >> 1)] = _singles(block, register)
        return tile
    tile = np.zeros((block.threads // 32, 16, 16), np.float32)
    for i, register in enumerate(registers):
        for odd, value in enumerate(_halves(block, register, kind)):
            tile[:, _ROW + 8 * (i & 1), _COLUMN + odd + 8 * (i >> 1)] = value
    return tile


@handles(
    r"mma\.sync\.aligned\.m16n8k(?:16\.row\.col\.f32\.(?P<kind>bf16|f16)\.(?P=kind)"
    r"|8\.row\.col\.f32\.tf32\.tf32)\.f32"
)
def multiply(block: Any, operands: Any, options: Any, mask: Any) -> None:
    if mask is not None:
        raise faults.UnknownInstructionError("a product of some of the threads")
    to, left, right, start = operands
    kind = options["kind"] or "tf32"
    a = _left_factor(block, left, kind)
    b = np.zeros((block.threads // 32, a.shape[2], 8), np.float32)
    for i, register in enumerate(right):
        if kind == "tf32":
            b[:, _LANE % 4 + 4 * i, _ROW] = _singles(block, register)
            continue
        for odd, value in enumerate(_halves(block, register, kind)):
            b[:, _COLUMN + odd + 8 * i, _ROW] = value
    product = a @ b  # [warps, 16, 8]
    results = [
        product[:, _ROW + 8 * (i >> 1), _COLUMN + (i & 1)].ravel() + block.floats(start[i])
        for i in range(4)
    ]
    for register, value in zip(to, results, strict=True):
        block.write(register, value.view(np.uint32), None)


# Products of four warps, which run beside the program


class Product(NamedTuple):
    """A product in flight: 64 x k times k x `columns` for each group of four warps.

    k is 16, or 8 in TensorFloat-32: 32 bytes.
    """

    to: tuple[text.Register, ...]
    columns: int
    kind: str
    held: tuple[text.Operand, ...] | None  # the left factor's registers, read at the end
    left: list[np.ndarray]  # else its addresses [64, k], for each group
    right: list[np.ndarray]  # addresses [columns, k] for each group
    adds: np.ndarray  # whether the accumulator is added, by thread


@handles(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)"
    r"k(?:16\.f32\.(?P<kind>bf16|f16)\.(?P=kind)|8\.f32\.tf32\.tf32)"
)
def begin_product(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, left, right, adds, *flags = operands
    signs, transposed = flags[:2], [flag.value for flag in flags[2:]] or [0]
    kind = options["kind"] or "tf32"
    if mask is not None or any(sign != text.Number(1) for sign in signs) or block.threads % 128:
        raise faults.UnknownInstructionError("a negated product, or one of some of the threads")
    columns = int(options["columns"])
    factor = lambda operand, rows, flag: [
        _places(block, descriptor, rows, flag, _BYTES[kind])
        for descriptor in _descriptors(block, operand)
    ]
    held = left if isinstance(left, tuple) else None
    left = [] if held else factor(left, 64, transposed[0])
    right = factor(right, columns, transposed[-1])
    for factors in (left, right):
        for group, places in enumerate(factors):
            block.shared.begin_product(places.ravel(), _BYTES[kind], group)
    adds = block.predicate(adds)
    block.products.add(Product(to, columns, kind, held, left, right, adds))


def _descriptors(block: Any, operand: text.Operand) -> list[int]:
    """The description of a factor in shared memory, for each group of four warps."""
    value = block.value(operand, 64).reshape(-1, 128)
    if (value != value[:, :1]).any():
        raise faults.Fault("the warps of a group describe different factors")
    return [int(x) for x in value[:, 0]]


def _places(block: Any, descriptor: int, rows: int, transposed: int, size: int) -> np.ndarray:
    """Addresses [rows, 32 / size] of the numbers of a factor, of `size` bytes each."""
    start, lead, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    swizzle = descriptor >> 62
    if swizzle == 0 or (descriptor >> 49) & 7:
        raise faults.UnknownInstructionError("a factor without a swizzle, or with a base offset")
    width = {1: 128, 2: 64, 3: 32}[swizzle]  # bytes of a row of the swizzled pattern
    row, k = np.arange(rows)[:, None], np.arange(32 // size)
    if transposed:
        across = width // 2
        place = start + row // across * lead + k // 8 * stride + k % 8 * width + row % across * 2
    else:
        place = start + row // 8 * stride + row % 8 * width + k * size
    place = place ^ (((place >> 7) & (width // 16 - 1)) << 4)
    block.shared.check(place, size, size)
    return place


@handles(r"wgmma\.fence\.sync\.aligned")
def order_registers(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Orders registers before a product, which are in order here."""


@handles(r"wgmma\.commit_group\.sync\.aligned")
def close_products(block: Any, operands: Any, options: Any, mask: Any) -> None:
    block.products.close_group()


@handles(r"wgmma\.wait_group\.sync\.aligned")
def await_products(block: Any, operands: Any, options: Any, mask: Any) -> None:
    for product in block.products.finish(but=operands[0].value):
        _end_product(block, product)


def _end_product(block: Any, product: Product) -> None:
    size = _BYTES[product.kind]
    data = block.shared.data[: block.shared.data.size // size * size]
    words = data.view(table.UNSIGNED[8 * size])
    held = None
    if product.held is not None:
        held = _left_factor(block, product.held, product.kind)
        held = held.reshape(-1, 64, 32 // size)
    old = np.full((len(product.to), block.threads), np.nan, np.float32)
    for i, register in enumerate(product.to):
        if block.is_set(register):
            old[i] = block.floats(register)
    sums = np.where(product.adds, old, np.float32(0))
    row, column = _fragment(len(product.to))
    for group, right in enumerate(product.right):
        block.shared.end_product(right.ravel(), size, group)
        if held is None:
            left = product.left[group]
            block.shared.end_product(left.ravel(), size, group)
            a = floats.widen(words[left // size], product.kind)
        else:
            a = held[group]
        tile = a @ floats.widen(words[right // size], product.kind).T  # [64, columns]
        sums[:, 128 * group : 128 * group + 128] += tile[row, column]
    for register, total in zip(product.to, sums, strict=True):
        block.write(register, total.view(np.uint32), None)


@functools.cache
def _fragment(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each number that the 128 threads of a group hold: [count, 128] each."""
    thread, i = np.arange(128), np.arange(count)[:, None]
    row = 16 * (thread // 32) + _ROW[thread % 32] + 8 * (i >> 1 & 1)
    return row, 8 * (i >> 2) + _COLUMN[thread % 32] + (i & 1)
