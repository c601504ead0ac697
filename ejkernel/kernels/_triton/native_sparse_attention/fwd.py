"""Native sparse attention forward (Yuan et al., 2025) in Triton.

1. Compression is flash attention over the means of blocks, whose positions say what is complete.
2. A kernel scores tiles of tokens against the means and keeps each token's best blocks as bits.
3. The selected blocks are visited by tiles of neighbouring tokens with all heads of a key head.
4. The sliding window is flash attention.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._specs import native_sparse_attention as spec
from ejkernel.kernels._triton.flash_attention import fwd as flash
from ejkernel.kernels._triton.native_sparse_attention import attend, call, config
from ejkernel.xla_utils import manual


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array], tuple[jax.Array, ...]]:
    """The output; residuals are named in the spec, those of absent branches are empty."""
    residuals = [jnp.zeros(0, x.dtype) for x in spec.SPEC.residual_shapes(args).values()]
    out_shape = (*args.query.shape[:3], args.value.shape[-1])
    if spec.is_empty(args):
        empty = [jnp.zeros(out_shape, args.query.dtype), *residuals]
        out, *residuals = manual.vary_alike([args.query, *empty])[1:]
        return (out,), tuple(residuals)
    args, have = call.without_padding(args), spec.branches(args)
    prepared, parts = call.Call(args, cfg), []
    if have.compressed:
        (out,), _ = flash.forward(prepared.as_compressed(), config.window(cfg))
        parts.append(call.gated(args.g_cmp, out))
    if have.selected:
        words = prepared.words()
        out, lse = _attend(prepared, words)
        residuals[:3] = out, lse, words
        parts.append(call.gated(args.g_slc, out))
    if have.window:
        (out,), (lse,) = flash.forward(prepared.as_window(), config.window(cfg))
        residuals[3:] = out, lse
        parts.append(call.gated(args.g_swa, out))
    out, *residuals = manual.vary_alike([sum(parts[1:], parts[0]), *residuals])
    return (out.astype(args.query.dtype),), tuple(residuals)


def _attend(prepared: call.Call, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output [b, t, h, e] and lse [b, h, t] over the selected blocks."""
    args, tokens = prepared.args, prepared.tokens
    batch, t, heads, _ = args.query.shape
    found = triton_call(
        attend.nsa_attend_fwd_kernel,
        inputs=prepared.inputs() | {"union": prepared.union(words)},
        outputs={
            "out": jax.ShapeDtypeStruct((batch, t, heads, args.value.shape[-1]), args.query.dtype),
            "lse": jax.ShapeDtypeStruct((batch, heads, t), jnp.float32),
        },
        grid=(cdiv(t, tokens) * prepared.groups * batch,),
        **prepared.cfg.launch(),
        BT=tokens,
        BK=prepared.block_k,
        EVEN=prepared.even,
    )
    return found["out"], found["lse"]
