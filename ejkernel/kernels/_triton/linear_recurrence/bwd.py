"""The linear recurrence backward in chunks.

The states before chunks are computed again, then the gradients of those after chunks, from the
last to the first; a third launch computes all other gradients of all chunks side by side.
Gradients of gates are sums of those of the decays they are in, never a difference of long sums:
they are right for gates of any strength.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import triton_call
from ejkernel.kernels._triton.linear_recurrence import bwd_chunk, call, config, states

_GATES = frozenset({"g", "gk", "g_gamma"})


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    dlast = cotangents[1] if args.return_state else None
    if call.nothing_to_do(args):
        grads = {name: jnp.zeros_like(args.arrays()[name]) for name in wanted}
        if "initial_state" in wanted and dlast is not None:
            grads["initial_state"] = dlast.astype(args.initial_state.dtype)
        return grads
    made = call.Call(args, cfg.block_t)
    dout = cotangents[0].astype(args.query.dtype)
    dstates, dstart = states.gradients(made, cfg, dout, dlast, "initial_state" in wanted)
    grads = {}
    if wanted - {"initial_state"}:
        before, _ = states.states(made, cfg, last=False)
        grads = _of_chunks(made, cfg, dout, (before, dstates), wanted)
    if dstart is not None:
        grads["initial_state"] = dstart.astype(args.initial_state.dtype)
    return grads


def _of_chunks(
    made: call.Call, cfg: config.Config, dout: jax.Array, between: Any, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Gradients of all but the states."""
    args = made.args
    tokens, dtype = (made.batch, made.t, made.heads), args.query.dtype
    gates = wanted & _GATES
    shape = lambda name, width: (
        jax.ShapeDtypeStruct((*tokens, width), dtype) if name in wanted else None
    )
    outputs = {
        "dq": shape("query", made.d),
        "dk": shape("key", made.d),
        "dv": shape("value", made.e),
        "dg": _if("g" in gates, tokens, args.g),
        "dgk": _if("gk" in gates, (*tokens, made.d), args.gk),
        "dgamma": _if("g_gamma" in gates, (made.num_chunks, made.heads), None),
    }
    found = triton_call(
        bwd_chunk.linear_recurrence_bwd_kernel,
        inputs={
            "query": made.operand("query"),
            "key": made.operand("key"),
            "value": made.operand("value"),
            "dout": call.operand(dout, made.heads),
            "gates": made.gates,
            "before": between[0],
            "after": between[1],
            "chunks": made.chunks,
            "sizes": made.sizes,
        },
        outputs=outputs,
        zeroed=made.zeroed(*(name for name, x in outputs.items() if x is not None)),
        grid=(made.num_chunks * made.heads,),
        **cfg.launch(),
        BD=cfg.block_d,
        BE=made.padded_e,
        SCALE=made.scale,
        TERMS=0 if dtype == jnp.float32 else 1 if dtype == jnp.bfloat16 else 2,
        GATED=bool(gates),
    )
    names = {"query": "dq", "key": "dk", "value": "dv", "g": "dg", "gk": "dgk"}
    grads = {n: _own_heads(found[names[n]], args.arrays()[n]) for n in wanted & names.keys()}
    if "g_gamma" in wanted:
        grads["g_gamma"] = found["dgamma"].sum(axis=0).astype(args.g_gamma.dtype)
    return grads


def _if(needed: bool, shape: tuple[int, ...], like: Any) -> jax.ShapeDtypeStruct | None:
    dtype = jnp.float32 if like is None else like.dtype
    return jax.ShapeDtypeStruct(shape, dtype) if needed else None


def _own_heads(x: jax.Array, like: jax.Array) -> jax.Array:
    """The sum over the heads that share one of an argument's own."""
    if x.shape == like.shape:
        return x
    batch, t, own = like.shape[:3]
    parts = x.reshape(batch, t, own, -1, x.shape[-1])
    return parts.sum(axis=3, dtype=jnp.float32).astype(like.dtype)
