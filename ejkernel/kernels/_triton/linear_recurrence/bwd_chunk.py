"""Gradients of one chunk and head: of queries, keys and log gates, and of values."""

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import chunks as blocks
from ejkernel.kernels._triton._blocks import decays
from ejkernel.kernels._triton.linear_recurrence import fwd, states


@triton.jit
def _score_gradients(value, dout, span, i_h, sizes, C: tl.constexpr, BE: tl.constexpr):
    """Products of output gradients and values, [t, s]."""
    o_c = tl.arange(0, C)
    b_ds = tl.zeros([C, C], tl.float32)
    for i_e in range(0, (sizes.E + BE - 1) // BE):
        o_e = i_e * BE + tl.arange(0, BE)
        b_v = blocks.load(value, span, i_h, o_c, o_e)  # [C, BE]
        b_do = blocks.load(dout, span, i_h, o_c, o_e)
        b_ds = tl.dot(b_do, tl.trans(b_v), b_ds, input_precision=sizes.PRECISION)
    return b_ds


@triton.jit
def _from_states(
    value, dout, before, after, span, i_c, i_h, o_d, sizes, C: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Gradients of decayed queries and keys [C, BD], and of the state times the state [BD]."""
    o_c = tl.arange(0, C)
    dq = tl.zeros([C, o_d.shape[0]], tl.float32)
    dk = tl.zeros([C, o_d.shape[0]], tl.float32)
    kept = tl.zeros(o_d.shape, tl.float32)
    # One stage: states are factors of products and of `kept`, and for tiles with two such uses
    # Triton's pipeline (3.6 to 3.9) lets the next copy overwrite what an asynchronous product on
    # Hopper still reads.
    for i_e in tl.range(0, (sizes.E + BE - 1) // BE, num_stages=1):
        o_e = i_e * BE + tl.arange(0, BE)
        b_h = states.load_state(before, i_c, i_h, o_d, o_e, sizes)  # [BD, BE]
        b_dh = states.load_state(after, i_c, i_h, o_d, o_e, sizes)
        b_do = blocks.load(dout, span, i_h, o_c, o_e).to(b_h.dtype)  # [C, BE]
        b_v = blocks.load(value, span, i_h, o_c, o_e).to(b_h.dtype)
        kept += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)
        dq = tl.dot(b_do, tl.trans(b_h), dq, input_precision=sizes.STATE_PRECISION)
        dk = tl.dot(b_v, tl.trans(b_dh), dk, input_precision=sizes.STATE_PRECISION)
    return dq, dk, kept


@triton.jit
def _element_gradients(
    b_ds, b_q, b_k, b_a, gates, from_states, PRECISION: tl.constexpr, TERMS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries, keys and gates of their elements, [C, BD] each.

    b_ds [t, s] are the gradients of scores.
    """
    C: tl.constexpr = b_q.shape[0]
    o_c = tl.arange(0, C)
    dq, dk, kept = from_states
    dq *= decays.decay(decays.sums(decays.up_to(C), b_a, gates.TERMS))
    dk *= decays.decay(decays.sums(decays.after(C), b_a, gates.TERMS))
    b_da = tl.zeros(b_q.shape, tl.float32)
    if GATED:
        b_da += (kept * decays.decay(tl.sum(b_a, 0)))[None, :]
        # the transposes of `up_to` and `after`
        b_da += decays.sums(o_c[None, :] >= o_c[:, None], b_q * dq, TERMS)
        b_da += decays.sums(o_c[None, :] < o_c[:, None], b_k * dk, TERMS)
    for level in tl.range(0, decays.levels(C), disable_licm=True):
        steps = decays.level_steps(level, C, False)
        factor = decays.decay(decays.sums(steps, b_a, gates.TERMS))  # [C, BD]
        ds = tl.where(decays.level_pairs(level, C), b_ds, 0.0).to(b_q.dtype)
        earlier = (b_k * factor).to(b_k.dtype)
        more_q = tl.dot(ds, earlier, input_precision=PRECISION) * factor  # of second halves
        later = (b_q * factor).to(b_q.dtype)
        more_k = tl.dot(tl.trans(ds), later, input_precision=PRECISION) * factor  # of first ones
        dq += more_q
        dk += more_k
        if GATED:
            # a decay's gradient times the decay: each row has one of the two
            more = b_q * more_q + b_k * more_k
            b_da += decays.sums(decays.level_steps(level, C, True), more, TERMS)
    return dq, dk, b_da


@triton.jit
def _head_gradients(gates, around, of_queries, of_keys, kept, span, C: tl.constexpr):
    """Gradients of the log gates of one head, [C]; of a constant gate, parts of its gradient.

    around [t, s]: gradients of pairs times their scores. of_queries, of_keys [C]: those of the
    decays from the chunk's start and to its end. kept: that of the whole chunk's.
    """
    o_c = tl.arange(0, C)
    o_t, o_s = o_c[:, None], o_c[None, :]
    if gates.g is not None:
        # a gate is in the decay of each pair around it: sums over t from it, then over s before
        later = tl.cumsum(around, 0, reverse=True)  # [u, s]
        total = tl.sum(tl.where(o_s < o_t, later, 0.0), 1)
        total += tl.sum(tl.where(o_s >= o_t, of_queries[None, :], 0.0), 1)
        total += tl.sum(tl.where(o_s < o_t, of_keys[None, :], 0.0), 1)
        return total + kept
    else:
        total = tl.sum(around * tl.maximum(o_t - o_s, 0).to(tl.float32), 1)
        total += of_queries * tl.minimum(o_c + 1, span.count).to(tl.float32)
        total += of_keys * tl.maximum(span.count - 1 - o_c, 0).to(tl.float32)
        return total + kept


@triton.jit
def _store_head(dg, dgamma, total, span, i_c, column, o_c, COLUMNS: tl.constexpr):
    """Stores gradients of gates that all elements share, [C]; a constant gate's are summed."""
    total = tl.where(o_c < span.count, total, 0.0)
    if dg is not None:
        p = dg + (span.token + span.step * o_c) * COLUMNS + column
        tl.store(p, total.to(dg.dtype.element_ty), mask=o_c < span.count)
    if dgamma is not None:
        tl.store(dgamma + i_c.to(tl.int64) * COLUMNS + column, tl.sum(total, 0))


@triton.jit(do_not_specialize=states.UNSPECIALISED)
def linear_recurrence_bwd_elements_kernel(
    query, key, value, dout, gates, before, after, chunks, sizes, dq, dk, dg, dgk, dgamma,
    BD: tl.constexpr, BE: tl.constexpr, SCALE: tl.constexpr, TERMS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """BD elements of queries, keys and gates of one chunk and head, with gates of elements.

    `before` holds the state before each chunk, `after` the gradient of the state after it.
    TERMS: as in `decays.sums`, for gradients of gates. Gates that all elements share get a
    gradient from each block of elements: dg [b, t, h, blocks], dgamma [chunks, h, blocks].
    """
    BLOCKS_D: tl.constexpr = (sizes.D + BD - 1) // BD
    i_d = tl.program_id(0) % BLOCKS_D
    i_h = (tl.program_id(0) // BLOCKS_D) % sizes.HEADS
    i_c = tl.program_id(0) // (BLOCKS_D * sizes.HEADS)
    span = blocks.chunk_of(chunks, i_c)
    if span.count <= 0:
        return
    C: tl.constexpr = chunks.SIZE
    o_c = tl.arange(0, C)
    o_d = i_d * BD + tl.arange(0, BD)
    b_dq, b_dk, kept = _from_states(
        value, dout, before, after, span, i_c, i_h, o_d, sizes, C, BE
    )  # fmt: skip
    b_ds = _score_gradients(value, dout, span, i_h, sizes, C, BE) * SCALE
    b_ds = b_ds.to(dout.base.dtype.element_ty)  # half the registers over all levels
    b_q = blocks.load(query, span, i_h, o_c, o_d)  # [C, BD]
    b_k = blocks.load(key, span, i_h, o_c, o_d)
    b_a = decays.element_gates(gates, span, i_h, o_c, o_d)
    b_dq, b_dk, b_da = _element_gradients(
        b_ds, b_q, b_k, b_a, gates, (b_dq * SCALE, b_dk, kept), sizes.PRECISION, TERMS, GATED
    )
    if dq is not None:
        blocks.store(dq, b_dq, span, i_h, o_c, o_d, sizes.HEADS, sizes.D)
    if dk is not None:
        blocks.store(dk, b_dk, span, i_h, o_c, o_d, sizes.HEADS, sizes.D)
    if dgk is not None:
        blocks.store(dgk, b_da, span, i_h, o_c, o_d, sizes.HEADS, sizes.D)
    if (dg is not None) or (dgamma is not None):
        total = tl.sum(b_da, 1)
        COLUMNS: tl.constexpr = sizes.HEADS * BLOCKS_D
        _store_head(dg, dgamma, total, span, i_c, i_h * BLOCKS_D + i_d, o_c, COLUMNS)


@triton.jit(do_not_specialize=states.UNSPECIALISED)
def linear_recurrence_bwd_heads_kernel(
    query, key, value, dout, gates, before, after, chunks, sizes, dq, dk, dg, dgamma,
    BD: tl.constexpr, BE: tl.constexpr, SCALE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Queries, keys and gates of one chunk and head, with one gate for the head or none."""
    i_c = tl.program_id(0) // sizes.HEADS
    i_h = tl.program_id(0) % sizes.HEADS
    span = blocks.chunk_of(chunks, i_c)
    if span.count <= 0:
        return
    C: tl.constexpr = chunks.SIZE
    o_c = tl.arange(0, C)
    b_a = decays.head_gates(gates, span, i_h, o_c)
    start, end, total = decays.head_sums(gates, b_a, span, i_h, C)
    start, end = decays.decay(start), decays.decay(end)
    b_ds = _score_gradients(value, dout, span, i_h, sizes, C, BE)
    b_ds *= decays.head_pairs(gates, b_a, i_h, C) * SCALE
    ds = b_ds.to(dout.base.dtype.element_ty)
    b_s = tl.zeros([C, C], tl.float32)
    of_queries = tl.zeros([C], tl.float32)
    of_keys = tl.zeros([C], tl.float32)
    all_kept = tl.full([], 0.0, tl.float32)
    for i_d in range(0, (sizes.D + BD - 1) // BD):
        o_d = i_d * BD + tl.arange(0, BD)
        b_dq, b_dk, kept = _from_states(
            value, dout, before, after, span, i_c, i_h, o_d, sizes, C, BE
        )  # fmt: skip
        b_dq *= start[:, None] * SCALE
        b_dk *= end[:, None]
        b_q = blocks.load(query, span, i_h, o_c, o_d)  # [C, BD]
        b_k = blocks.load(key, span, i_h, o_c, o_d)
        if GATED:
            of_queries += tl.sum(b_q * b_dq, 1)
            of_keys += tl.sum(b_k * b_dk, 1)
            all_kept += tl.sum(kept, 0)
            b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=sizes.PRECISION)
        b_dq = tl.dot(ds, b_k, b_dq, input_precision=sizes.PRECISION)
        b_dk = tl.dot(tl.trans(ds), b_q, b_dk, input_precision=sizes.PRECISION)
        if dq is not None:
            blocks.store(dq, b_dq, span, i_h, o_c, o_d, sizes.HEADS, sizes.D)
        if dk is not None:
            blocks.store(dk, b_dk, span, i_h, o_c, o_d, sizes.HEADS, sizes.D)
    if GATED:
        all_kept *= decays.decay(total)
        around = b_ds * b_s
        shared = _head_gradients(gates, around, of_queries, of_keys, all_kept, span, C)
        _store_head(dg, dgamma, shared, span, i_c, i_h, o_c, sizes.HEADS)


@triton.jit(do_not_specialize=states.UNSPECIALISED)
def linear_recurrence_bwd_values_kernel(
    query, key, dout, gates, after, scores, chunks, sizes, dv,
    BD: tl.constexpr, BE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """BE columns of the values of one chunk and head; `after` and `scores` as elsewhere."""
    BLOCKS_E: tl.constexpr = (sizes.E + BE - 1) // BE
    i_c = tl.program_id(0) // (sizes.HEADS * BLOCKS_E)
    i_h = (tl.program_id(0) // BLOCKS_E) % sizes.HEADS
    span = blocks.chunk_of(chunks, i_c)
    if span.count <= 0:
        return
    C: tl.constexpr = chunks.SIZE
    o_c = tl.arange(0, C)
    o_e = (tl.program_id(0) % BLOCKS_E) * BE + tl.arange(0, BE)
    b_dv = tl.zeros([C, BE], tl.float32)
    b_s = tl.zeros([C, C], tl.float32)  # [s, t]
    for i_d in range(0, (sizes.D + BD - 1) // BD):
        o_d = i_d * BD + tl.arange(0, BD)
        b_k = blocks.load(key, span, i_h, o_c, o_d)  # [C, BD]
        b_dh = states.load_state(after, i_c, i_h, o_d, o_e, sizes)  # [BD, BE]
        if gates.gk is not None:
            b_a = decays.element_gates(gates, span, i_h, o_c, o_d)
            factor = decays.decay(decays.sums(decays.after(C), b_a, gates.TERMS))
            b_k = (b_k * factor).to(b_k.dtype)
        else:
            b_q = blocks.load(query, span, i_h, o_c, o_d)
            b_s = tl.dot(b_k, tl.trans(b_q), b_s, input_precision=sizes.PRECISION)
        b_dv = tl.dot(b_k.to(b_dh.dtype), b_dh, b_dv, input_precision=sizes.STATE_PRECISION)
    b_do = blocks.load(dout, span, i_h, o_c, o_e)  # [C, BE]
    if gates.gk is not None:
        b_p = tl.trans(tl.load(fwd.score_pointers(scores, i_c, i_h, sizes, C)))
    else:
        b_a = decays.head_gates(gates, span, i_h, o_c)
        _, end, _ = decays.head_sums(gates, b_a, span, i_h, C)
        b_dv *= decays.decay(end)[:, None]
        b_p = (b_s * tl.trans(decays.head_pairs(gates, b_a, i_h, C)) * SCALE).to(b_do.dtype)
    b_dv = tl.dot(b_p, b_do, b_dv, input_precision=sizes.PRECISION)
    blocks.store(dv, b_dv, span, i_h, o_c, o_e, sizes.HEADS, sizes.E)
