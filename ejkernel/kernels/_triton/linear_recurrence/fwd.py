"""The linear recurrence forward in chunks (Yang et al., Gated Linear Attention, 2023).

One launch carries the states from chunk to chunk and stores each. With gates of elements a second
one computes the scores of the pairs inside chunks. The last computes the outputs of all chunks side
by side, from the state before a chunk and its scores. A few tokens are taken one by one instead.
With one gate a head, outputs may be computed in the pass that carries the states (`one_pass`).
Arrays are [b, t, h, x], contiguous.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.callib import cdiv, triton_call
from ejkernel.errors import UnsupportedError
from ejkernel.kernels._triton._blocks import chunks as blocks
from ejkernel.kernels._triton._blocks import decays
from ejkernel.kernels._triton.linear_recurrence import call, config, one_pass, recurrent, states


@triton.jit
def score_pointers(scores, i_c, i_h, sizes, C: tl.constexpr):
    """[t, s] of a chunk and head in an array [chunks, h, c, c]."""
    o_c = tl.arange(0, C)
    first = scores + (i_c.to(tl.int64) * sizes.HEADS + i_h) * (C * C)
    return first + o_c[:, None] * C + o_c[None, :]


@triton.jit(do_not_specialize=states.UNSPECIALISED)
def linear_recurrence_scores_kernel(
    query, key, gates, chunks, sizes, scores, BD: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """Scores of one chunk and head with gates of elements, from one product for each level."""
    i_c = tl.program_id(0) // sizes.HEADS
    i_h = tl.program_id(0) % sizes.HEADS
    span = blocks.chunk_of(chunks, i_c)
    if span.count <= 0:
        return
    C: tl.constexpr = chunks.SIZE
    o_c = tl.arange(0, C)
    b_s = tl.zeros([C, C], tl.float32)
    for i_d in range(0, (sizes.D + BD - 1) // BD):
        o_d = i_d * BD + tl.arange(0, BD)
        b_q = blocks.load(query, span, i_h, o_c, o_d)  # [C, BD]
        b_k = blocks.load(key, span, i_h, o_c, o_d)
        b_a = decays.element_gates(gates, span, i_h, o_c, o_d)
        for level in tl.range(0, decays.levels(C), disable_licm=True):
            steps = decays.level_steps(level, C, False)
            factor = decays.decay(decays.sums(steps, b_a, gates.TERMS))  # [C, BD]
            later = (b_q * factor).to(b_q.dtype)
            earlier = (b_k * factor).to(b_k.dtype)
            dots = tl.dot(later, tl.trans(earlier), input_precision=sizes.PRECISION)
            b_s += tl.where(decays.level_pairs(level, C), dots, 0.0)
    b_s = (b_s * SCALE).to(scores.dtype.element_ty)
    tl.store(score_pointers(scores, i_c, i_h, sizes, C), b_s)


@triton.jit(do_not_specialize=states.UNSPECIALISED)
def linear_recurrence_fwd_kernel(
    query, key, value, gates, before, scores, chunks, sizes, out,
    BD: tl.constexpr, BE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """BE columns of the outputs of one chunk and head.

    `before` holds the state before each chunk, `scores` those of gates of elements, scaled.
    """
    BLOCKS_E: tl.constexpr = (sizes.E + BE - 1) // BE
    i_c = tl.program_id(0) // (sizes.HEADS * BLOCKS_E)
    i_h = (tl.program_id(0) // BLOCKS_E) % sizes.HEADS
    span = blocks.chunk_of(chunks, i_c)
    if span.count <= 0:
        return
    C: tl.constexpr = chunks.SIZE
    o_c = tl.arange(0, C)
    o_e = (tl.program_id(0) % BLOCKS_E) * BE + tl.arange(0, BE)
    b_o = tl.zeros([C, BE], tl.float32)
    b_s = tl.zeros([C, C], tl.float32)
    for i_d in range(0, (sizes.D + BD - 1) // BD):
        o_d = i_d * BD + tl.arange(0, BD)
        b_q = blocks.load(query, span, i_h, o_c, o_d)  # [C, BD]
        b_h = states.load_state(before, i_c, i_h, o_d, o_e, sizes)  # [BD, BE]
        if gates.gk is not None:
            b_a = decays.element_gates(gates, span, i_h, o_c, o_d)
            factor = decays.decay(decays.sums(decays.up_to(C), b_a, gates.TERMS))
            b_q = (b_q * factor).to(b_q.dtype)
        else:
            b_k = blocks.load(key, span, i_h, o_c, o_d)
            b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=sizes.PRECISION)
        b_o = tl.dot(b_q.to(b_h.dtype), b_h, b_o, input_precision=sizes.STATE_PRECISION)
    b_v = blocks.load(value, span, i_h, o_c, o_e)  # [C, BE]
    if gates.gk is not None:
        b_p = tl.load(score_pointers(scores, i_c, i_h, sizes, C))
    else:
        b_a = decays.head_gates(gates, span, i_h, o_c)
        start, _, _ = decays.head_sums(gates, b_a, span, i_h, C)
        b_o *= decays.decay(start)[:, None]
        b_p = (b_s * decays.head_pairs(gates, b_a, i_h, C) * SCALE).to(b_v.dtype)
    b_o = tl.dot(b_p, b_v, b_o * SCALE, input_precision=sizes.PRECISION)
    blocks.store(out, b_o, span, i_h, o_c, o_e, sizes.HEADS, sizes.E)


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and the last states when asked for); no residuals."""
    if call.nothing_to_do(args):
        out, last = _zeros(args)
    elif cfg.recurrent:
        out, last = recurrent.run(args, cfg)
    elif cfg.segments:
        if (reason := config.no_segments(args, cfg)) is not None:
            raise UnsupportedError(f"`linear_recurrence`: {reason}.")
        out, last = one_pass.run(call.Call(args, cfg.block_t), cfg)
    else:
        out, last = _in_chunks(args, cfg)
    return ((out, last) if args.return_state else (out,)), ()


def _zeros(args: Any) -> tuple[jax.Array, jax.Array]:
    made = call.Call(args, 16)
    last = made.initial_state()
    return jnp.zeros((made.batch, made.t, made.heads, made.e), args.query.dtype), last


def _in_chunks(args: Any, cfg: config.Config) -> tuple[jax.Array, jax.Array | None]:
    made = call.Call(args, cfg.block_t)
    before, last = states.states(made, cfg, last=args.return_state)
    shape, block_e = (made.batch, made.t, made.heads, made.e), made.block_e(cfg)
    found = triton_call(
        linear_recurrence_fwd_kernel,
        inputs=made.inputs("query", "key", "value")
        | {"before": before, "scores": scores(made, cfg)},
        outputs={"out": jax.ShapeDtypeStruct(shape, args.query.dtype)},
        zeroed=made.zeroed("out"),
        grid=(made.num_chunks * made.heads * cdiv(made.e, block_e),),
        **cfg.launch(),
        BD=cfg.block_d,
        BE=block_e,
        SCALE=made.scale,
    )
    return found["out"], last


def scores(made: call.Call, cfg: config.Config) -> jax.Array | None:
    """Scaled scores of the pairs inside chunks, [chunks, h, c, c], with gates of elements.

    With one gate for a head they are one product, which whoever needs them computes again.
    """
    if made.args.gk is None:
        return None
    shape = (made.num_chunks, made.heads, cfg.block_t, cfg.block_t)
    found = triton_call(
        linear_recurrence_scores_kernel,
        inputs=made.inputs("query", "key"),
        outputs={"scores": jax.ShapeDtypeStruct(shape, made.args.query.dtype)},
        grid=(made.num_chunks * made.heads,),
        **cfg.launch_scores(),
        BD=min(cfg.score_d, made.padded_d),
        SCALE=made.scale,
    )
    return found["scores"]
