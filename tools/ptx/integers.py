"""Instructions on integers, bits and predicates."""

from typing import Any

import numpy as np

from tools.ptx import faults
from tools.ptx.table import SIGNED, UNSIGNED, as_kind, handles

_INT = r"\.(?P<type>[su](?:16|32|64))"
_BITS = r"\.(?P<type>b(?:16|32|64))"
_ANY = r"\.(?P<type>[bsuf](?:16|32|64))"


@handles(r"mov\.pred")
def move_predicate(block: Any, operands: Any, options: Any, mask: Any) -> None:
    block.write(operands[0], block.predicate(operands[1]), mask)


@handles(r"mov" + _ANY)
def move(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Copies, packs several registers into one, or unpacks one into several."""
    to, source = operands
    bits = options["bits"]
    if isinstance(source, tuple):
        block.write(to, packed([block.value(x, bits // len(source)) for x in source]), mask)
    elif isinstance(to, tuple):
        for register, part in zip(to, unpacked(block.value(source, bits), len(to)), strict=True):
            block.write(register, part, mask)
    else:
        block.write(to, block.value(source, bits), mask)


def packed(parts: list[np.ndarray]) -> np.ndarray:
    """One number of several, the first in its lowest bits."""
    width = 8 * parts[0].itemsize
    dtype = UNSIGNED[width * len(parts)]
    return sum(
        (part.astype(dtype) << dtype(width * i) for i, part in enumerate(parts)),
        start=np.zeros(len(parts[0]), dtype),
    )


def unpacked(value: np.ndarray, count: int) -> list[np.ndarray]:
    width = 8 * value.itemsize // count
    dtype = value.dtype.type
    return [(value >> dtype(width * i)).astype(UNSIGNED[width]) for i in range(count)]


@handles(r"selp" + _ANY)
def select(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, first, second, choice = operands
    a, b = (block.value(x, options["bits"]) for x in (first, second))
    block.write(to, np.where(block.predicate(choice), a, b), mask)


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


@handles(rf"setp\.(?P<test>{'|'.join(_COMPARE)})\.(?P<type>[bsu](?:16|32|64))")
def compare(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, *sources = operands
    if len(sources) != 2:
        raise faults.UnknownInstructionError("a comparison with a third operand")
    a, b = (as_kind(block.value(x, options["bits"]), options["signed"]) for x in sources)
    block.write(to, _COMPARE[options["test"]](a, b), mask)


@handles(r"setp\.(?P<test>eq|ne|lt|le|gt|ge|num|nan)(?P<unordered>u?)\.f32")
def compare_floats(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, *sources = operands
    if len(sources) != 2:
        raise faults.UnknownInstructionError("a comparison with a third operand")
    a, b = (block.floats(x) for x in sources)
    nan = np.isnan(a) | np.isnan(b)
    if options["test"] in ("num", "nan"):
        found = nan if options["test"] == "nan" else ~nan
    else:
        found = _COMPARE[options["test"]](a, b)
        found = found | nan if options["unordered"] else found & ~nan
    block.write(to, found, mask)


_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@handles(r"(?P<op>and|or|xor|not)\.pred")
def logic_of_predicates(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, *sources = operands
    values = [block.predicate(x) for x in sources]
    op = options["op"]
    block.write(to, ~values[0] if op == "not" else _LOGIC[op](*values), mask)


@handles(r"(?P<op>and|or|xor|not)" + _BITS)
def logic(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, *sources = operands
    values = [block.value(x, options["bits"]) for x in sources]
    op = options["op"]
    block.write(to, ~values[0] if op == "not" else _LOGIC[op](*values), mask)


@handles(r"(?P<op>add|sub|mul\.lo|mad\.lo|neg|abs)" + _INT)
def arithmetic(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, *sources = operands
    values = [block.value(x, options["bits"]) for x in sources]
    match options["op"]:
        case "add":
            result = values[0] + values[1]
        case "sub":
            result = values[0] - values[1]
        case "mul.lo":
            result = values[0] * values[1]
        case "mad.lo":
            result = values[0] * values[1] + values[2]
        case "neg":
            result = ~values[0] + values[0].dtype.type(1)
        case _:
            result = np.abs(as_kind(values[0], True)).view(values[0].dtype)
    block.write(to, result, mask)


@handles(r"(?P<op>mul|mad)\.(?P<part>wide|hi)\.(?P<type>[su](?:16|32))")
def wide_product(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """The whole product, of twice the width, or its upper half."""
    to, *sources = operands
    bits, signed = options["bits"], options["signed"]
    wide = (SIGNED if signed else UNSIGNED)[2 * bits]
    a, b = (as_kind(block.value(x, bits), signed).astype(wide) for x in sources[:2])
    if options["part"] == "wide":
        result = (a * b).view(UNSIGNED[2 * bits])
        if options["op"] == "mad":
            result = result + block.value(sources[2], 2 * bits)
    elif options["op"] == "mad":
        raise faults.UnknownInstructionError("mad.hi")
    else:
        result = ((a * b) >> wide(bits)).astype(wide).view(UNSIGNED[2 * bits])
        result = result.astype(UNSIGNED[bits])
    block.write(to, result, mask)


@handles(r"(?P<op>min|max)(?P<relu>\.relu)?" + _INT)
def extreme(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, *sources = operands
    a, b = (as_kind(block.value(x, options["bits"]), options["signed"]) for x in sources)
    result = np.minimum(a, b) if options["op"] == "min" else np.maximum(a, b)
    result = np.maximum(result, 0) if options["relu"] else result
    block.write(to, result.view(UNSIGNED[options["bits"]]), mask)


@handles(r"(?P<op>shl|shr)\.(?P<type>[bsu](?:16|32|64))")
def shift(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Shifts; by the width or more, all bits are gone (or are the sign)."""
    to, source, count = operands
    bits = options["bits"]
    value = as_kind(block.value(source, bits), options["signed"])
    by = block.value(count, 32).astype(np.int64)
    kept = np.minimum(by, bits - 1).astype(value.dtype)
    result = value << kept if options["op"] == "shl" else value >> kept
    if not (options["signed"] and options["op"] == "shr"):
        result = np.where(by < bits, result, 0).astype(value.dtype)
    block.write(to, result.view(UNSIGNED[bits]), mask)


@handles(r"(?P<op>div|rem)" + _INT)
def divide(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Divides towards 0; by 0, the quotient has all bits set and the rest is the dividend."""
    to, *sources = operands
    a, b = (as_kind(block.value(x, options["bits"]), options["signed"]) for x in sources)
    zero = b == 0
    safe = np.where(zero, 1, b).astype(b.dtype)
    quotient = a // safe
    if options["signed"]:
        quotient = quotient + ((a % safe != 0) & ((a < 0) != (safe < 0)))
    rest = a - quotient * safe
    result = np.where(zero, ~np.zeros_like(a), quotient) if options["op"] == "div" else rest
    result = np.where(zero, a, result) if options["op"] == "rem" else result
    block.write(to, result.astype(a.dtype).view(UNSIGNED[options["bits"]]), mask)


@handles(r"bfe\.(?P<type>[su]32|u64)")
def extract_field(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, source, start, length = operands
    value = block.value(source, options["bits"])
    kind = value.dtype.type
    begin, size = block.value(start, 32), block.value(length, 32)
    if (begin + size > options["bits"]).any() or (size == 0).any() or (size > 63).any():
        raise faults.UnknownInstructionError("a field that leaves its register")
    sizes = size.astype(kind)
    field = (value >> begin.astype(kind)) & ((kind(1) << sizes) - kind(1))
    if options["signed"]:
        sign = (field >> (sizes - kind(1))) & kind(1)
        field = np.where(sign != 0, field - (kind(1) << sizes), field)
    block.write(to, field, mask)


@handles(r"bfi\.b32")
def insert_field(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, source, base, start, length = operands
    value, old = (block.value(x, 32).astype(np.int64) for x in (source, base))
    begin, size = (block.value(x, 32).astype(np.int64) for x in (start, length))
    if (begin + size > 32).any():
        raise faults.UnknownInstructionError("a field that leaves its register")
    field = ((1 << size) - 1) << begin
    block.write(to, ((old & ~field) | ((value << begin) & field)).astype(np.uint32), mask)


@handles(r"prmt\.b32")
def permute_bytes(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, *sources = operands
    low, high, choice = (block.value(x, 32) for x in sources)
    both = packed([low, high])
    parts = []
    for i in range(4):
        digit = (choice >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> ((digit & 7).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
        sign = np.where(byte & 128, 255, 0)
        parts.append(np.where(digit & 8, sign, byte).astype(np.uint8))
    block.write(to, packed(parts), mask)


@handles(r"popc\.b32")
def count_bits(block: Any, operands: Any, options: Any, mask: Any) -> None:
    value = block.value(operands[1], 32)
    block.write(operands[0], np.bitwise_count(value).astype(np.uint32), mask)


@handles(r"lop3\.b32")
def logic_of_three(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, *sources, lookup = operands
    a, b, c = (block.value(x, 32) for x in sources)
    result = np.zeros_like(a)
    for i in range(8):
        if lookup.value >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    block.write(to, result, mask)


@handles(r"shf\.(?P<side>[lr])\.wrap\.b32")
def funnel_shift(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, low, high, count = operands
    both = packed([block.value(low, 32), block.value(high, 32)])
    by = (block.value(count, 32) & np.uint32(31)).astype(np.uint64)
    result = (both << by) >> np.uint64(32) if options["side"] == "l" else both >> by
    block.write(to, result.astype(np.uint32), mask)


@handles(r"createpolicy\.fractional\.L2::\w+\.b64")
def cache_policy(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """A hint to the cache, which changes no result."""
    block.write(operands[0], np.zeros(block.threads, np.uint64), mask)
