"""Pictures of blocks of query-key pairs, as text and as PNG.

A block is one of three kinds: OFF if none of its pairs attends, CUT if some do, WHOLE if all do.
"""

import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

OFF, CUT, WHOLE = range(3)
_CHARACTERS = ".+#"
LEGEND = "# all attend, + some, . none"
# colours of the kinds in a PNG: nearly white, light and dark blue
_COLOURS = bytes([0xF2, 0xF2, 0xF2, 0x9F, 0xA8, 0xDA, 0x30, 0x3F, 0x9F])
_SIDE = 1024  # pixels that the longer side of a small picture may have
_MOST_CELLS = 4096


def kinds(strip: Callable[[int, int], Any], t: int, s: int, height: int, width: int) -> np.ndarray:
    """The kinds [nq, nk] of blocks; `strip(start, stop)` gives rows of the mask [t, s]."""
    made = np.empty((-(-t // height), -(-s // width)), np.uint8)
    for i, start in enumerate(range(0, t, height)):
        rows = np.asarray(strip(start, min(start + height, t)))
        made[i] = [_kind(rows[:, j : j + width]) for j in range(0, s, width)]
    return made


def _kind(pairs: np.ndarray) -> int:
    return WHOLE if pairs.all() else CUT if pairs.any() else OFF


def pooled(blocks: np.ndarray, max_rows: int, max_cols: int) -> tuple[np.ndarray, int, int]:
    """Kinds of groups of blocks, as few as the limits ask for, and the size of a group."""
    nq, nk = blocks.shape
    height, width = max(-(-nq // max_rows), 1), max(-(-nk // max_cols), 1)
    rows, cols = np.arange(0, nq, height), np.arange(0, nk, width)
    least, most = (
        reduce.reduceat(reduce.reduceat(blocks, rows, axis=0), cols, axis=1)
        for reduce in (np.minimum, np.maximum)
    )
    grouped = np.where(least == WHOLE, WHOLE, np.where(most == OFF, OFF, CUT))
    return grouped.astype(np.uint8), height, width


def lines(blocks: np.ndarray) -> Iterable[str]:
    """A line of text for each row."""
    return ("".join(_CHARACTERS[k] for k in row) for row in blocks)


def counts(blocks: np.ndarray) -> dict[str, int | float]:
    """How many blocks there are, how many are computed, and their share."""
    kept = int(np.count_nonzero(blocks))
    whole = int(np.count_nonzero(blocks == WHOLE))
    total = int(blocks.size)
    share = kept / total if total else 0.0
    return {"blocks": total, "kept": kept, "whole": whole, "cut": kept - whole, "density": share}


def png(blocks: np.ndarray) -> bytes:
    """A PNG file: a square for each block, queries downwards."""
    cells, _, _ = pooled(blocks, _MOST_CELLS, _MOST_CELLS)
    size = max(_SIDE // max(*cells.shape, 1), 1)
    pixels = np.kron(cells, np.ones((size, size), np.uint8))
    height, width = pixels.shape
    # each line of pixels begins with the number of its filter, 0 for none
    raw = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits, a palette
    chunks = ((b"IHDR", header), (b"PLTE", _COLOURS), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    check = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)
