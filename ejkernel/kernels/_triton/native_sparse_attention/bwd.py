"""Native sparse attention backward in Triton: weights are recomputed from the rows' logsumexp.

The selection is a constant. Means hand their gradients to the tokens of their blocks.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._specs import native_sparse_attention as spec
from ejkernel.kernels._triton.flash_attention import bwd as flash
from ejkernel.kernels._triton.flash_attention import fwd as flash_fwd
from ejkernel.kernels._triton.native_sparse_attention import attend, attend_keys, call, config
from ejkernel.kernels._triton.native_sparse_attention import table as tables

_QKV = ("query", "key", "value")


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    if spec.is_empty(args):
        return {name: jnp.zeros_like(getattr(args, name)) for name in wanted}
    args, have = call.without_padding(args), spec.branches(args)
    prepared, dout = call.Call(args, cfg), cotangents[0]
    asked = wanted & frozenset(_QKV)
    grads: dict[str, Any] = {}
    parts = []
    if have.compressed:
        group, tiles = prepared.sparse.GROUP, config.window(cfg)
        compressed = prepared.as_compressed(repeat=group)
        (out,), (lse,) = flash_fwd.forward(compressed, tiles)
        grads["g_cmp"], gated = _gate(args.g_cmp, out, dout)
        part = flash.backward(compressed, tiles, (out,), (lse,), (gated,), asked)
        for name in ("key", "value"):
            if name in part:
                means = _sum_heads(part[name], group)
                part[name] = tables.spread(prepared.table, means)
        parts.append(part)
    if have.selected:
        out, lse, words = residuals[:3]
        grads["g_slc"], gated = _gate(args.g_slc, out, dout)
        parts.append(_selected(prepared, (out, lse, words), gated, asked))
    if have.window:
        out, lse = residuals[3:]
        grads["g_swa"], gated = _gate(args.g_swa, out, dout)
        window = prepared.as_window()
        parts.append(flash.backward(window, config.window(cfg), (out,), (lse,), (gated,), asked))
    for name in asked:
        terms = [part[name].astype(jnp.float32) for part in parts]
        grads[name] = sum(terms[1:], terms[0])
    return {name: grads[name].astype(getattr(args, name).dtype) for name in wanted}


def _sum_heads(x: jax.Array, group: int) -> jax.Array:
    """[b, n, h, d] -> [b, n, g, d] in float32."""
    batch, n, heads, width = x.shape
    return x.astype(jnp.float32).reshape(batch, n, heads // group, group, width).sum(axis=3)


def _gate(gate: Any, out: jax.Array, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient of a gate [b, t, h], and the cotangent of its branch."""
    dgate = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(axis=-1)
    # a row that saw no key has output 0 whatever its cotangent is
    dgate = jnp.where((out == 0).all(axis=-1), 0.0, dgate)
    return dgate, call.gated(gate, dout).astype(dout.dtype)


def _selected(
    prepared: call.Call, residuals: Any, dout: jax.Array, asked: frozenset[str]
) -> dict[str, jax.Array]:
    """Gradients through the selected blocks."""
    out, lse, words = residuals
    delta, _ = _gate(None, out, dout)
    rows = {"dout": dout, "lse": lse.transpose(0, 2, 1), "delta": delta}
    grads = {}
    if "query" in asked:
        grads["query"] = _over_blocks(prepared, rows, words)
    if asked & {"key", "value"}:
        grads["key"], grads["value"] = _over_tokens(prepared, rows, words)
    return grads


def _over_blocks(prepared: call.Call, rows: dict[str, Any], words: jax.Array) -> jax.Array:
    """dq, each row summed by one program."""
    args, tokens = prepared.args, prepared.tokens
    return triton_call(
        attend.nsa_attend_bwd_dq_kernel,
        inputs=prepared.inputs() | rows | {"union": prepared.union(words)},
        outputs={"dq": jax.ShapeDtypeStruct(args.query.shape, args.query.dtype)},
        grid=(cdiv(prepared.t, tokens) * prepared.groups * prepared.batch,),
        **prepared.cfg.launch(),
        BT=tokens,
        BK=prepared.block_k,
        EVEN=prepared.even,
    )["dq"]


def _over_tokens(
    prepared: call.Call, rows: dict[str, Any], words: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """dk and dv in float32, each block's pieces added in their order."""
    args, parts = prepared.args, prepared.parts
    inverse, span = prepared.inverse(words), parts * prepared.block_k
    num_blocks, pieces = spec.num_blocks(args), inverse.work.shape[0]
    d, e = args.key.shape[-1], args.value.shape[-1]
    sums = attend_keys.Sums(call.rows_of(1, d), call.rows_of(1, e), span)
    shared = prepared.bounds | {"num_blocks": num_blocks, "sums": sums}
    wide = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    found = triton_call(
        attend_keys.nsa_attend_bwd_dkv_kernel,
        inputs=prepared.inputs() | rows | shared | {"inverse": inverse},
        outputs={"dk": wide((pieces, span, d)), "dv": wide((pieces, span, e))},
        grid=(pieces, parts),
        **prepared.cfg.launch(),
        BT=prepared.tokens,
        BK=prepared.block_k,
    )
    total = triton_call(
        attend_keys.nsa_sum_pieces_kernel,
        inputs=shared
        | {
            "parts_k": found["dk"],
            "parts_v": found["dv"],
            "pieces": inverse.pieces,
            "sparse": prepared.sparse,
        },
        outputs={"dk": wide(args.key.shape), "dv": wide(args.value.shape)},
        zeroed=("dk", "dv") if prepared.table.packed else (),
        grid=(prepared.batch * prepared.groups * num_blocks, parts),
        num_warps=4,
        num_stages=1,
        BK=prepared.block_k,
    )
    return total["dk"], total["dv"]
