"""The linear recurrence backward in chunks.

The gradients of the states after chunks are carried from the last chunk to the first, and the
states before chunks are computed again. Then all chunks are computed side by side: queries, keys
and gates in one launch, values in another, each small enough to stay in registers.
Gradients of gates are sums of those of the decays they are in, never a difference of long sums:
they are right for gates of any strength.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.linear_recurrence import bwd_chunk, call, config, fwd, states

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
    after, dstart = states.gradients(made, cfg, dout, dlast, "initial_state" in wanted)
    grads = {}
    if wanted & {"query", "key", *_GATES}:
        grads = _queries_and_keys(made, cfg, dout, after, wanted)
    if "value" in wanted:
        grads["value"] = _values(made, cfg, dout, after)
    if dstart is not None:
        grads["initial_state"] = dstart.astype(args.initial_state.dtype)
    return grads


def _queries_and_keys(
    made: call.Call, cfg: config.Config, dout: jax.Array, after: jax.Array, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Gradients of queries, keys and gates."""
    args, dtype = made.args, made.args.query.dtype
    before, _ = states.states(made, cfg, last=False)
    tokens, gated = (made.batch, made.t, made.heads), bool(wanted & _GATES)
    # each block of elements has a part in the gradients of gates that all elements share
    parts = 1 if args.gk is None else cdiv(made.d, cfg.block_d)
    shapes = {
        "query": ("dq", (*tokens, made.d), dtype),
        "key": ("dk", (*tokens, made.d), dtype),
        "g": ("dg", (*tokens, parts), jnp.float32),
        "g_gamma": ("dgamma", (made.num_chunks, made.heads, parts), jnp.float32),
    }
    kernel, more = bwd_chunk.linear_recurrence_bwd_heads_kernel, {}
    if args.gk is not None:
        kernel = bwd_chunk.linear_recurrence_bwd_elements_kernel
        shapes["gk"] = ("dgk", (*tokens, made.d), args.gk.dtype)
        more = {"TERMS": 0 if dtype == jnp.float32 else 1 if dtype == jnp.bfloat16 else 2}
    outputs = {
        out: jax.ShapeDtypeStruct(shape, kind) if name in wanted else None
        for name, (out, shape, kind) in shapes.items()
    }
    found = triton_call(
        kernel,
        inputs=made.inputs("query", "key", "value")
        | {"dout": call.operand(dout, made.heads), "before": before, "after": after},
        outputs=outputs,
        zeroed=made.zeroed(*(name for name, x in outputs.items() if x is not None)),
        grid=(made.num_chunks * made.heads * parts,),
        **cfg.launch(),
        **more,
        BD=cfg.block_d,
        BE=min(made.padded_e, cfg.block_d),
        SCALE=made.scale,
        GATED=gated,
    )
    given = args.arrays()
    grads = {n: _own_heads(found[shapes[n][0]], given[n]) for n in wanted & shapes.keys()}
    return grads


def _values(made: call.Call, cfg: config.Config, dout: jax.Array, after: jax.Array) -> jax.Array:
    block_e = made.block_e(cfg)
    shape = (made.batch, made.t, made.heads, made.e)
    found = triton_call(
        bwd_chunk.linear_recurrence_bwd_values_kernel,
        inputs=made.inputs("query", "key")
        | {
            "dout": call.operand(dout, made.heads),
            "after": after,
            "scores": fwd.scores(made, cfg),
        },
        outputs={"dv": jax.ShapeDtypeStruct(shape, made.args.query.dtype)},
        zeroed=made.zeroed("dv"),
        grid=(made.num_chunks * made.heads * cdiv(made.e, block_e),),
        **cfg.launch_values(),
        BD=min(cfg.value_d, made.padded_d),
        BE=block_e,
        SCALE=made.scale,
    )
    return _own_heads(found["dv"], made.args.value)


def _own_heads(x: jax.Array, like: jax.Array) -> jax.Array:
    """Sums over what one number of an argument serves: a group of heads, chunks, elements."""
    if x.shape == like.shape:
        return x
    axes: tuple[int, ...] = (3,)
    if like.ndim == 4:  # [b, t, h, x]
        x = x.reshape(*like.shape[:3], -1, x.shape[-1])
    elif like.ndim == 1:  # [chunks, h, blocks of elements]
        axes = (0, 2)
    return x.sum(axis=axes, dtype=jnp.float32).astype(like.dtype)
