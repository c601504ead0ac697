"""Attention backward in Triton, from the rows' logsumexp (Dao, 2023).

One pass over the keys gives dk and dv, and a second one over the queries dq: seven products a tile
in place of five, but on an H200 1.16 times faster than adding dq with atomic additions.
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
    delta = _attention.row_sums(args, outputs, cotangents)
    dout = cotangents[0].astype(args.query.dtype)
    grads = {}
    if wanted & {"key", "value", "bias"}:
        grads = _over_keys(args, cfg, dout, lse, delta, wanted)
    if "query" in wanted:
        grads["query"] = _over_queries(args, cfg, dout, lse, delta)
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = _attention.sink_gradient(args, lse, delta)
    return grads


def _over_keys(args: Any, cfg: Any, dout: Any, lse: Any, delta: Any, wanted: Any) -> dict:
    """dk and dv, and dbias if wanted."""
    batch, s, num_groups, _ = args.key.shape
    made = call.Call(args, cfg)
    table = made.query_table()
    like = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype)
    dbias, steps = None, [0] * 4
    if "bias" in wanted:
        # sums in a fixed order need every pair apart: full-sized, and reduced afterwards
        full = (batch, args.query.shape[2], args.query.shape[1], s)
        shape = full if args.deterministic else args.bias.shape
        dbias = jax.ShapeDtypeStruct(shape, jnp.float32)
        steps = call.pair_strides(dbias)
    dk, dv, dbias = triton_call(
        bwd_keys.flash_attention_bwd_dkv_kernel,
        args.query,
        args.key,
        args.value,
        *made.inputs(),
        table,
        *made.sizes(table),
        dout,
        lse,
        delta,
        *steps,
        grid=(cdiv(s, cfg.block_k) * num_groups * batch,),
        out_shape=[like(args.key, args.key.dtype), like(args.value, args.value.dtype), dbias],
        zeroed=(2,),
        **cfg.launch(),
        SUM_Q=dbias is not None and steps[2] == 0 and dbias.shape[2] == 1,
        SUM_K=dbias is not None and steps[3] == 0 and dbias.shape[3] == 1,
        HEAD=made.query_head,
        TAIL=made.tail,
        **made.constants(),
    )
    grads = {"key": dk, "value": dv}
    if dbias is not None:
        axes = tuple(i for i in range(4) if args.bias.shape[i] != dbias.shape[i])
        grads["bias"] = dbias.sum(axes, keepdims=True).astype(args.bias.dtype)
    return grads


def _over_queries(args: Any, cfg: Any, dout: Any, lse: Any, delta: Any) -> jax.Array:
    """dq, each row summed by one program."""
    batch, t, num_heads, _ = args.query.shape
    turned = config.exchanged(cfg)
    made = call.Call(args, turned)
    table = made.key_table()
    (dq,) = triton_call(
        bwd_queries.flash_attention_bwd_dq_kernel,
        args.query,
        args.key,
        args.value,
        *made.inputs(),
        table,
        *made.sizes(table),
        dout,
        lse,
        delta,
        grid=(cdiv(t, turned.block_q) * num_heads * batch,),
        out_shape=[jax.ShapeDtypeStruct(args.query.shape, args.query.dtype)],
        **turned.launch(),
        HEAD=made.key_head,
        TAIL=made.tail,
        BACKWARDS=args.sliding_window[1] is not None,
        **made.constants(),
    )
    return dq
