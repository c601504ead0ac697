"""Gradients of one chunk and head: of queries, keys, values and log gates."""

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import chunks as blocks
from ejkernel.kernels._triton._blocks import decays
from ejkernel.kernels._triton.linear_recurrence import fwd, states


@triton.jit
def _element_pairs(
    b_s, b_ds, own, b_q, b_k, b_a, b_da, gates, C: tl.constexpr, PRECISION: tl.constexpr,
    TERMS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Scores b_s [t, s] as `fwd.pair_scores`, and the gradients of pairs inside the chunk.

    b_ds [t, s] are the gradients of scores, and `own` [t] those of a token with itself. b_da is
    added to; results are scores and the gradients of a block of queries, keys and gates.
    """
    o_c = tl.arange(0, C)
    dots = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
    b_s += tl.where(o_c[:, None] == o_c[None, :], dots[:, None], 0.0)
    b_dq = own[:, None] * b_k.to(tl.float32)  # [C, BD]
    b_dk = own[:, None] * b_q.to(tl.float32)
    LEVELS: tl.constexpr = fwd.levels(C)
    for LEVEL in tl.static_range(LEVELS):
        steps = decays.level_weights(C, LEVEL, False)
        factor = decays.decay(decays.sums(steps, b_a, gates.TERMS))  # [C, BD]
        later = (b_q * factor).to(b_q.dtype)
        earlier = (b_k * factor).to(b_k.dtype)
        pairs = decays.level_pairs(C, LEVEL)
        dots = tl.dot(later, tl.trans(earlier), input_precision=PRECISION)
        b_s += tl.where(pairs, dots, 0.0)
        ds = tl.where(pairs, b_ds, 0.0).to(b_q.dtype)
        dq = tl.dot(ds, earlier, input_precision=PRECISION) * factor  # of second halves
        dk = tl.dot(tl.trans(ds), later, input_precision=PRECISION) * factor  # of first halves
        b_dq += dq
        b_dk += dk
        if GATED:
            # a decay's gradient times the decay: each row of the sum has one of the two
            dx = b_q.to(tl.float32) * dq + b_k.to(tl.float32) * dk
            b_da += decays.sums(decays.level_weights(C, LEVEL, True), dx, TERMS)
    return b_s, b_dq, b_dk, b_da


@triton.jit
def _element_block(
    b_s, b_ds, own, span, i_h, o_c, o_d, gates, of_chunk, from_states,
    PRECISION: tl.constexpr, TERMS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of elements with gates of their own.

    of_chunk: queries and keys [C, BD], and what the steps of the whole chunk leave of the state
    times its gradient, [BD]. from_states: gradients [C, BD] of decayed queries and keys.
    """
    b_q, b_k, kept = of_chunk
    C: tl.constexpr = b_q.shape[0]
    b_a = decays.element_gates(gates, span, i_h, o_c, o_d)
    start = decays.decay(decays.sums(decays.up_to(C), b_a, gates.TERMS))
    end = decays.decay(decays.sums(decays.after(C), b_a, gates.TERMS))
    dq_in = from_states[0] * start
    dk_out = from_states[1] * end
    b_da = tl.zeros(b_q.shape, tl.float32)
    if GATED:
        b_da += (kept * decays.decay(tl.sum(b_a, 0)))[None, :]
        # the transposes of `up_to` and `after`
        b_da += decays.sums(o_c[None, :] >= o_c[:, None], b_q.to(tl.float32) * dq_in, TERMS)
        b_da += decays.sums(o_c[None, :] < o_c[:, None], b_k.to(tl.float32) * dk_out, TERMS)
    b_s, b_dq, b_dk, b_da = _element_pairs(
        b_s, b_ds, own, b_q, b_k, b_a, b_da, gates, C, PRECISION, TERMS, GATED
    )
    return b_s, b_dq + dq_in, b_dk + dk_out, b_da, (b_k * end).to(b_k.dtype)


@triton.jit
def _head_gradients(gates, around, of_queries, of_keys, kept, span, C: tl.constexpr):
    """Gradients of the log gates of one head, [C], or their sum [C] in parts without `g`.

    around [t, s]: gradients of pairs times their scores. of_queries, of_keys [C]: those of the
    decays from the chunk's start and to its end. kept: that of the whole chunk's.
    """
    o_t = tl.arange(0, C)[:, None]
    o_s = tl.arange(0, C)[None, :]
    if gates.g is not None:
        # a gate is in the decay of each pair around it: sums over t from it, then over s before
        later = tl.cumsum(around, 0, reverse=True)  # [u, s]
        total = tl.sum(tl.where(o_s < o_t, later, 0.0), 1)
        total += tl.sum(tl.where(o_s >= o_t, of_queries[None, :], 0.0), 1)
        total += tl.sum(tl.where(o_s < o_t, of_keys[None, :], 0.0), 1)
        return total + kept
    else:
        o_c = tl.arange(0, C)
        total = tl.sum(around * tl.maximum(o_t - o_s, 0).to(tl.float32), 1)
        total += of_queries * tl.minimum(o_c + 1, span.count).to(tl.float32)
        total += of_keys * tl.maximum(span.count - 1 - o_c, 0).to(tl.float32)
        return total + tl.where(o_c < span.count, kept, 0.0)


@triton.jit
def _store_head(dg, dgamma, total, span, i_c, i_h, o_c, HEADS: tl.constexpr):
    """Stores gradients of gates that all elements share, [C]; a constant gate's are summed."""
    total = tl.where(o_c < span.count, total, 0.0)
    if dg is not None:
        p = dg + (span.token + span.step * o_c) * HEADS + i_h
        tl.store(p, total.to(dg.dtype.element_ty), mask=o_c < span.count)
    if dgamma is not None:
        tl.store(dgamma + i_c.to(tl.int64) * HEADS + i_h, tl.sum(total, 0))


@triton.jit(do_not_specialize=states.UNSPECIALISED)
def linear_recurrence_bwd_kernel(
    query, key, value, dout, gates, before, after, chunks, sizes, dq, dk, dv, dg, dgk, dgamma,
    BD: tl.constexpr, BE: tl.constexpr, SCALE: tl.constexpr, TERMS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """One chunk and head. `before` holds the state before each chunk, `after` the gradient of
    the state after it. TERMS: as in `decays.sums`, for gradients of gates.
    """
    i_c = tl.program_id(0) // sizes.HEADS
    i_h = tl.program_id(0) % sizes.HEADS
    span = blocks.chunk_of(chunks, i_c)
    if span.count <= 0:
        return
    C: tl.constexpr = chunks.SIZE
    o_c = tl.arange(0, C)
    o_e = tl.arange(0, BE)
    b_v = blocks.load(value, span, i_h, o_c, o_e)  # [C, BE]
    b_do = blocks.load(dout, span, i_h, o_c, o_e)
    b_ds = tl.dot(b_do, tl.trans(b_v), input_precision=sizes.PRECISION) * SCALE  # [t, s]
    b_dv = tl.zeros([C, BE], tl.float32)
    b_s = tl.zeros([C, C], tl.float32)
    shared = tl.zeros([C], tl.float32)  # gradients of gates that all elements share
    if gates.gk is not None:
        own = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_ds, 0.0), 1)
    else:
        b_a = decays.head_gates(gates, span, i_h, o_c)
        start, end, total = decays.head_sums(gates, b_a, span, i_h, C)
        start, end = decays.decay(start)[:, None], decays.decay(end)[:, None]
        pairs = decays.head_pairs(gates, b_a, i_h, C)
        ds = (b_ds * pairs).to(b_v.dtype)
        of_queries = tl.zeros([C], tl.float32)
        of_keys = tl.zeros([C], tl.float32)
        kept_all = tl.full([], 0.0, tl.float32)
    for i_d in range(0, (sizes.D + BD - 1) // BD):
        o_d = i_d * BD + tl.arange(0, BD)
        b_q = blocks.load(query, span, i_h, o_c, o_d)  # [C, BD]
        b_k = blocks.load(key, span, i_h, o_c, o_d)
        b_h = states.load_state(before, i_c, i_h, o_d, o_e, sizes)  # [BD, BE]
        b_dh = states.load_state(after, i_c, i_h, o_d, o_e, sizes)
        kept = tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)
        b_x = b_do.to(b_h.dtype)
        dq_in = tl.dot(b_x, tl.trans(b_h), input_precision=sizes.STATE_PRECISION) * SCALE
        b_x = b_v.to(b_h.dtype)
        dk_out = tl.dot(b_x, tl.trans(b_dh), input_precision=sizes.STATE_PRECISION)
        if gates.gk is not None:
            b_s, b_dq, b_dk, b_da, k_out = _element_block(
                b_s, b_ds, own, span, i_h, o_c, o_d, gates, (b_q, b_k, kept), (dq_in, dk_out),
                sizes.PRECISION, TERMS, GATED,
            )  # fmt: skip
            shared += tl.sum(b_da, 1)
            if dgk is not None:
                blocks.store(dgk, b_da, span, i_h, o_c, o_d, sizes.HEADS, sizes.D)
        else:
            dq_in *= start
            dk_out *= end
            of_queries += tl.sum(b_q.to(tl.float32) * dq_in, 1)
            of_keys += tl.sum(b_k.to(tl.float32) * dk_out, 1)
            kept_all += tl.sum(kept, 0)
            b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=sizes.PRECISION)
            b_dq = tl.dot(ds, b_k, dq_in, input_precision=sizes.PRECISION)
            b_dk = tl.dot(tl.trans(ds), b_q, dk_out, input_precision=sizes.PRECISION)
            k_out = (b_k * end).to(b_k.dtype)
        b_dv = tl.dot(k_out.to(b_dh.dtype), b_dh, b_dv, input_precision=sizes.STATE_PRECISION)
        if dq is not None:
            blocks.store(dq, b_dq, span, i_h, o_c, o_d, sizes.HEADS, sizes.D)
        if dk is not None:
            blocks.store(dk, b_dk, span, i_h, o_c, o_d, sizes.HEADS, sizes.D)
    if gates.gk is None:
        b_s *= pairs
        if GATED:
            kept_all *= decays.decay(total)
            shared = _head_gradients(
                gates, b_ds * b_s, of_queries, of_keys, kept_all, span, C
            )  # fmt: skip
    if GATED:
        _store_head(dg, dgamma, shared, span, i_c, i_h, o_c, sizes.HEADS)
    if dv is not None:
        b_s = tl.trans((b_s * SCALE).to(b_do.dtype))
        b_dv = tl.dot(b_s, b_do, b_dv, input_precision=sizes.PRECISION)
        blocks.store(dv, b_dv, span, i_h, o_c, o_e, sizes.HEADS, sizes.E)
