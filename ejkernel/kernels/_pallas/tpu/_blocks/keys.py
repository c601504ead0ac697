"""Cached keys and values that a kernel copies from HBM, some at a time: of pages, or of rows.

A program sees the keys of one sequence in steps. Each kind of cache says where the keys of a step
are, copies them into one of two buffers, and gives the keys and values of one head. Heads that lie
side by side are parted first, a copy in VMEM, so that a loop over heads need not be unrolled.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import grid, heads, tiles


class Span(NamedTuple):
    """Keys [low, high) of a sequence that some query of a program sees."""

    sequence: Any
    low: Any
    high: Any
    position: Any  # of the first query
    pages: Any = None  # the row of the table, [1, blocks]


class AbstractKeys(abc.ABC):
    """The keys of a call."""

    step: int  # keys of one step

    @abc.abstractmethod
    def add(self, operands: grid.Operands, rows: Mapping[str, Callable[[int], Any]]) -> None:
        """Adds the arrays; `rows` are names of rows of the table and, by width, their specs."""

    @abc.abstractmethod
    def buffers(self) -> dict[str, Any]:
        """Scratch buffers by name, with a semaphore for each of the two slots."""

    @abc.abstractmethod
    def count(self, at: Span) -> Any:
        """Steps of a span; its members may be arrays."""

    @abc.abstractmethod
    def bounds(self, at: Span, j: Any) -> tuple[Any, Any]:
        """The position of the first key of step j, and of the first that no step before it had."""

    @abc.abstractmethod
    def copies(self, refs: Any, at: Span, j: Any, slot: Any) -> list[Any]:
        """The copies of step j, as `grid.stream` takes them."""

    @abc.abstractmethod
    def part(self, refs: Any, slot: Any) -> None:
        """Parts the heads of a slot, once it is full."""

    @abc.abstractmethod
    def load(self, refs: Any, slot: Any, g: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values of a key head, [step, d] and [step, e], in the dtype of queries."""


def _div(x: Any, size: int) -> Any:
    return jax.lax.div(x, jnp.full_like(x, size))


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else x.astype(jnp.float32).astype(dtype)


def _part(
    names: dict[str, tuple[int, int]], of: heads.Heads, buffer: Any, refs: Any, unit: int
) -> None:
    """Writes heads of a buffer into buffers of their own, about 128 tokens at a time.

    Args:
      names: For each buffer to write, [g, tokens, width], its first head and the distance of two.
      of: The heads of the buffer.
      buffer: [parts, n, ..., heads, lanes].
      refs: Has the buffers to write.
      unit: Tokens of each of the n.
    """
    count = buffer.shape[1]
    chunk = max(tiles.LANES // unit, 1)
    if count % chunk or (chunk * unit) % 32:  # rows of 8 bits fill registers by 32
        chunk = count
    tokens = chunk * unit

    def some(c: Any, carry: Any) -> Any:
        here = buffer.at[:, pl.ds(pl.multiple_of(c * chunk, chunk), chunk)]
        rows = pl.ds(pl.multiple_of(c * tokens, tokens), tokens)
        order = {
            first + g * every: (name, g)
            for name, (first, every) in names.items()
            for g in range(getattr(refs, name).shape[0])
        }
        for first in range(0, of.num, of.packing):
            own = [head for head in range(first, first + of.packing) if head in order]
            for head, x in zip(own, of.load(here, *own), strict=True):
                name, g = order[head]
                target = getattr(refs, name)
                target[g, rows] = x.astype(target.dtype)
        return carry

    if count == chunk:
        some(0, None)
    else:
        jax.lax.fori_loop(np.int32(0), np.int32(count // chunk), some, np.int32(0))


@dataclasses.dataclass
class _PageCopies:
    """The copies of a step; `make(u)` are those of its page u."""

    make: Callable[[Any], list[Any]]
    whole: Callable[[], list[Any]]  # copies as large as all of a full step, to wait for
    count: Any  # of pages
    most: int

    def start(self) -> None:
        unrolled = [functools.partial(self.make, np.int32(u)) for u in range(self.most)]
        self._run(unrolled, lambda copy: copy.start())

    def wait(self) -> None:
        self._run([self.whole], lambda copy: copy.wait())

    def _run(self, full: list[Callable[[], list[Any]]], run: Callable[[Any], None]) -> None:
        """Runs the copies of a full step, or those of the pages that there are."""

        @pl.when(self.count == self.most)
        def _() -> None:
            for some in full:
                for copy in some():
                    run(copy)

        def page(u: Any, carry: Any) -> Any:
            for copy in self.make(u):
                run(copy)
            return carry

        rest = jnp.where(self.count == self.most, 0, self.count)
        jax.lax.fori_loop(jnp.int32(0), rest, page, jnp.int32(0))


class AbstractPages(AbstractKeys):
    """Pages that a table lists, a row for each sequence."""

    def __init__(self, tables: jax.Array, num_pages: int, size: int, per_step: int):
        # an id that names no page gives the nearest one
        self.tables = jnp.clip(tables, 0, num_pages - 1)
        self.size, self.per_step, self.step = size, per_step, size * per_step

    def add(self, operands: grid.Operands, rows: Mapping[str, Callable[[int], Any]]) -> None:
        # a row at a time, in scalar memory: all of them need not fit there
        for name, spec in rows.items():
            operands.add(name, self.tables[:, None], spec(self.tables.shape[1]))

    def count(self, at: Span) -> Any:
        pages = self._end(at) - self._start(at)
        return jnp.maximum(_div(pages + (self.per_step - 1), self.per_step), 0)

    def _start(self, at: Span) -> Any:
        return _div(at.low, self.size)

    def _end(self, at: Span) -> Any:
        return _div(at.high + (self.size - 1), self.size)

    def bounds(self, at: Span, j: Any) -> tuple[Any, Any]:
        first = (self._start(at) + j * self.per_step) * self.size
        return first, first

    def copies(self, refs: Any, at: Span, j: Any, slot: Any) -> list[Any]:
        page = self._start(at) + j * self.per_step

        def make(u: Any) -> list[Any]:
            return [
                pltpu.make_async_copy(source, target, refs.arrived.at[slot])
                for source, target in self.pieces(refs, at.pages[0, page + u], slot, u)
            ]

        def whole() -> list[Any]:
            return [
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], refs.arrived.at[slot])
                for buffer in self.filled(refs)
            ]

        count = jnp.minimum(self._end(at) - page, self.per_step)
        return [_PageCopies(make, whole, count, self.per_step)]

    @abc.abstractmethod
    def filled(self, refs: Any) -> list[Any]:
        """The buffers that pages are copied into."""

    @abc.abstractmethod
    def pieces(self, refs: Any, page: Any, slot: Any, u: Any) -> list[tuple[Any, Any]]:
        """From where to where page u of a step is copied."""


class TokenPages(AbstractPages):
    """Pages [p, w, 2 g, d] with keys at even and values at odd heads."""

    def __init__(self, pages: jax.Array, tables: jax.Array, per_step: int, dtype: Any):
        num, size, double, width = pages.shape
        super().__init__(tables, num, size, per_step)
        self.array, self.dtype = pages, dtype
        self.heads = heads.Heads(double, width, pages.dtype)

    def add(self, operands: grid.Operands, rows: Mapping[str, Callable[[int], Any]]) -> None:
        super().add(operands, rows)
        operands.add_whole("kv_pages", self.array)

    def buffers(self) -> dict[str, Any]:
        shape = self.heads.buffer(self.per_step, self.size)
        parted = pltpu.VMEM((self.heads.num // 2, self.step, self.heads.width), self.dtype)
        return {
            "key": parted,
            "value": parted,
            "two_steps": pltpu.VMEM((2, *shape), self.array.dtype),
            "arrived": pltpu.SemaphoreType.DMA((2,)),
        }

    def pieces(self, refs: Any, page: Any, slot: Any, u: Any) -> list[tuple[Any, Any]]:
        # the axes of a buffer are slots, parts, pages, tokens, heads, lanes
        return self.heads.pieces(refs.kv_pages.at[page], refs.two_steps.at[slot], u)

    def filled(self, refs: Any) -> list[Any]:
        return [refs.two_steps]

    def part(self, refs: Any, slot: Any) -> None:
        names = {"key": (0, 2), "value": (1, 2)}
        _part(names, self.heads, refs.two_steps.at[slot], refs, self.size)

    def load(self, refs: Any, slot: Any, g: Any) -> tuple[jax.Array, jax.Array]:
        return refs.key[g], refs.value[g]


class HeadPages(AbstractPages):
    """Pages whose heads are apart: of keys [p, g, w, d] and of values [p, g, w, e].

    Without values, one array [p, 2 g, w, d] has keys at even and values at odd heads.
    """

    def __init__(
        self,
        key: jax.Array,
        value: jax.Array | None,
        tables: jax.Array,
        per_step: int,
        dtype: Any,
    ):
        num, _, size, _ = key.shape
        super().__init__(tables, num, size, per_step)
        self.arrays = {"key": key} if value is None else {"key": key, "value": value}
        self.dtype = dtype

    def add(self, operands: grid.Operands, rows: Mapping[str, Callable[[int], Any]]) -> None:
        super().add(operands, rows)
        for name, array in self.arrays.items():
            operands.add_whole(f"{name}_pages", array)

    def buffers(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            f"two_{name}": pltpu.VMEM((2, self.per_step, *array.shape[1:]), array.dtype)
            for name, array in self.arrays.items()
        }
        return made | {"arrived": pltpu.SemaphoreType.DMA((2,))}

    def pieces(self, refs: Any, page: Any, slot: Any, u: Any) -> list[tuple[Any, Any]]:
        return [
            (getattr(refs, f"{name}_pages").at[page], getattr(refs, f"two_{name}").at[slot, u])
            for name in self.arrays
        ]

    def filled(self, refs: Any) -> list[Any]:
        return [getattr(refs, f"two_{name}") for name in self.arrays]

    def part(self, refs: Any, slot: Any) -> None:
        pass

    def load(self, refs: Any, slot: Any, g: Any) -> tuple[jax.Array, jax.Array]:
        if len(self.arrays) == 2:
            k, v = refs.two_key[slot, :, g], refs.two_value[slot, :, g]
        else:
            k, v = refs.two_key[slot, :, 2 * g], refs.two_key[slot, :, 2 * g + 1]
        rows = lambda x: _cast(x, self.dtype).reshape(self.step, x.shape[-1])
        return rows(k), rows(v)


class LatentPages(AbstractPages):
    """Pages [p, w, n] of one head, whose values are the first columns of its keys."""

    def __init__(self, pages: jax.Array, e: int, tables: jax.Array, per_step: int, dtype: Any):
        num, size, self.width = pages.shape
        super().__init__(tables, num, size, per_step)
        self.array, self.e, self.dtype = pages, e, dtype

    def add(self, operands: grid.Operands, rows: Mapping[str, Callable[[int], Any]]) -> None:
        super().add(operands, rows)
        operands.add_whole("latent_pages", self.array)

    def buffers(self) -> dict[str, Any]:
        shape = (2, self.per_step, self.size, self.width)
        return {
            "two_steps": pltpu.VMEM(shape, self.array.dtype),
            "arrived": pltpu.SemaphoreType.DMA((2,)),
        }

    def pieces(self, refs: Any, page: Any, slot: Any, u: Any) -> list[tuple[Any, Any]]:
        return [(refs.latent_pages.at[page], refs.two_steps.at[slot, u])]

    def filled(self, refs: Any) -> list[Any]:
        return [refs.two_steps]

    def part(self, refs: Any, slot: Any) -> None:
        pass

    def load(self, refs: Any, slot: Any, g: Any) -> tuple[jax.Array, jax.Array]:
        k = _cast(refs.two_steps[slot], self.dtype).reshape(self.step, self.width)
        return k, k[:, : self.e]


def interleaved(pages: jax.Array, tables: jax.Array, per_step: int, dtype: Any) -> AbstractPages:
    """Pages [p, w, 2 g, d] with keys at even and values at odd heads, in the order XLA keeps."""
    _, _, double, width = pages.shape
    if heads.Heads(double, width, pages.dtype).dense:
        return TokenPages(pages, tables, per_step, dtype)
    return HeadPages(pages.swapaxes(1, 2), None, tables, per_step, dtype)


class Rows(AbstractKeys):
    """Keys [b, s, g, d] and values [b, s, g, e]; the last step ends with them."""

    def __init__(self, key: jax.Array, value: jax.Array, step: int, dtype: Any):
        _, self.length, groups, _ = key.shape
        self.step, self.dtype = _step_of_rows(min(step, self.length)), dtype
        self.heads = {
            name: heads.Heads(groups, x.shape[-1], x.dtype)
            for name, x in (("key", key), ("value", value))
        }
        self.dense = all(of.dense for of in self.heads.values())
        self.arrays = {"key": key, "value": value}
        if not self.dense:  # the order that XLA keeps
            self.arrays = {name: x.swapaxes(1, 2) for name, x in self.arrays.items()}

    def add(self, operands: grid.Operands, rows: Mapping[str, Callable[[int], Any]]) -> None:
        for name, array in self.arrays.items():
            operands.add_whole(f"{name}_rows", array)

    def buffers(self) -> dict[str, Any]:
        made: dict[str, Any] = {"arrived": pltpu.SemaphoreType.DMA((2,))}
        for name, of in self.heads.items():
            shape = (of.num, self.step, of.width)
            if self.dense:
                made[name] = pltpu.VMEM(shape, self.dtype)
                shape = of.buffer(self.step)
            made[f"two_{name}"] = pltpu.VMEM((2, *shape), of.dtype)
        return made

    def _start(self, at: Span) -> Any:
        return _div(at.low, self.step)

    def count(self, at: Span) -> Any:
        end = _div(at.high + (self.step - 1), self.step)
        return jnp.where(at.high > at.low, end - self._start(at), 0)

    def bounds(self, at: Span, j: Any) -> tuple[Any, Any]:
        fresh = (self._start(at) + j) * self.step
        return jnp.minimum(fresh, self.length - self.step), fresh

    def copies(self, refs: Any, at: Span, j: Any, slot: Any) -> list[Any]:
        first, _ = self.bounds(at, j)
        first = pl.multiple_of(first, math.gcd(self.length, self.step))
        tokens, made = pl.ds(first, self.step), []
        for name, of in self.heads.items():
            source = getattr(refs, f"{name}_rows").at[at.sequence]
            target = getattr(refs, f"two_{name}").at[slot]
            pieces = [(source.at[:, tokens], target)]
            if self.dense:
                pieces = of.pieces(source.at[tokens], target)
            made += [pltpu.make_async_copy(a, b, refs.arrived.at[slot]) for a, b in pieces]
        return made

    def part(self, refs: Any, slot: Any) -> None:
        if self.dense:
            for name, of in self.heads.items():
                _part({name: (0, 1)}, of, getattr(refs, f"two_{name}").at[slot], refs, 1)

    def load(self, refs: Any, slot: Any, g: Any) -> tuple[jax.Array, jax.Array]:
        if self.dense:
            return refs.key[g], refs.value[g]
        return _cast(refs.two_key[slot, g], self.dtype), _cast(refs.two_value[slot, g], self.dtype)


def _step_of_rows(most: int) -> int:
    """Keys of a step: at most 128, or a multiple of 128."""
    return most if most <= tiles.LANES else most - most % tiles.LANES


def pages_of_step(block_k: int, size: int, blocks: int) -> int:
    """Pages of about `block_k` keys: at most 128 keys, or a multiple of 128."""
    most = max(min(block_k // size, blocks), 1)
    if most * size <= tiles.LANES:
        return most
    whole = tiles.LANES // math.gcd(size, tiles.LANES)  # so many pages are a multiple of 128 keys
    if most >= whole:
        return most - most % whole
    return max(tiles.LANES // size, 1)
