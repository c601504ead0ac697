"""Attention backward for Hopper: two launches, and one more that rarely has anything to do.

The first finds what the second needs of every row, the second computes all gradients, dq in
float32 and unscaled. A copy of the second with exact weights runs in its place where a logsumexp
is so large that its rounding would change weights. Scaling and rounding dq is left to XLA.

With sums of a fixed order, dk and dv come from one kernel and dq from another, which compute the
same weights: seven products for five. Heads of 192 take these two as well, since registers do not
hold more than their dk and dv.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels import _attention
from ejkernel.kernels._pallas.gpu._blocks import batching, launch, mosaic, segment_ranges
from ejkernel.kernels._pallas.gpu.flash_attention import (
    bwd_dq,
    bwd_kernel,
    bwd_keys,
    bwd_plan,
    bwd_rows,
    bwd_tiles,
    bwd_tokens,
    config,
)
from ejkernel.ops.core.kernel import BACKWARD

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
    config.check(args, BACKWARD, cfg)
    if args.logits_soft_cap is not None:  # it is applied to scores alone
        kernels = (True,)

    extra, tree = jax.tree.flatten(segment_ranges.sides(args))

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        sides = jax.tree.unflatten(tree, arrays[: len(extra)])
        return _gradients(args, cfg, kernels, sides, *arrays[len(extra) :])

    (lse,) = residuals
    arrays = (args.query, args.key, args.value, outputs[0], cotangents[0], lse)
    dlse = cotangents[1:] if args.return_lse else ()
    *found, delta = batching.joins_batch(run)(*extra, *arrays, *dlse)
    made: dict[str, jax.Array] = dict(zip(("query", "key", "value"), found, strict=True))
    if "softmax_aux" in wanted:
        made["softmax_aux"] = _attention.sink_gradient(args, lse, delta)
    return {name: made[name] for name in wanted}


def _gradients(
    args: Any,
    cfg: Any,
    kernels: Sequence[bool],
    sides: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    dlse: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """dq, dk, dv, and delta [b, h, t]."""
    plan = plan_of(args, cfg, query, key, value)
    # the interpreter takes no part of a block, which TMA fills with zeros and leaves unwritten
    whole_q = bwd_plan.TILE_QUERIES if plan.in_order else plan.block_q
    rows_q, rows_k = (whole_q, bwd_plan.TILE_KEYS) if plan.twin else (_TILE_ROWS, _TILE_ROWS)
    least_q = max(plan.block_q, mosaic.ROWS)
    q, out, dout = (_padded(x.astype(jnp.bfloat16), rows_q, least_q) for x in (query, out, dout))
    k, v = (_padded(x, rows_k, bwd_plan.TILE_KEYS) for x in (key, value))
    rows = bwd_rows.prepare(plan, out, dout, lse, dlse)
    exact = rows.exact if len(kernels) > 1 else jnp.full(1, kernels[0], jnp.int32)
    starting, exactly = (
        bwd_kernel.Operands(q, k, v, dout, of_rows, rows.neg_delta, exact)
        for of_rows in (rows.start, rows.lse)
    )
    tokens = () if sides is None else bwd_tokens.of_sides(plan, sides)

    def launched(kind: Any, results: Any, operands: Any = starting) -> Any:
        for is_exact in kernels:
            given = exactly if is_exact else operands
            results = kind(plan, is_exact).launch(given, results, tokens)
        return results

    of_keys = (_empty_like(k), _empty_like(v))
    if plan.in_order:
        dk, dv = launched(bwd_keys.Kernel, bwd_keys.Results(*of_keys))
        (dq,) = launched(bwd_dq.Kernel, bwd_dq.Results(_empty_like(q)), exactly)
    else:
        dq, dk, dv = launched(bwd_tiles.Kernel, bwd_tiles.Results(rows.dq, *of_keys))
        dq = dq.sum(axis=0) if plan.twin else dq
        dq = (dq * plan.scale).astype(jnp.bfloat16)
    return (
        dq[:, : plan.num_q],
        dk[:, : plan.num_k],
        dv[:, : plan.num_k],
        -rows.neg_delta[:, :, : plan.num_q],
    )


def _empty_like(x: jax.Array) -> jax.Array:
    return lax.empty(x.shape, x.dtype)


def plan_of(
    args: Any, cfg: Any, query: jax.Array, key: jax.Array, value: jax.Array
) -> bwd_plan.Plan:
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
        value_dim=value.shape[-1],
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
        in_order=config.sums_in_order(args),
        limits=segment_ranges.limits(args, of_keys=True) if segment_ranges.apply_to(args) else (),
    )


def _padded(x: jax.Array, multiple: int, least: int) -> jax.Array:
    """Zeros behind the tokens of an array [b, t, h, d]."""
    length = max(-(-x.shape[1] // multiple) * multiple, least)
    if length == x.shape[1]:
        return x
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
