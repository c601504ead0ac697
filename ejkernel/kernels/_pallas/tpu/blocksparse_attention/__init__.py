"""Block-sparse attention on TPUs, in bfloat16 and float32; masks of blocks known or traced."""

import functools
from typing import Any

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.tpu import flash_attention
from ejkernel.kernels._pallas.tpu._blocks import capacity
from ejkernel.kernels._pallas.tpu.blocksparse_attention import call, config
from ejkernel.kernels._pallas.tpu.flash_attention import bwd, fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

_HONOURS = frozenset({
    "sparsity_mask", "block_size", "mask_builder", "causal", "softmax_scale", "sliding_window",
    "logits_soft_cap", "softmax_aux", "q_segment_ids", "kv_segment_ids", "return_lse",
})  # fmt: skip


def _requires(args: Any) -> str | None:
    """What the kernels cannot do: those of dense attention, and lists beyond scalar memory."""
    size, _ = config.sizes(args.block_size)
    rows = max(cdiv(x.shape[1], size) for x in (args.query, args.key))
    batch, heads = args.sparsity_mask.shape[:2]
    # two numbers a row of blocks, two buffers of a list, and sinks
    numbers = 2 * batch * heads * rows + 2 * rows + args.query.shape[2]
    return capacity.smem_refusal(numbers) or flash_attention.refused_sizes(args)


kernel_registry.register(
    "blocksparse_attention",
    Platform.PALLAS,
    Backend.TPU,
    backward=functools.partial(bwd.backward, prepare=call.Call),
    config=config,
    honours=_HONOURS,
    requires=_requires,
)(functools.partial(fwd.forward, prepare=call.Call))
