"""What users import: one function and one `Kernel` class per operation."""

from ejkernel.kernels._specs.attention import AttentionConfig
from ejkernel.kernels._specs.flash_attention import FlashAttentionConfig
from ejkernel.kernels._specs.gla import GLAConfig
from ejkernel.kernels._specs.grouped_matmul import GroupedMatmulConfig
from ejkernel.kernels._specs.lightning_attention import LightningAttentionConfig
from ejkernel.kernels._specs.linear_recurrence import LinearRecurrenceConfig
from ejkernel.kernels._specs.mean_pooling import MeanPoolingConfig
from ejkernel.kernels._specs.merge_attention_states import MergeAttentionStatesConfig
from ejkernel.kernels._specs.page_attention import PageAttentionConfig
from ejkernel.kernels._specs.ragged_decode_attention import RaggedDecodeAttentionConfig
from ejkernel.kernels._specs.ragged_page_attention import RaggedPageAttentionConfig
from ejkernel.kernels._specs.update_paged_cache import UpdatePagedCacheConfig
from ejkernel.modules.operations.attention import (
    Attention,
    attention,
    scaled_dot_product_attention,
)
from ejkernel.modules.operations.flash_attention import FlashAttention, flash_attention
from ejkernel.modules.operations.gla import GLA, gla, gla_attention
from ejkernel.modules.operations.grouped_matmul import GroupedMatmul, grouped_matmul
from ejkernel.modules.operations.lightning_attention import (
    LightningAttention,
    lightning_attention,
    lightning_attn,
)
from ejkernel.modules.operations.linear_recurrence import LinearRecurrence, linear_recurrence
from ejkernel.modules.operations.mean_pooling import MeanPooling, mean_pooling
from ejkernel.modules.operations.merge_attention_states import (
    MergeAttentionStates,
    merge_attention_states,
)
from ejkernel.modules.operations.page_attention import PageAttention, page_attention
from ejkernel.modules.operations.ragged_decode_attention import (
    RaggedDecodeAttention,
    ragged_decode_attention,
)
from ejkernel.modules.operations.ragged_page_attention import (
    RaggedPageAttention,
    ragged_page_attention,
)
from ejkernel.modules.operations.update_paged_cache import (
    UpdatePagedCache,
    pages_from_interleaved,
    pages_to_interleaved,
    update_paged_cache,
)
from ejkernel.ops import ConfigSelectorChain, Executor, PersistentCache


def create_default_executor() -> Executor:
    """An executor with the library's default chain: memory, disk, measurement, heuristics."""
    return Executor(ConfigSelectorChain(persistent=PersistentCache()))


__all__ = [
    "GLA",
    "Attention",
    "AttentionConfig",
    "FlashAttention",
    "FlashAttentionConfig",
    "GLAConfig",
    "GroupedMatmul",
    "GroupedMatmulConfig",
    "LightningAttention",
    "LightningAttentionConfig",
    "LinearRecurrence",
    "LinearRecurrenceConfig",
    "MeanPooling",
    "MeanPoolingConfig",
    "MergeAttentionStates",
    "MergeAttentionStatesConfig",
    "PageAttention",
    "PageAttentionConfig",
    "RaggedDecodeAttention",
    "RaggedDecodeAttentionConfig",
    "RaggedPageAttention",
    "RaggedPageAttentionConfig",
    "UpdatePagedCache",
    "UpdatePagedCacheConfig",
    "attention",
    "create_default_executor",
    "flash_attention",
    "gla",
    "gla_attention",
    "grouped_matmul",
    "lightning_attention",
    "lightning_attn",
    "linear_recurrence",
    "mean_pooling",
    "merge_attention_states",
    "page_attention",
    "pages_from_interleaved",
    "pages_to_interleaved",
    "ragged_decode_attention",
    "ragged_page_attention",
    "scaled_dot_product_attention",
    "update_paged_cache",
]
