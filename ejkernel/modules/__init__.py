"""What users import: one function and one `Kernel` class per operation."""

from ejkernel.kernels._specs.attention import AttentionConfig
from ejkernel.kernels._specs.flash_attention import FlashAttentionConfig
from ejkernel.kernels._specs.grouped_matmul import GroupedMatmulConfig
from ejkernel.kernels._specs.mean_pooling import MeanPoolingConfig
from ejkernel.kernels._specs.merge_attention_states import MergeAttentionStatesConfig
from ejkernel.modules.operations.attention import (
    Attention,
    attention,
    scaled_dot_product_attention,
)
from ejkernel.modules.operations.flash_attention import FlashAttention, flash_attention
from ejkernel.modules.operations.grouped_matmul import GroupedMatmul, grouped_matmul
from ejkernel.modules.operations.mean_pooling import MeanPooling, mean_pooling
from ejkernel.modules.operations.merge_attention_states import (
    MergeAttentionStates,
    merge_attention_states,
)
from ejkernel.ops import ConfigSelectorChain, Executor, PersistentCache


def create_default_executor() -> Executor:
    """An executor with the library's default chain: memory, disk, measurement, heuristics."""
    return Executor(ConfigSelectorChain(persistent=PersistentCache()))


__all__ = [
    "Attention",
    "AttentionConfig",
    "FlashAttention",
    "FlashAttentionConfig",
    "GroupedMatmul",
    "GroupedMatmulConfig",
    "MeanPooling",
    "MeanPoolingConfig",
    "MergeAttentionStates",
    "MergeAttentionStatesConfig",
    "attention",
    "create_default_executor",
    "flash_attention",
    "grouped_matmul",
    "mean_pooling",
    "merge_attention_states",
    "scaled_dot_product_attention",
]
