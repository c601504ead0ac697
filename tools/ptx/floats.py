"""Instructions on floats, and conversions.

Approximate instructions are computed as exactly as float32 allows.
"""

from typing import Any

import ml_dtypes
import numpy as np

from tools.ptx import faults, table
from tools.ptx.integers import packed, unpacked
from tools.ptx.table import SIGNED, UNSIGNED, as_kind, handles

_HALF = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
_EIGHT = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}


def widen(bits: np.ndarray, kind: str) -> np.ndarray:
    """Float32 of the bits of a bfloat16 or float16, or of what a product in tf32 reads."""
    if kind == "tf32":  # products pass over the last bits
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    if kind == "bf16":  # the upper half of a float32
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(_HALF[kind]).astype(np.float32)


def narrow(value: np.ndarray, kind: str) -> np.ndarray:
    """The 16 bits of floats, rounded to the nearest even."""
    return value.astype(np.float32).astype(_HALF[kind]).view(np.uint16)


def _flushed(value: np.ndarray) -> np.ndarray:
    small = np.abs(value) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(np.float32(0), value), value)


_FUNCTIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "copysign": lambda sign, size: np.copysign(size, sign),
    # exact in float64 but for the last addition
    "fma": lambda a, b, c: a.astype(np.float64) * b + c,
    "min": np.fmin,
    "max": np.fmax,
    "min.NaN": np.minimum,
    "max.NaN": np.maximum,
}


@handles(
    r"(?P<op>add|sub|mul|div|neg|abs|ex2|lg2|rcp|sqrt|rsqrt|tanh|sin|cos|copysign|fma)"
    r"(?:\.(?:rn|full|approx))?(?P<ftz>\.ftz)?\.f32"
)
def arithmetic(block: Any, operands: Any, options: Any, mask: Any) -> None:
    _apply(block, operands, options, mask, _FUNCTIONS[options["op"]])


@handles(r"(?P<op>min|max)(?P<ftz>\.ftz)?(?P<nan>\.NaN)?\.f32")
def extreme(block: Any, operands: Any, options: Any, mask: Any) -> None:
    if len(operands) != 3:
        raise faults.UnknownInstructionError("an extreme of three numbers")
    _apply(block, operands, options, mask, _FUNCTIONS[options["op"] + (options["nan"] or "")])


def _apply(block: Any, operands: Any, options: Any, mask: Any, function: Any) -> None:
    to, *sources = operands
    values = [block.floats(x) for x in sources]
    if options["ftz"]:
        values = [_flushed(x) for x in values]
    result = function(*values).astype(np.float32)
    result = _flushed(result) if options["ftz"] else result
    block.write(to, result.view(np.uint32), mask)


@handles(
    r"(?P<op>add|sub|mul|neg|abs|fma|min|max)(?:\.rn)?(?P<nan>\.NaN)?"
    r"\.(?P<kind>bf16|f16)(?P<pair>x2)?"
)
def half_arithmetic(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, *sources = operands
    count, kind = 2 if options["pair"] else 1, options["kind"]
    function = _FUNCTIONS[options["op"] + (options["nan"] or "")]
    values = [unpacked(block.value(x, 16 * count), count) for x in sources]
    parts = [
        narrow(function(*(widen(value[i], kind) for value in values)), kind) for i in range(count)
    ]
    block.write(to, packed(parts), mask)


# Conversions

_INT = r"[su](?:8|16|32|64)"


@handles(rf"cvt\.(?P<type>{_INT})\.(?P<source>{_INT})")
def convert_integer(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Extends by the sign of the source, or cuts; then to the width of the register."""
    source = options["source"]
    value = as_kind(block.value(operands[1], table.bits(source)), source[0] == "s")
    kind = (SIGNED if source[0] == "s" else UNSIGNED)[options["bits"]]
    result = value.astype(kind).view(UNSIGNED[options["bits"]])
    block.write(operands[0], result, mask, options["signed"])


@handles(r"cvt\.f32\.(?P<source>bf16|f16)")
def widen_half(block: Any, operands: Any, options: Any, mask: Any) -> None:
    value = widen(block.value(operands[1], 16), options["source"])
    block.write(operands[0], value.view(np.uint32), mask)


@handles(rf"cvt\.rn\.(?P<to>f32|bf16|f16)\.(?P<source>f32|{_INT})")
def round_number(block: Any, operands: Any, options: Any, mask: Any) -> None:
    source, to = options["source"], options["to"]
    if source == "f32":
        value = block.floats(operands[1])
    else:
        number = block.value(operands[1], table.bits(source))
        value = as_kind(number, source[0] == "s").astype(np.float32)
    result = value.view(np.uint32) if to == "f32" else narrow(value, to)
    block.write(operands[0], result, mask)


@handles(r"cvt\.rn\.(?P<to>bf16|f16)x2\.f32")
def round_pair(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, high, low = operands
    parts = [narrow(block.floats(x), options["to"]) for x in (low, high)]
    block.write(to, packed(parts), mask)


@handles(r"cvt\.rn\.f16x2\.(?P<source>e4m3|e5m2)x2")
def widen_eight_bits(block: Any, operands: Any, options: Any, mask: Any) -> None:
    parts = unpacked(block.value(operands[1], 16), 2)
    wide = [narrow(x.view(_EIGHT[options["source"]]).astype(np.float32), "f16") for x in parts]
    block.write(operands[0], packed(wide), mask)


@handles(r"cvt\.rn\.satfinite\.(?P<to>e4m3|e5m2)x2\.f32")
def round_to_eight_bits(block: Any, operands: Any, options: Any, mask: Any) -> None:
    to, high, low = operands
    kind = _EIGHT[options["to"]]
    most = float(ml_dtypes.finfo(kind).max)
    values = [np.clip(block.floats(x), -most, most) for x in (low, high)]
    block.write(to, packed([x.astype(kind).view(np.uint8) for x in values]), mask)


_ROUNDING = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}


@handles(r"cvt\.(?P<how>rzi|rmi|rpi|rni)\.(?P<to>f32|s32|u32|s64)\.f32")
def round_to_integer(block: Any, operands: Any, options: Any, mask: Any) -> None:
    """Rounds; an integer that cannot hold the number gets the nearest it can, and nan becomes 0."""
    value = _ROUNDING[options["how"]](block.floats(operands[1]))
    if options["to"] == "f32":
        block.write(operands[0], value.view(np.uint32), mask)
        return
    bits, signed = table.bits(options["to"]), options["to"][0] == "s"
    kind = np.iinfo((SIGNED if signed else UNSIGNED)[bits])
    wide = np.nan_to_num(value.astype(np.float64), nan=0.0)
    result = np.where(wide >= kind.max, kind.max, np.maximum(wide, kind.min).astype(np.int64))
    block.write(operands[0], result.astype(kind.dtype).view(UNSIGNED[bits]), mask)
