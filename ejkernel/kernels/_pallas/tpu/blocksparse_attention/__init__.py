"""Block-sparse attention on TPUs, in bfloat16 and float32; masks of blocks known or traced."""

import functools

from ejkernel.kernels._pallas.tpu import flash_attention
from ejkernel.kernels._pallas.tpu.blocksparse_attention import call, config
from ejkernel.kernels._pallas.tpu.flash_attention import bwd, fwd
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

_HONOURS = frozenset({
    "sparsity_mask", "block_size", "mask_builder", "causal", "softmax_scale", "sliding_window",
    "logits_soft_cap", "softmax_aux", "q_segment_ids", "kv_segment_ids", "return_lse",
})  # fmt: skip

kernel_registry.register(
    "blocksparse_attention",
    Platform.PALLAS,
    Backend.TPU,
    backward=functools.partial(bwd.backward, prepare=call.Call),
    config=config,
    honours=_HONOURS,
    requires=flash_attention.requires,
)(functools.partial(fwd.forward, prepare=call.Call))
