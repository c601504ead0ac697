"""`MaskInfo`: all that decides which pairs attend, as one pytree and without a T x S array."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Int32, Shaped

from ejkernel.types import block_picture
from ejkernel.xla_utils import positions, segments

Window = tuple[int | None, int | None]

_STATIC = {"static": True}
_INT32_MAX = np.iinfo(np.int32).max


# eq=False: comparing arrays field by field has no truth value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MaskInfo:
    """A mask in parts that are and-ed; arrays are leaves, options are static.

    Build it with a `from_*` and narrow it with `apply_*`, which check their input; every `apply_*`
    returns a new object. Batch axes of size 1 broadcast.

    Query i is at position S-T+i and key j at j. With lengths or cumulative lengths positions are
    per sequence: query i at len_k - len_q + i by real lengths (a length that is None: the whole
    axis). `q_positions` and `kv_positions` replace these, each for its side. Segment ids never
    move positions.
    """

    attention_mask: Bool[Array, "#b #h #t #s"] | None = None
    q_segment_ids: Int[Array, "#b t"] | None = None
    kv_segment_ids: Int[Array, "#b s"] | None = None
    q_positions: Int32[Array, "#b t"] | None = None
    kv_positions: Int32[Array, "#b s"] | None = None
    q_lengths: Int32[Array, " b"] | None = None
    kv_lengths: Int32[Array, " b"] | None = None
    cum_seqlens_q: Int32[Array, " bounds"] | None = None
    cum_seqlens_k: Int32[Array, " bounds"] | None = None
    causal: bool = dataclasses.field(default=False, metadata=_STATIC)
    sliding_window: Window | None = dataclasses.field(default=None, metadata=_STATIC)
    # Only a record that the ids hold chunks of today's positions, so that those may not move.
    chunked: bool = dataclasses.field(default=False, metadata=_STATIC)

    @classmethod
    def from_segments(
        cls, q_ids: Int[ArrayLike, "#b t"], kv_ids: Int[ArrayLike, "#b s"] | None = None
    ) -> "MaskInfo":
        """Attend iff the ids are equal and not negative.

        Args:
          q_ids: Ids of the queries.
          kv_ids: Ids of the keys. Default: `q_ids`.
        """
        op = "MaskInfo.from_segments"
        q_ids = segments.as_integer_array(op, "q_ids", q_ids, "b t")
        kv_ids = q_ids if kv_ids is None else kv_ids
        kv_ids = segments.as_integer_array(op, "kv_ids", kv_ids, "b s")
        info = cls(q_segment_ids=q_ids, kv_segment_ids=kv_ids)
        info._batch(op)
        return info

    @classmethod
    def from_attention_mask(cls, mask: Shaped[ArrayLike, "#b #h #t #s"]) -> "MaskInfo":
        """Attend where a mask of bools or integers is nonzero; each axis is full or 1."""
        mask = segments.as_bool_mask("MaskInfo.from_attention_mask", "mask", mask)
        if mask.ndim != 4:
            raise ValueError(
                "`MaskInfo.from_attention_mask`: `mask` must have rank 4, [b, h, t, s] with each "
                f"axis full or 1; got {mask.shape}. Write `mask[:, None, None, :]` for key padding "
                "[b, s], `mask[None, None]` for [t, s]."
            )
        return cls(attention_mask=mask)

    @classmethod
    def from_cu_seqlens(
        cls, cum_q: Int[ArrayLike, " bounds"], cum_k: Int[ArrayLike, " bounds"] | None = None
    ) -> "MaskInfo":
        """Attend inside each of the sequences packed along the token axis of a batch of one.

        Args:
          cum_q: Token offsets of the queries, from 0; equal neighbours are empty sequences.
          cum_k: Token offsets of the keys. Default: `cum_q`, which needs T = S.
        """
        op = "MaskInfo.from_cu_seqlens"
        cum_q = _int32(op, "cum_q", cum_q, "n+1")
        cum_k = None if cum_k is None else _int32(op, "cum_k", cum_k, "n+1")
        if cum_q.size == 0 or (cum_k is not None and cum_k.shape != cum_q.shape):
            raise ValueError(
                f"`{op}`: `cum_q` and `cum_k` must have the same n+1 >= 1 entries; got "
                f"{cum_q.shape} and {None if cum_k is None else cum_k.shape}. Repeat the last "
                "entry of the shorter one."
            )
        for name, bounds in (("cum_q", cum_q), ("cum_k", cum_k)):
            if bounds is None or isinstance(bounds, jax.core.Tracer):
                continue
            if (first := int(np.asarray(bounds)[0])) != 0:
                raise ValueError(
                    f"`{op}`: `{name}` must start at 0; got {first}. Put a 0 before it: the tokens "
                    "before the first sequence are then a sequence of their own."
                )
        return cls(cum_seqlens_q=cum_q, cum_seqlens_k=cum_k)

    @classmethod
    def from_lengths(
        cls, q_lengths: Int[ArrayLike, " b"], kv_lengths: Int[ArrayLike, " b"] | None = None
    ) -> "MaskInfo":
        """Attend inside the real length of each right-padded row.

        Args:
          q_lengths: Real queries of each row; rows beyond see nothing.
          kv_lengths: Real keys of each row. Default: `q_lengths`.
        """
        op = "MaskInfo.from_lengths"
        q_lengths = _int32(op, "q_lengths", q_lengths, "b")
        kv_lengths = q_lengths if kv_lengths is None else kv_lengths
        info = cls(q_lengths=q_lengths, kv_lengths=_int32(op, "kv_lengths", kv_lengths, "b"))
        info._batch(op)
        return info

    def apply_causal(self) -> "MaskInfo":
        """Hide keys whose position is after the query's."""
        return dataclasses.replace(self, causal=True)

    def apply_sliding_window(self, window: int | Window) -> "MaskInfo":
        """Hide keys outside `pos_q - left <= pos_k <= pos_q + right`; two windows intersect.

        Args:
          window: `(left, right)`, -1 or None for no limit on that side; an int means both sides.
        """
        old = self.sliding_window or (None, None)
        new = tuple(map(_narrower, old, _canonical_window(window)))
        return dataclasses.replace(self, sliding_window=None if new == (None, None) else new)

    def apply_positions(
        self,
        q_positions: Int[ArrayLike, "#b t"] | None = None,
        kv_positions: Int[ArrayLike, "#b s"] | None = None,
    ) -> "MaskInfo":
        """Replace positions; a side that is None keeps its own.

        Lengths and cumulative lengths still hide what is beyond them. Call it before
        `apply_chunked`.
        """
        op = "MaskInfo.apply_positions"
        self._refuse_if_chunked(op)
        changes = {}
        if q_positions is not None:
            changes["q_positions"] = _int32(op, "q_positions", q_positions, "b t")
        if kv_positions is not None:
            changes["kv_positions"] = _int32(op, "kv_positions", kv_positions, "b s")
        info = dataclasses.replace(self, **changes)
        info._batch(op)
        return info

    def apply_kv_lengths(self, lengths: Int[ArrayLike, " b"]) -> "MaskInfo":
        """Hide keys beyond each row's length; the shorter of two lengths counts.

        Lengths move positions: without `q_lengths` the T queries are the last of the row's real
        keys, as in decoding. Call it before `apply_chunked`.
        """
        op = "MaskInfo.apply_kv_lengths"
        self._refuse_if_chunked(op)
        if self.cum_seqlens_q is not None or self.cum_seqlens_k is not None:
            raise ValueError(
                f"`{op}`: `lengths` are of rows, and `cum_seqlens_q/k` already give the lengths of "
                "packed sequences. Shorten those, or pad the rows and use `from_lengths`."
            )
        lengths = _int32(op, "lengths", lengths, "b")
        info = dataclasses.replace(self, kv_lengths=lengths)
        info._batch(op)
        if self.kv_lengths is None:
            return info
        return dataclasses.replace(self, kv_lengths=jnp.minimum(self.kv_lengths, lengths))

    def apply_chunked(
        self, chunk_size: int, *, q_length: int | None = None, kv_length: int | None = None
    ) -> "MaskInfo":
        """Attend only inside one chunk: `pos_q // chunk_size == pos_k // chunk_size`.

        The chunks become part of the segment ids, O(T+S), which get a batch axis of 1 when nothing
        says the batch. Positions are those of this moment: give lengths and positions first.

        Args:
          chunk_size: Positions of one chunk.
          q_length: T, needed if no field determines it.
          kv_length: S, likewise.
        """
        op = "MaskInfo.apply_chunked"
        if not _is_int(chunk_size) or chunk_size < 1:
            raise ValueError(f"`{op}`: `chunk_size` must be a static int >= 1; got {chunk_size!r}.")
        chunk_size = min(int(chunk_size), _INT32_MAX)
        t, s = self._axis_lengths(op, q_length, kv_length)
        b = self._batch(op)
        q_pos, kv_pos = self._positions(op, t, s)
        q_ids = jnp.broadcast_to(q_pos // chunk_size, (b, t))
        kv_ids = jnp.broadcast_to(kv_pos // chunk_size, (b, s))
        # positions of the rule need no sort: keys start at 0, so a query in a negative chunk sees
        # nothing, which is what a negative id says
        if any(x is not None for x in (self.q_segment_ids, self.q_positions, self.kv_positions)):
            q_ids, kv_ids = self._split_by(q_ids, kv_ids)
        return dataclasses.replace(self, q_segment_ids=q_ids, kv_segment_ids=kv_ids, chunked=True)

    def resolve_positions(
        self, q_length: int | None = None, kv_length: int | None = None
    ) -> tuple[Int32[Array, "#b t"], Int32[Array, "#b s"]]:
        """The positions that `causal`, windows and chunks compare, without padding marked.

        Args:
          q_length: T, needed if no field determines it.
          kv_length: S, likewise.
        """
        op = "MaskInfo.resolve_positions"
        return self._positions(op, *self._axis_lengths(op, q_length, kv_length))

    def materialize(
        self, q_length: int | None = None, kv_length: int | None = None
    ) -> Bool[Array, "b h t s"]:
        """The dense mask of all parts; True = attend. The head axis is 1 unless a mask has more.

        Args:
          q_length: T, needed if no field determines it (an axis of 1 in a mask does not).
          kv_length: S, likewise.
        """
        op = "MaskInfo.materialize"
        t, s = self._axis_lengths(op, q_length, kv_length)
        q_pos, kv_pos = self._positions(op, t, s)
        q_pos, kv_pos = q_pos[:, None, :, None], kv_pos[:, None, None, :]
        visible = jnp.ones((self._batch(op), 1, t, s), bool)
        if self.attention_mask is not None:
            visible &= self.attention_mask
        if self.q_segment_ids is not None:
            visible &= segments.segment_ids_to_mask(self.q_segment_ids, self.kv_segment_ids)
        if (sequences := self._sequence_ids(op, t, s)) is not None:
            visible &= segments.segment_ids_to_mask(*sequences)
        if self.causal:
            visible &= kv_pos <= q_pos
        left, right = self.sliding_window or (None, None)
        if left is not None:
            visible &= q_pos - left <= kv_pos
        if right is not None:
            visible &= kv_pos <= q_pos + right
        return visible

    def visualize(
        self,
        q_length: int | None = None,
        kv_length: int | None = None,
        *,
        batch: int = 0,
        head: int = 0,
        max_rows: int = 32,
        max_cols: int = 64,
    ) -> str:
        """A picture of the mask in text: queries downwards, keys to the right.

        Each character is a block of pairs: "#" all of them attend, "+" some, "." none. Blocks are
        as small as the limits allow. A row of characters is computed at a time, so that no T x S
        array exists.

        Args:
          q_length: T, needed if no field determines it.
          kv_length: S, likewise.
          batch: The row of the batch to draw.
          head: The head to draw.
          max_rows: Most rows of characters.
          max_cols: Most columns of characters.

        Returns:
          The picture under a line that says its scale; nothing is printed.
        """
        op = "MaskInfo.visualize"
        for name, limit in (("max_rows", max_rows), ("max_cols", max_cols)):
            if not _is_int(limit) or limit < 1:
                raise ValueError(f"`{op}`: `{name}` must be an int >= 1; got {limit!r}.")
        t, s = self._axis_lengths(op, q_length, kv_length)
        one = self._one_row(op, t, s, batch, head)
        height, width = max(-(-t // max_rows), 1), max(-(-s // max_cols), 1)
        title = (
            f"{t} queries x {s} keys, batch {batch}, head {head}; a character is "
            f"{height} x {width}: {block_picture.LEGEND}"
        )
        strip = functools.partial(one._strip, op, t, s)
        return "\n".join(
            [title, *block_picture.lines(block_picture.kinds(strip, t, s, height, width))]
        )

    def block_kinds(
        self,
        block_size: int,
        q_length: int | None = None,
        kv_length: int | None = None,
        *,
        batch: int = 0,
        head: int = 0,
    ) -> np.ndarray:
        """For each block of queries and keys, 0 if no pair attends, 1 if some do, 2 if all do.

        The lengths, batch row and head are those of `visualize`.
        """
        op = "MaskInfo.block_kinds"
        if not _is_int(block_size) or block_size < 1:
            raise ValueError(f"`{op}`: `block_size` must be an int >= 1; got {block_size!r}.")
        t, s = self._axis_lengths(op, q_length, kv_length)
        one = self._one_row(op, t, s, batch, head)
        strip = functools.partial(one._strip, op, t, s)
        return block_picture.kinds(strip, t, s, block_size, block_size)

    def _one_row(self, op: str, t: int, s: int, batch: int, head: int) -> "MaskInfo":
        """The mask of one batch row and head: positions, and ids that say what lengths hide."""
        heads = 1 if self.attention_mask is None else self.attention_mask.shape[1]
        for name, index, count in (("batch", batch, self._batch(op)), ("head", head, heads)):
            if not _is_int(index) or index < 0 or (count != 1 and index >= count):
                raise ValueError(f"`{op}`: `{name}` must be in [0, {count}); got {index!r}.")

        def row(x: Array | None, index: int = batch) -> Any:  # None only for None
            if x is None:
                return None
            start = index if x.shape[0] > 1 else 0
            return x[start : start + 1]

        mask = row(self.attention_mask)
        q_pos, kv_pos = map(row, self._positions(op, t, s))
        info = MaskInfo(
            attention_mask=mask if mask is None else row(mask[0], head)[None],
            q_segment_ids=row(self.q_segment_ids),
            kv_segment_ids=row(self.kv_segment_ids),
            q_positions=q_pos,
            kv_positions=kv_pos,
            causal=self.causal,
            sliding_window=self.sliding_window,
        )
        if (sequences := self._sequence_ids(op, t, s)) is not None:
            q_ids, kv_ids = info._split_by(*map(row, sequences))
            outside = [ids < 0 for ids in map(row, sequences)]
            q_ids, kv_ids = jnp.where(outside[0], -1, q_ids), jnp.where(outside[1], -1, kv_ids)
            info = dataclasses.replace(info, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
        return info

    def _strip(self, op: str, t: int, s: int, start: int, stop: int) -> Bool[Array, "rows s"]:
        """Some rows of the mask of `_one_row`."""
        mask = self.attention_mask
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, start:stop]
        q_ids = self.q_segment_ids
        part = dataclasses.replace(
            self,
            attention_mask=mask,
            q_segment_ids=None if q_ids is None else q_ids[:, start:stop],
            q_positions=self.q_positions[:, start:stop],
        )
        return part.materialize(stop - start, s)[0, 0]

    def _refuse_if_chunked(self, op: str) -> None:
        if self.chunked:
            raise ValueError(
                f"`{op}`: positions would move, and the chunks already follow the old ones. Call "
                "it before `apply_chunked`."
            )

    def _batch(self, op: str) -> int:
        """The batch that all fields broadcast to; 1 when nothing says it."""
        rows = {
            "attention_mask": self.attention_mask,
            "q_segment_ids": self.q_segment_ids,
            "kv_segment_ids": self.kv_segment_ids,
            "q_positions": self.q_positions,
            "kv_positions": self.kv_positions,
        }
        sizes = {name: a.shape[0] for name, a in rows.items() if a is not None and a.shape[0] != 1}
        lengths = {"q_lengths": self.q_lengths, "kv_lengths": self.kv_lengths}
        sizes |= {name: a.shape[0] for name, a in lengths.items() if a is not None}
        if self.cum_seqlens_q is not None or self.cum_seqlens_k is not None:
            sizes["cum_seqlens_q/k (packed)"] = 1
        if len(set(sizes.values())) > 1:
            raise ValueError(f"`{op}`: the fields disagree on the batch size: {sizes}.")
        return next(iter(sizes.values()), 1)

    def _axis_lengths(self, op: str, q_length: int | None, kv_length: int | None):
        """T and S from the arguments and the fields, which must agree."""
        if (self.q_segment_ids is None) != (self.kv_segment_ids is None):
            raise ValueError(
                f"`{op}`: `q_segment_ids` and `kv_segment_ids` go together; got one of them. "
                "`from_segments` sets both."
            )
        mask = self.attention_mask
        _, _, mask_t, mask_s = (1, 1, 1, 1) if mask is None else mask.shape
        q_side = {"q_segment_ids": self.q_segment_ids, "q_positions": self.q_positions}
        kv_side = {"kv_segment_ids": self.kv_segment_ids, "kv_positions": self.kv_positions}
        return (
            _one_length(op, "q_length", q_length, mask_t, q_side),
            _one_length(op, "kv_length", kv_length, mask_s, kv_side),
        )

    def _packed(self, op: str, t: int, s: int) -> tuple[Array, Array] | None:
        """Both cumulative lengths; one alone means both when T = S."""
        cum_q, cum_k = self.cum_seqlens_q, self.cum_seqlens_k
        if cum_q is None and cum_k is None:
            return None
        if self.q_lengths is not None or self.kv_lengths is not None:
            raise ValueError(f"`{op}`: give `cum_seqlens_q/k` or `q_lengths/kv_lengths`, not both.")
        if (cum_q is None or cum_k is None) and t != s:
            missing = "cum_seqlens_q" if cum_q is None else "cum_seqlens_k"
            raise ValueError(f"`{op}`: `{missing}` is needed when T != S; got T={t}, S={s}.")
        cum_q = cum_k if cum_q is None else cum_q
        assert cum_q is not None
        return cum_q, (cum_q if cum_k is None else cum_k)

    def _tokens(self, op: str, t: int, s: int) -> positions.Tokens:
        """Positions of lengths or cumulative lengths, and ids that say what these hide."""
        if (packed := self._packed(op, t, s)) is not None:
            return positions.of_packed(*packed, t, s)
        if self.q_lengths is None and self.kv_lengths is None:
            return positions.Tokens()
        return positions.of_rows(*self._row_lengths(t, s), t, s)

    def _sequence_ids(self, op: str, t: int, s: int) -> tuple[Array, Array] | None:
        """Segment ids that say what lengths or cumulative lengths hide."""
        return next(iter(self._tokens(op, t, s).ids), None)

    def _row_lengths(self, t: int, s: int) -> tuple[Int32[Array, " #b"], Int32[Array, " #b"]]:
        """Real lengths; a side without lengths is all real."""
        whole_t, whole_s = jnp.full(1, t, jnp.int32), jnp.full(1, s, jnp.int32)
        return (
            whole_t if self.q_lengths is None else self.q_lengths,
            whole_s if self.kv_lengths is None else self.kv_lengths,
        )

    def _positions(self, op: str, t: int, s: int) -> tuple[Array, Array]:
        return self._tokens(op, t, s).replaced(self.q_positions, self.kv_positions).both(t, s)

    def _split_by(
        self, q_parts: Int32[Array, "b t"], kv_parts: Int32[Array, "b s"]
    ) -> tuple[Int32[Array, "b t"], Int32[Array, "b s"]]:
        """Ids that are equal exactly where the old ids and the parts both are."""
        (_, t), parts = q_parts.shape, jnp.concatenate([q_parts, kv_parts], axis=1)
        ids = jnp.zeros_like(parts)
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            q_ids = jnp.broadcast_to(self.q_segment_ids, q_parts.shape)
            kv_ids = jnp.broadcast_to(self.kv_segment_ids, kv_parts.shape)
            with jax.numpy_dtype_promotion("standard"):  # ids of two widths are still ids
                ids = jnp.concatenate([q_ids, kv_ids], axis=1)
        joint = jnp.where(ids < 0, -1, _pair_ranks(ids, parts))
        return joint[:, :t], joint[:, t:]


def _int32(op: str, name: str, value: ArrayLike, axes: str) -> Int32[Array, "..."]:
    return segments.as_integer_array(op, name, value, axes).astype(jnp.int32)


def _is_int(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _canonical_window(window: int | Window | None) -> Window:
    """An int is both sides; -1, and more than positions can differ, are no limit."""
    pair = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2 or not all(side is None or (_is_int(side) and side >= -1) for side in pair):
        raise ValueError(
            "`MaskInfo.apply_sliding_window`: `window` must be a static int or (left, right) of "
            f"ints >= 0, -1 for no limit; got {window!r}."
        )
    left, right = (int(s) if s is not None and 0 <= s < _INT32_MAX else None for s in pair)
    return left, right


def _narrower(a: int | None, b: int | None) -> int | None:
    return min((side for side in (a, b) if side is not None), default=None)


def _one_length(op: str, argument: str, given: int | None, mask_axis: int, side: dict) -> int:
    known = {name: array.shape[1] for name, array in side.items() if array is not None}
    if mask_axis != 1:
        known["attention_mask"] = mask_axis
    if given is not None:
        known[argument] = given
    if not known:
        raise ValueError(f"`{op}`: no field determines this length. Pass `{argument}=`.")
    if len(set(known.values())) > 1:
        raise ValueError(f"`{op}`: `{argument}` must be one length for all; got {known}.")
    return next(iter(known.values()))


def _pair_ranks(major: Int[Array, "b n"], minor: Int[Array, "b n"]) -> Int32[Array, "b n"]:
    """Dense rank of each pair among its row's; a product of both could overflow on large ids."""
    order = lax.broadcasted_iota(jnp.int32, major.shape, 1)
    major, minor, order = lax.sort((major, minor, order), dimension=1, num_keys=2)
    changes = (major[:, 1:] != major[:, :-1]) | (minor[:, 1:] != minor[:, :-1])
    first = jnp.zeros_like(order[:, :1])
    ranks = jnp.concatenate([first, jnp.cumsum(changes, axis=1, dtype=jnp.int32)], axis=1)
    _, ranks = lax.sort((order, ranks), dimension=1, num_keys=1)
    return ranks
