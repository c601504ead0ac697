"""Attention backward for Hopper: three launches, and one more that rarely has anything to do.

The first finds what the second needs of every row, the second computes all gradients, dq in
float32 and unscaled. A copy of the second with exact weights runs in its place where a logsumexp
is so large that its rounding would change weights. Scaling and rounding dq is left to XLA.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels import _attention
from ejkernel.kernels._pallas.gpu._blocks import batching, launch
from ejkernel.kernels._pallas.gpu.flash_attention import bwd_plan, bwd_rows, bwd_tiles

# Up to this logsumexp, starting scores from -lse / scale changes weights by 5e-4 of themselves, an
# eighth of what bfloat16 rounds away.
_LARGE = 4096.0
_TILE_ROWS = 8  # TMA copies tiles of eight rows


def backward(
    args: Any,
    cfg: Any,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
    kernels: Sequence[bool] = (False, True),
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments; `kernels` launched are those with exact weights or not."""
    if args.logits_soft_cap is not None:  # it is applied to scores alone
        kernels = (True,)

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _gradients(args, cfg, kernels, *arrays)

    (lse,) = residuals
    arrays = (args.query, args.key, args.value, outputs[0], cotangents[0], lse)
    dlse = cotangents[1:] if args.return_lse else ()
    *found, delta = batching.joins_batch(run)(*arrays, *dlse)
    made: dict[str, jax.Array] = dict(zip(("query", "key", "value"), found, strict=True))
    if "softmax_aux" in wanted:
        made["softmax_aux"] = _attention.sink_gradient(args, lse, delta)
    return {name: made[name] for name in wanted}


def _gradients(
    args: Any,
    cfg: Any,
    kernels: Sequence[bool],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    dlse: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """dq, dk, dv, and delta [b, h, t]."""
    plan = plan_of(args, cfg, query, key)
    # the interpreter takes no part of a block, which TMA fills with zeros and leaves unwritten
    rows_q, rows_k = (plan.block_q, bwd_plan.TILE_KEYS) if plan.twin else (_TILE_ROWS, _TILE_ROWS)
    q, out, dout = (
        _padded(x.astype(jnp.bfloat16), rows_q, plan.block_q) for x in (query, out, dout)
    )
    k, v = (_padded(x, rows_k, bwd_plan.TILE_KEYS) for x in (key, value))
    rows = bwd_rows.prepare(plan, out, dout, lse, dlse)
    largest = jnp.max(jnp.where(jnp.isneginf(lse), 0.0, jnp.abs(lse)))
    exact = largest > _LARGE if len(kernels) > 1 else jnp.asarray(kernels[0])
    results = bwd_tiles.Results(rows.dq, lax.empty(k.shape, k.dtype), lax.empty(v.shape, v.dtype))
    for is_exact in kernels:
        of_rows = (rows.lse if is_exact else rows.start, rows.neg_delta)
        flag = exact.astype(jnp.int32).reshape(1)
        operands = bwd_tiles.Operands(q, k, v, dout, *of_rows, flag)
        results = bwd_tiles.Kernel(plan, is_exact).launch(operands, results)
    dq = results.dq.sum(axis=0) if plan.twin else results.dq
    return (
        (dq[:, : plan.num_q] * plan.scale).astype(jnp.bfloat16),
        results.dk[:, : plan.num_k],
        results.dv[:, : plan.num_k],
        -rows.neg_delta[:, :, : plan.num_q],
    )


def plan_of(args: Any, cfg: Any, query: jax.Array, key: jax.Array) -> bwd_plan.Plan:
    """A call as its kernels see it."""
    batch, t, num_heads, d = query.shape
    _, s, num_groups, _ = key.shape
    left, right = args.sliding_window
    return bwd_plan.Plan(
        batch=batch,
        num_q=t,
        num_k=s,
        heads=num_heads,
        key_heads=num_groups,
        head_dim=d,
        scale=float(args.softmax_scale),
        cap=None if args.logits_soft_cap is None else float(args.logits_soft_cap),
        # nothing is farther away, and sums of indices fit into 32 bits
        left=None if left is None else min(left, t + s),
        right=None if right is None else min(right, t + s),
        block_q=cfg.block_q,
        num_stages=cfg.num_stages,
        registers=(cfg.registers, cfg.load_registers),
        section=cfg.section,
        num_programs=cfg.num_programs,
        twin=launch.interpreted(),
    )


def _padded(x: jax.Array, multiple: int, least: int) -> jax.Array:
    """Zeros behind the tokens of an array [b, t, h, d]."""
    length = max(-(-x.shape[1] // multiple) * multiple, least)
    if length == x.shape[1]:
        return x
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
