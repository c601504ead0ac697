"""Attention backward in Triton, from the rows' logsumexp (Dao, 2023).

One pass over the keys gives dk and dv, and a second one over the queries dq: seven products a tile
in place of five, but on an H200 1.24 times faster than adding dq in the pass over keys.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels import _attention
from ejkernel.kernels._triton.flash_attention import bwd_keys, bwd_queries, call, config


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    (lse,) = residuals
    delta = _attention.row_sums(args, outputs, cotangents)
    dout = cotangents[0].astype(args.query.dtype)
    grads = {}
    if wanted & {"key", "value", "bias"}:
        grads = _over_keys(args, cfg, [dout, lse, delta], wanted)
    if "query" in wanted:
        grads["query"] = _over_queries(args, cfg, [dout, lse, delta])
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = _attention.sink_gradient(args, lse, delta)
    return grads


def _over_keys(args: Any, cfg: config.Config, rows: Sequence[Any], wanted: Any) -> dict[str, Any]:
    """dk and dv, and dbias if wanted."""
    batch, s, num_groups, _ = args.key.shape
    dbias, steps = None, [0] * 4
    if "bias" in wanted:
        # sums in a fixed order need every pair apart: full-sized, and reduced afterwards
        full = (batch, args.query.shape[2], args.query.shape[1], s)
        shape = full if args.deterministic else args.bias.shape
        dbias = jax.ShapeDtypeStruct(shape, jnp.float32)
        steps = call.pair_strides(dbias)
    constants = {
        "SUM_Q": dbias is not None and steps[2] == 0 and dbias.shape[2] == 1,
        "SUM_K": dbias is not None and steps[3] == 0 and dbias.shape[3] == 1,
    }

    def launch(made: call.Call, table: Any, flagged: Sequence[Any], flags: Any) -> list[Any]:
        inputs = [*made.operands(table, num_groups), *rows, *steps, *flagged]
        first = flagged[0] is None
        return triton_call(
            bwd_keys.flash_attention_bwd_dkv_kernel,
            *inputs,
            grid=(cdiv(s, made.cfg.block_k) * num_groups * batch,),
            out_shape=[_like(args.key), _like(args.value), dbias if first else None, flags],
            zeroed=(2,),
            aliases=None if first else {len(inputs) - 2: 0, len(inputs) - 1: 1},
            **made.cfg.launch(),
            CHECKED=made.cut_queries,
            EXACT=made.exact,
            **constants,
            **made.constants(),
        )

    made = call.Call(args, cfg)
    flags = _flags(made, batch * num_groups, s, cfg.block_k)
    dk, dv, dbias, found = launch(made, made.query_table(), [None, 0, 0, None, None], flags)
    if flags is not None:
        again = call.Call(args, config.wary(args, cfg.block_k))
        flagged = [found, flags.shape[1], cfg.block_k, dk, dv]
        dk, dv, _, _ = launch(again, None, flagged, None)
    grads = {"key": dk, "value": dv}
    if dbias is not None:
        axes = tuple(i for i in range(4) if args.bias.shape[i] != dbias.shape[i])
        grads["bias"] = dbias.sum(axes, keepdims=True).astype(args.bias.dtype)
    return grads


def _over_queries(args: Any, cfg: config.Config, rows: Sequence[Any]) -> jax.Array:
    """dq, each row summed by one program."""
    batch, t, num_heads, _ = args.query.shape

    def launch(made: call.Call, table: Any, flagged: Sequence[Any], flags: Any) -> list[Any]:
        inputs = [*made.operands(table, num_heads), *rows, *flagged]
        return triton_call(
            bwd_queries.flash_attention_bwd_dq_kernel,
            *inputs,
            grid=(cdiv(t, made.cfg.block_q) * num_heads * batch,),
            out_shape=[_like(args.query), flags],
            aliases=None if flagged[0] is None else {len(inputs) - 1: 0},
            **made.cfg.launch(),
            CHECKED=made.cut_keys,
            BACKWARDS=args.sliding_window[1] is not None,
            EXACT=made.exact,
            **made.constants(),
        )

    made = call.Call(args, config.over_queries(cfg))
    flags = _flags(made, batch * num_heads, t, made.cfg.block_q)
    dq, found = launch(made, made.key_table(), [None, 0, 0, None], flags)
    if flags is not None:
        again = call.Call(args, config.exchanged(config.wary(args, made.cfg.block_q)))
        dq, _ = launch(again, None, [found, flags.shape[1], made.cfg.block_q, dq], None)
    return dq


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _flags(made: call.Call, lines: int, length: int, block: int) -> jax.ShapeDtypeStruct | None:
    """Which blocks have to be done again: garbage behind a mask, or inexact weights; else None."""
    if made.exact and not made.masks and made.mask is None:
        return None
    return jax.ShapeDtypeStruct((lines, cdiv(length, block)), jnp.int32)
