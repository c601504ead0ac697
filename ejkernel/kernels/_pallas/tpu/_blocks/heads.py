"""One head of tokens in VMEM whose heads lie side by side, [tokens, heads, d].

Registers hold 32-bit words. Heads of a narrower dtype share them: head h of a token is part
h % packing of word h // packing. Words of one head are read and written with a stride, and parts
are cut out of them and put together with shifts.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.callib import _pallas
from ejkernel.kernels._pallas.tpu._blocks import tiles

_SIGN = 0x80  # of float8
_UPPER = 0xFFFF0000


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of an array [..., num, width], and how they lie in a buffer.

    A buffer is [parts, ..., num, lanes]: strides need rows of one register's lanes, so wider ones
    are cut.
    """

    num: int
    width: int
    dtype: Any

    @property
    def packing(self) -> int:
        return 4 // jnp.dtype(self.dtype).itemsize

    @property
    def words(self) -> int:
        return self.num // self.packing

    @property
    def dense(self) -> bool:
        """Whether the words of a token lie behind each other without padding.

        XLA then keeps an array [..., tokens, num, width] in this order, if the width is a multiple
        of 128, and else as [..., num, tokens, width].
        """
        return self.num % self.packing == 0 and (self.num % 8 == 0 or self.num in (2, 4))

    @property
    def strided(self) -> bool:
        whole = self.width <= tiles.LANES or self.width % tiles.LANES == 0
        return self.dense and whole

    @property
    def parts(self) -> int:
        return max(self.width // tiles.LANES, 1) if self.strided else 1

    @property
    def lanes(self) -> int:
        return self.width // self.parts

    def buffer(self, *lead: int) -> tuple[int, ...]:
        """The shape of a buffer for arrays [*lead, num, width]."""
        return (self.parts, *lead, self.num, self.lanes)

    def pieces(self, array: Any, buffer: Any, *at: Any) -> list[tuple[Any, Any]]:
        """What to copy between an array in HBM and its places `at` in a buffer."""
        every = (slice(None),) * (len(array.shape) - 1)
        if self.parts == 1:
            return [(array, buffer.at[0, *at])]
        return [
            (array.at[*every, pl.ds(i * self.lanes, self.lanes)], buffer.at[i, *at])
            for i in range(self.parts)
        ]

    def load(self, buffer: Any, *heads: int) -> list[jax.Array]:
        """Tokens of some heads, [tokens, width] each; in float32, which holds every dtype."""
        read: dict[tuple[int, int], jax.Array] = {}
        made = []
        for head in heads:
            pieces = []
            for i in range(self.parts):
                if not self.strided:
                    pieces.append(_rows(buffer[i, ..., head, :]).astype(jnp.float32))
                    continue
                word, part = divmod(head, self.packing)
                if (i, word) not in read:
                    read[i, word] = _load_words(self, buffer.at[i], word)
                pieces.append(_part(read[i, word], part, self.dtype))
            made.append(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1))
        return made

    def store(self, buffer: Any, head: int, values: list[jax.Array]) -> None:
        """Writes tokens of neighbouring heads from `head` on, [tokens, width] each, float32.

        They are all heads of some words where the buffer is strided.
        """
        for i in range(self.parts):
            columns = slice(i * self.lanes, (i + 1) * self.lanes)
            pieces = [x if self.parts == 1 else x[:, columns] for x in values]
            if not self.strided:
                for at, piece in enumerate(pieces):
                    buffer[i, :, head + at, :] = piece.astype(self.dtype)
                continue
            for first in range(0, len(pieces), self.packing):
                word = _joined(pieces[first : first + self.packing], self.dtype)
                _store_word(self, buffer.at[i], (head + first) // self.packing, word)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _strided(of: Heads, ref: Any, word: int) -> tuple[Any, Any]:
    """The buffer as rows of words, and which of them are those of a head."""
    tokens = math.prod(ref.shape[:-2])
    ref = ref if of.packing == 1 else ref.bitcast(jnp.uint32)
    rows = slice(None) if of.words == 1 else pl.ds(word, tokens, stride=of.words)
    return ref.reshape(tokens * of.words, of.lanes), rows


def _load_words(of: Heads, ref: Any, word: int) -> jax.Array:
    """One word of every token, [tokens, lanes]."""
    if not _pallas.interpreted():
        ref, rows = _strided(of, ref, word)
        return ref[rows]
    # Pallas's interpreter cannot look at a buffer in another dtype or shape
    x = ref[..., pl.ds(word * of.packing, of.packing), :]
    x = x.reshape(-1, *x.shape[-2:])
    return x[:, 0] if of.packing == 1 else _bits(x.swapaxes(1, 2))


def _store_word(of: Heads, ref: Any, word: int, x: jax.Array) -> None:
    if not _pallas.interpreted():
        ref, rows = _strided(of, ref, word)
        ref[rows] = x
        return
    parts = x[:, :, None] if of.packing == 1 else jax.lax.bitcast_convert_type(x, of.dtype)
    ref[:, pl.ds(word * of.packing, of.packing), :] = parts.swapaxes(1, 2)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _part(x: jax.Array, part: int, dtype: Any) -> jax.Array:
    """A part of words in float32."""
    kind = jnp.dtype(dtype)
    if kind.itemsize == 4:
        return x
    if kind == jnp.bfloat16:
        x = x << 16 if part == 0 else x & jnp.uint32(_UPPER)
        return pltpu.bitcast(x, jnp.float32)
    x = pltpu.bitcast(x, jnp.int32)
    if kind == jnp.int8:
        return ((x << (24 - 8 * part)) >> 24).astype(jnp.float32)
    return _float8(x >> (8 * part), kind)


def _float8(bits: jax.Array, dtype: Any) -> jax.Array:
    """Numbers of float8 from their bits, the lowest 8 of each word."""
    kind = jnp.finfo(dtype)
    mantissa, bias = kind.nmant, 1 - kind.minexp
    size = bits & (_SIGN - 1)
    normal = pltpu.bitcast((size << (23 - mantissa)) + ((127 - bias) << 23), jnp.float32)
    # exponents of 0 are made by arithmetic: a TPU takes a float32 with such an exponent for 0
    small = size.astype(jnp.float32) * 2.0 ** (1 - bias - mantissa)
    x = jnp.where(size < (1 << mantissa), small, normal)
    if mantissa == 2:  # float8_e5m2 has infinities
        x = jnp.where(size == 0x7C, jnp.inf, x)
        x = jnp.where(size > 0x7C, jnp.nan, x)
    else:
        x = jnp.where(size == 0x7F, jnp.nan, x)
    return jnp.where((bits & _SIGN) != 0, -x, x)


def _joined(parts: list[jax.Array], dtype: Any) -> jax.Array:
    """Words of float32 or of two parts in bfloat16."""
    if jnp.dtype(dtype).itemsize == 4:
        return parts[0]
    low, high = (pltpu.bitcast(x.astype(dtype).astype(jnp.float32), jnp.uint32) for x in parts)
    return (low >> 16) | high
