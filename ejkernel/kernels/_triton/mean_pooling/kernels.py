"""Mean pooling in Triton: sums over slices of tokens, sums of slices, and shares of cotangents.

Heads and features are one axis of `width` times UNIT columns; a program has a block of them. Every
sum is in one order, whatever the device.
"""

import triton
import triton.language as tl

from ejkernel.kernels._triton.mean_pooling import spans as cuts


@triton.jit
def _counted(mask, token, stop, BT: tl.constexpr):
    """Which of BT tokens count."""
    o_t = token + tl.arange(0, BT)
    if mask is None:
        return o_t < stop
    else:
        return tl.load(mask + o_t, mask=o_t < stop, other=0) != 0


@triton.jit
def mean_pooling_fwd_kernel(
    inputs, mask, spans, width, out, counts,
    UNIT: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Means over spans; sums instead, in float32, if the spans are slices."""
    width = width * UNIT
    blocks = tl.cdiv(width, BW)
    i, column = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BW
    at = cuts.find(spans, i, False)
    o_w = column + tl.arange(0, BW)
    m_w = (o_w < width)[None, :]
    p = inputs + at.start.to(tl.int64) * width
    p = p + tl.arange(0, BT)[:, None] * width + o_w[None, :]
    acc, count = tl.zeros([BT, BW], tl.float32), tl.zeros([BT], tl.int32)
    for token in range(at.start, at.stop, BT):
        m_t = _counted(mask, token, at.stop, BT)
        acc += tl.load(p, mask=m_t[:, None] & m_w, other=0.0).to(tl.float32)  # [BT, BW]
        count += m_t.to(tl.int32)
        p += BT * width
    total, number = tl.sum(acc, 0), tl.sum(count, 0)
    if not spans.SLICED:
        total = total / tl.maximum(number, 1).to(tl.float32)
    elif mask is not None:
        tl.store(counts + i, number, mask=column == 0)
    to = out + i.to(tl.int64) * width + o_w
    tl.store(to, total.to(out.dtype.element_ty), mask=o_w < width)


@triton.jit
def mean_pooling_slices_kernel(
    sums, counts, spans, width, out, UNIT: tl.constexpr, BS: tl.constexpr, BW: tl.constexpr
):
    """Means of rows from the sums of their slices."""
    width = width * UNIT
    blocks = tl.cdiv(width, BW)
    row, column = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BW
    first, after, number = cuts.slices_of(spans, row)
    o_w = column + tl.arange(0, BW)
    acc, count = tl.zeros([BS, BW], tl.float32), tl.zeros([BS], tl.int32)
    for i in range(first, after, BS):
        o_s = i + tl.arange(0, BS)
        inside = (o_s < after)[:, None] & (o_w < width)[None, :]
        p = sums + o_s.to(tl.int64)[:, None] * width + o_w[None, :]
        acc += tl.load(p, mask=inside, other=0.0)  # [BS, BW]
        if counts is not None:
            count += tl.load(counts + o_s, mask=o_s < after, other=0)
    if counts is not None:
        number = tl.sum(count, 0)
    mean = tl.sum(acc, 0) / tl.maximum(number, 1).to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + o_w, mean.to(out.dtype.element_ty), mask=o_w < width)


@triton.jit
def mean_pooling_bwd_kernel(
    dout, mask, counts, spans, width, dinputs,
    UNIT: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Gives each token that counts its share of its row's cotangent, and the others 0."""
    width = width * UNIT
    blocks = tl.cdiv(width, BW)
    i, column = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BW
    at = cuts.find(spans, i, True)
    number = at.count
    if counts is not None:
        number = tl.load(counts + at.row)
    elif mask is not None:
        count = tl.zeros([BT], tl.int32)
        for token in range(at.start, at.stop, BT):
            count += _counted(mask, token, at.stop, BT).to(tl.int32)
        number = tl.sum(count, 0)
    o_t, o_w = tl.arange(0, BT), column + tl.arange(0, BW)
    m_w = o_w < width
    p = dout + at.row.to(tl.int64) * width + o_w
    share = tl.where(at.inside, tl.load(p, mask=m_w, other=0.0).to(tl.float32), 0.0)
    share = (share / tl.maximum(number, 1).to(tl.float32)).to(dinputs.dtype.element_ty)
    tile = tl.broadcast_to(share[None, :], [BT, BW])
    p = dinputs + at.start.to(tl.int64) * width + o_t[:, None] * width + o_w[None, :]
    for token in range(at.start, at.stop, BT):
        inside = (o_t < at.stop - token)[:, None] & m_w[None, :]
        if mask is None:
            tl.store(p, tile, mask=inside)
        else:
            m_t = _counted(mask, token, at.stop, BT)
            tl.store(p, tl.where(m_t[:, None], tile, tl.zeros_like(tile)), mask=inside)
        p += BT * width
