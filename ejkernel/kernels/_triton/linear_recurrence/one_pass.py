"""The recurrence forward in one pass over the tokens, for one gate a head or none.

A program carries the columns BE of the state of one row and head from chunk to chunk, in registers,
and computes their outputs on the way: no state goes to device memory and comes back. Where rows and
heads are too few to fill a device, rows are cut into segments of chunks. A launch before the pass
then finds what each segment leaves of a state of zeros; a program decays and adds what the segments
before its own have left.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton._blocks import chunks as blocks
from ejkernel.kernels._triton._blocks import decays
from ejkernel.kernels._triton.linear_recurrence import states

_UNSPECIALISED = (*states.UNSPECIALISED, "segments.length")


class Segments(NamedTuple):
    """How rows are cut, and what each segment but a row's last leaves; None before it is known."""

    length: Any  # chunks of a segment
    COUNT: tl.constexpr  # segments of a row
    left: Any  # float32 [rows * segments, h, d, e], of a state of zeros
    decays: Any  # float32 [rows * segments, h], logarithms


class Place(NamedTuple):
    """What a program works on."""

    row: Any
    segment: Any
    head: Any
    o_e: Any  # [BE]


@triton.jit
def _place(sizes, segments, BE: tl.constexpr):
    """Programs with columns of one state are neighbours: they share queries and keys."""
    pid = tl.program_id(0)
    BLOCKS_E: tl.constexpr = (sizes.E + BE - 1) // BE
    o_e = (pid % BLOCKS_E) * BE + tl.arange(0, BE)
    i_h = (pid // BLOCKS_E) % sizes.HEADS
    i_s = pid // (BLOCKS_E * sizes.HEADS)
    return Place(i_s // segments.COUNT, i_s % segments.COUNT, i_h, o_e)


@triton.jit
def _carried(b_h, b_k, b_v, end, total, PRECISION: tl.constexpr):
    """The state after a chunk, [BD, BE]. `end`, `total`: log decays to its end, and of it all."""
    b_v = (b_v * decays.decay(end)[:, None]).to(b_v.dtype)
    b_h *= decays.decay(total)
    return tl.dot(tl.trans(b_k), b_v, b_h, input_precision=PRECISION)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def linear_recurrence_segments_kernel(
    key, value, gates, chunks, sizes, segments, left, log_decays,
    BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What the chunks of a segment leave of a state of zeros, and their decay."""
    at = _place(sizes, segments, BE)
    row = blocks.row_of(chunks, at.row)
    first = at.segment * segments.length
    if first + segments.length >= row.count:  # no segment comes after it
        return
    o_c, o_d = tl.arange(0, chunks.SIZE), tl.arange(0, BD)
    b_h = tl.zeros([BD, BE], tl.float32)
    b_total = tl.full([], 0.0, tl.float32)
    for j in range(first, first + segments.length):
        span = blocks.span_of(chunks, row, j)
        b_k = blocks.load(key, span, at.head, o_c, o_d)  # [C, BD]
        b_v = blocks.load(value, span, at.head, o_c, at.o_e)  # [C, BE]
        b_a = decays.head_gates(gates, span, at.head, o_c)
        _, end, total = decays.head_sums(gates, b_a, span, at.head, chunks.SIZE)
        b_h = _carried(b_h, b_k, b_v, end, total, sizes.PRECISION)
        b_total += total
    place = at.row * segments.COUNT + at.segment
    states.store_state(left, b_h, place, at.head, o_d, at.o_e, sizes)
    # the programs of a head's other columns store the same
    tl.store(log_decays + place.to(tl.int64) * sizes.HEADS + at.head, b_total)


@triton.jit
def _before(start, at, segments, sizes, o_d, BE: tl.constexpr):
    """The state before a segment, float32 [BD, BE]."""
    if start is not None:
        b_h = states.load_state(start, at.row, at.head, o_d, at.o_e, sizes).to(tl.float32)
    else:
        b_h = tl.zeros([o_d.shape[0], BE], tl.float32)
    if segments.left is not None:
        for i in range(0, at.segment):
            place = at.row * segments.COUNT + i
            log_decay = tl.load(segments.decays + place.to(tl.int64) * sizes.HEADS + at.head)
            b_left = states.load_state(segments.left, place, at.head, o_d, at.o_e, sizes)
            b_h = b_h * decays.decay(log_decay) + b_left
    return b_h


@triton.jit(do_not_specialize=_UNSPECIALISED)
def linear_recurrence_pass_kernel(
    query, key, value, gates, start, chunks, sizes, segments, out, last,
    BD: tl.constexpr, BE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Outputs of a segment, and the state after the row's last one."""
    at = _place(sizes, segments, BE)
    row = blocks.row_of(chunks, at.row)
    first = at.segment * segments.length
    if (first >= row.count) & (at.segment > 0):
        return
    stop = tl.minimum(first + segments.length, row.count)
    C: tl.constexpr = chunks.SIZE
    o_c, o_d = tl.arange(0, C), tl.arange(0, BD)
    b_h = _before(start, at, segments, sizes, o_d, BE)
    if gates.g is None:  # the same for all chunks
        b_pairs = decays.head_pairs(gates, None, at.head, C) * SCALE
    for j in range(first, stop):
        span = blocks.span_of(chunks, row, j)
        b_q = blocks.load(query, span, at.head, o_c, o_d)  # [C, BD]
        b_k = blocks.load(key, span, at.head, o_c, o_d)
        b_v = blocks.load(value, span, at.head, o_c, at.o_e)  # [C, BE]
        b_a = decays.head_gates(gates, span, at.head, o_c)
        from_start, to_end, total = decays.head_sums(gates, b_a, span, at.head, C)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=sizes.PRECISION)
        if gates.g is not None:
            b_pairs = decays.head_pairs(gates, b_a, at.head, C) * SCALE
        b_p = (b_s * b_pairs).to(b_v.dtype)
        # products of float16 take states in float32: it has too few exponents for them
        wide = b_q.dtype if b_q.dtype == tl.bfloat16 else tl.float32
        b_o = tl.dot(b_q.to(wide), b_h.to(wide), input_precision=sizes.STATE_PRECISION)
        b_o *= (decays.decay(from_start) * SCALE)[:, None]
        b_o = tl.dot(b_p, b_v, b_o, input_precision=sizes.PRECISION)
        blocks.store(out, b_o, span, at.head, o_c, at.o_e, sizes.HEADS, sizes.E)
        b_h = _carried(b_h, b_k, b_v, to_end, total, sizes.PRECISION)
    if last is not None:
        if stop == row.count:
            states.store_state(last, b_h, at.row, at.head, o_d, at.o_e, sizes)


def run(made: Any, cfg: Any) -> tuple[jax.Array, jax.Array | None]:
    """Outputs, and the last states where the call wants them."""
    block_e = made.block_e(cfg)
    most_chunks = max(cdiv(made.t, cfg.block_t), 1)
    segments = Segments(cdiv(most_chunks, cfg.segments), cfg.segments, None, None)
    shared = {
        "grid": (made.rows * cfg.segments * made.heads * cdiv(made.e, block_e),),
        **cfg.launch(),
        "BD": made.padded_d,
        "BE": block_e,
    }
    state = (made.heads, made.d, made.e)
    if cfg.segments > 1:
        places = made.rows * cfg.segments
        found = triton_call(
            linear_recurrence_segments_kernel,
            inputs=made.inputs("key", "value") | {"segments": segments},
            outputs={
                "left": jax.ShapeDtypeStruct((places, *state), jnp.float32),
                "log_decays": jax.ShapeDtypeStruct((places, made.heads), jnp.float32),
            },
            **shared,
        )
        segments = segments._replace(left=found["left"], decays=found["log_decays"])
    args = made.args
    wanted = jax.ShapeDtypeStruct((made.rows, *state), jnp.float32)
    found = triton_call(
        linear_recurrence_pass_kernel,
        inputs=made.inputs("query", "key", "value")
        | {"start": args.initial_state, "segments": segments},
        outputs={
            "out": jax.ShapeDtypeStruct((made.batch, made.t, made.heads, made.e), args.query.dtype),
            "last": wanted if args.return_state else None,
        },
        zeroed=made.zeroed("out"),
        **shared,
        SCALE=made.scale,
    )
    return found["out"], found["last"]
