"""Attention backward in Triton, from the rows' logsumexp (Dao, 2023).

One pass over the keys gives dk and dv, and a second one over the queries dq: seven products a tile
in place of five, but on an H200 1.24 times faster than adding dq in the pass over keys.
"""

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
    rows = {
        "dout": cotangents[0].astype(args.query.dtype),
        "lse": lse,
        "delta": _attention.row_sums(args, outputs, cotangents),
    }
    grads = {}
    if wanted & {"key", "value", "bias"}:
        grads = _over_keys(args, cfg, rows, wanted)
    if "query" in wanted:
        grads["query"] = _over_queries(args, cfg, rows)
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = _attention.sink_gradient(args, lse, rows["delta"])
    return grads


def _over_keys(args: Any, cfg: config.Config, rows: dict[str, Any], wanted: Any) -> dict[str, Any]:
    """dk and dv, and dbias if wanted."""
    batch, s, num_groups, _ = args.key.shape
    dbias, steps = None, None
    if "bias" in wanted:
        # sums in a fixed order need every pair apart: full-sized, and reduced afterwards
        full = (batch, args.query.shape[2], args.query.shape[1], s)
        shape = full if args.deterministic else args.bias.shape
        dbias = jax.ShapeDtypeStruct(shape, jnp.float32)
        steps = bwd_keys.BiasGradient(*call.pair_strides(shape), shape[2] == 1, shape[3] == 1)

    def launch(made: call.Call, table: Any, old: dict[str, Any], flags: Any) -> dict[str, Any]:
        first = old["flags"] is None
        return triton_call(
            bwd_keys.flash_attention_bwd_dkv_kernel,
            inputs=made.arrays()
            | rows
            | old
            | {
                "attention": made.bundle(),
                "schedule": made.schedule(table, num_groups),
                "dbias": steps,
            },
            outputs={
                "dk_out": _like(args.key),
                "dv_out": _like(args.value),
                "dbias_out": dbias if first else None,
                "flags_out": flags,
            },
            grid=(cdiv(s, made.cfg.block_k) * num_groups * batch,),
            zeroed=("dbias_out",),
            aliases=None if first else {"dk_out": "dk", "dv_out": "dv"},
            **made.cfg.launch(),
            BQ=made.cfg.block_q,
            BK=made.cfg.block_k,
            CHECKED=made.cut_queries,
            EXACT=made.exact,
        )

    made = call.Call(args, cfg)
    flags = _flags(made, batch * num_groups, s, cfg.block_k)
    none = dict.fromkeys(("flags", "num_flags", "flag_rows", "dk", "dv"))
    found = launch(made, made.query_table(), none, flags)
    dbias = found["dbias_out"]
    if flags is not None:
        again = call.Call(args, config.wary(args, cfg.block_k))
        old = {"flags": found["flags_out"], "num_flags": flags.shape[1], "flag_rows": cfg.block_k}
        found = launch(again, None, old | {"dk": found["dk_out"], "dv": found["dv_out"]}, None)
    grads = {"key": found["dk_out"], "value": found["dv_out"]}
    if dbias is not None:
        axes = tuple(i for i in range(4) if args.bias.shape[i] != dbias.shape[i])
        grads["bias"] = dbias.sum(axes, keepdims=True).astype(args.bias.dtype)
    return grads


def _over_queries(args: Any, cfg: config.Config, rows: dict[str, Any]) -> jax.Array:
    """dq, each row summed by one program."""
    batch, t, num_heads, _ = args.query.shape

    def launch(made: call.Call, table: Any, old: dict[str, Any], flags: Any) -> dict[str, Any]:
        shared = {"attention": made.bundle(), "schedule": made.schedule(table, num_heads)}
        return triton_call(
            bwd_queries.flash_attention_bwd_dq_kernel,
            inputs=made.arrays() | rows | old | shared,
            outputs={"dq_out": _like(args.query), "flags_out": flags},
            grid=(cdiv(t, made.cfg.block_q) * num_heads * batch,),
            aliases=None if old["flags"] is None else {"dq_out": "dq"},
            **made.cfg.launch(),
            BQ=made.cfg.block_q,
            BK=made.cfg.block_k,
            CHECKED=made.cut_keys,
            BACKWARDS=args.sliding_window[1] is not None,
            EXACT=made.exact,
        )

    made = call.Call(args, config.over_queries(cfg))
    flags = _flags(made, batch * num_heads, t, made.cfg.block_q)
    none = dict.fromkeys(("flags", "num_flags", "flag_rows", "dq"))
    found = launch(made, made.key_table(), none, flags)
    if flags is not None:
        again = call.Call(args, config.exchanged(config.wary(args, made.cfg.block_q)))
        old = {"flags": found["flags_out"], "num_flags": flags.shape[1]}
        old |= {"flag_rows": made.cfg.block_q, "dq": found["dq_out"]}
        found = launch(again, None, old, None)
    return found["dq_out"]


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _flags(made: call.Call, lines: int, length: int, block: int) -> jax.ShapeDtypeStruct | None:
    """Which blocks have to be done again: garbage behind a mask, or inexact weights; else None."""
    if made.exact and not made.masks and made.mask is None:
        return None
    return jax.ShapeDtypeStruct((lines, cdiv(length, block)), jnp.int32)
