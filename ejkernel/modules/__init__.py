"""What users import: one function and one `Kernel` class per operation."""

import importlib
from typing import TYPE_CHECKING, Any

from ejkernel.kernels import _op_kernel

if TYPE_CHECKING:
    from ejkernel.kernels._specs.apply_native_sparse_attention import (
        ApplyNativeSparseAttentionConfig,
    )
    from ejkernel.kernels._specs.attention import AttentionConfig
    from ejkernel.kernels._specs.blocksparse_attention import BlocksparseAttentionConfig
    from ejkernel.kernels._specs.flash_attention import FlashAttentionConfig
    from ejkernel.kernels._specs.gla import GLAConfig
    from ejkernel.kernels._specs.grouped_matmul import GroupedMatmulConfig
    from ejkernel.kernels._specs.lightning_attention import LightningAttentionConfig
    from ejkernel.kernels._specs.linear_recurrence import LinearRecurrenceConfig
    from ejkernel.kernels._specs.mean_pooling import MeanPoolingConfig
    from ejkernel.kernels._specs.merge_attention_states import MergeAttentionStatesConfig
    from ejkernel.kernels._specs.mla_attention import MLAAttentionConfig
    from ejkernel.kernels._specs.mla_page_attention import MLAPageAttentionConfig
    from ejkernel.kernels._specs.native_sparse_attention import NativeSparseAttentionConfig
    from ejkernel.kernels._specs.page_attention import PageAttentionConfig
    from ejkernel.kernels._specs.ragged_decode_attention import RaggedDecodeAttentionConfig
    from ejkernel.kernels._specs.ragged_page_attention import RaggedPageAttentionConfig
    from ejkernel.kernels._specs.ragged_page_attention_v3 import RaggedPageAttentionV3Config
    from ejkernel.kernels._specs.recurrent import RecurrentConfig
    from ejkernel.kernels._specs.ring_attention import RingAttentionConfig
    from ejkernel.kernels._specs.sampled_matmul import SampledMatmulConfig
    from ejkernel.kernels._specs.sparse_matmul import SparseMatmulConfig
    from ejkernel.kernels._specs.update_kv_pages import UpdateKVPagesConfig
    from ejkernel.kernels._specs.update_latent_pages import UpdateLatentPagesConfig
    from ejkernel.kernels._specs.update_paged_cache import UpdatePagedCacheConfig
    from ejkernel.modules.operations.apply_native_sparse_attention import (
        ApplyNativeSparseAttention,
        apply_native_sparse_attention,
    )
    from ejkernel.modules.operations.attention import (
        Attention,
        attention,
        scaled_dot_product_attention,
    )
    from ejkernel.modules.operations.blocksparse_attention import (
        BlocksparseAttention,
        blocksparse_attention,
    )
    from ejkernel.modules.operations.flash_attention import FlashAttention, flash_attention
    from ejkernel.modules.operations.gla import GLA, gla, gla_attention
    from ejkernel.modules.operations.grouped_matmul import GroupedMatmul, grouped_matmul
    from ejkernel.modules.operations.lightning_attention import (
        LightningAttention,
        lightning_attention,
        lightning_attn,
        lightning_decay,
    )
    from ejkernel.modules.operations.linear_recurrence import LinearRecurrence, linear_recurrence
    from ejkernel.modules.operations.mean_pooling import MeanPooling, mean_pooling
    from ejkernel.modules.operations.merge_attention_states import (
        MergeAttentionStates,
        merge_attention_states,
    )
    from ejkernel.modules.operations.mla_attention import MLAAttention, flash_mla, mla_attention
    from ejkernel.modules.operations.mla_page_attention import MLAPageAttention, mla_page_attention
    from ejkernel.modules.operations.native_sparse_attention import (
        NativeSparseAttention,
        native_sparse_attention,
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
    from ejkernel.modules.operations.ragged_page_attention_v3 import (
        RaggedPageAttentionV3,
        ragged_page_attention_v3,
    )
    from ejkernel.modules.operations.recurrent import Recurrent, recurrent
    from ejkernel.modules.operations.ring_attention import RingAttention, ring_attention
    from ejkernel.modules.operations.sampled_matmul import SampledMatmul, sampled_matmul
    from ejkernel.modules.operations.sparse_matmul import SparseMatmul, sparse_matmul
    from ejkernel.modules.operations.update_kv_pages import UpdateKVPages, update_kv_pages
    from ejkernel.modules.operations.update_latent_pages import (
        UpdateLatentPages,
        update_latent_pages,
    )
    from ejkernel.modules.operations.update_paged_cache import (
        UpdatePagedCache,
        pages_from_interleaved,
        pages_to_interleaved,
        update_paged_cache,
    )
    from ejkernel.ops import Executor
    from ejkernel.types import block_mask
    from ejkernel.xla_utils import from_zigzag, to_zigzag

# The names that the module of each operation has besides the operation itself. A module is imported
# when one of its names is first asked for.
_OPERATIONS = {
    "apply_native_sparse_attention": (
        "ApplyNativeSparseAttention",
        "ApplyNativeSparseAttentionConfig",
    ),
    "attention": ("Attention", "AttentionConfig", "scaled_dot_product_attention"),
    "blocksparse_attention": ("BlocksparseAttention", "BlocksparseAttentionConfig"),
    "flash_attention": ("FlashAttention", "FlashAttentionConfig"),
    "gla": ("GLA", "GLAConfig", "gla_attention"),
    "grouped_matmul": ("GroupedMatmul", "GroupedMatmulConfig"),
    "lightning_attention": (
        "LightningAttention",
        "LightningAttentionConfig",
        "lightning_attn",
        "lightning_decay",
    ),
    "linear_recurrence": ("LinearRecurrence", "LinearRecurrenceConfig"),
    "mean_pooling": ("MeanPooling", "MeanPoolingConfig"),
    "merge_attention_states": ("MergeAttentionStates", "MergeAttentionStatesConfig"),
    "mla_attention": ("MLAAttention", "MLAAttentionConfig", "flash_mla"),
    "mla_page_attention": ("MLAPageAttention", "MLAPageAttentionConfig"),
    "native_sparse_attention": ("NativeSparseAttention", "NativeSparseAttentionConfig"),
    "page_attention": ("PageAttention", "PageAttentionConfig"),
    "ragged_decode_attention": ("RaggedDecodeAttention", "RaggedDecodeAttentionConfig"),
    "ragged_page_attention": ("RaggedPageAttention", "RaggedPageAttentionConfig"),
    "ragged_page_attention_v3": ("RaggedPageAttentionV3", "RaggedPageAttentionV3Config"),
    "recurrent": ("Recurrent", "RecurrentConfig"),
    "ring_attention": ("RingAttention", "RingAttentionConfig"),
    "sampled_matmul": ("SampledMatmul", "SampledMatmulConfig"),
    "sparse_matmul": ("SparseMatmul", "SparseMatmulConfig"),
    "update_kv_pages": ("UpdateKVPages", "UpdateKVPagesConfig"),
    "update_latent_pages": ("UpdateLatentPages", "UpdateLatentPagesConfig"),
    "update_paged_cache": (
        "UpdatePagedCache",
        "UpdatePagedCacheConfig",
        "pages_from_interleaved",
        "pages_to_interleaved",
    ),
}
_HOMES = {
    name: f"ejkernel.modules.operations.{op}"
    for op, names in _OPERATIONS.items()
    for name in (op, *names)
}
_HOMES |= {"block_mask": "ejkernel.types"}
_HOMES |= dict.fromkeys(("from_zigzag", "to_zigzag"), "ejkernel.xla_utils")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import_operation(op: str) -> None:
    if op in _OPERATIONS:
        importlib.import_module(f"ejkernel.modules.operations.{op}")


_op_kernel.OpKernel.importers.append(_import_operation)


def create_default_executor() -> "Executor":
    """An executor with the library's default chain: memory, disk, measurement, heuristics."""
    from ejkernel.ops import ConfigSelectorChain, Executor, PersistentCache

    return Executor(ConfigSelectorChain(persistent=PersistentCache()))


__all__ = [
    "GLA",
    "ApplyNativeSparseAttention",
    "ApplyNativeSparseAttentionConfig",
    "Attention",
    "AttentionConfig",
    "BlocksparseAttention",
    "BlocksparseAttentionConfig",
    "FlashAttention",
    "FlashAttentionConfig",
    "GLAConfig",
    "GroupedMatmul",
    "GroupedMatmulConfig",
    "LightningAttention",
    "LightningAttentionConfig",
    "LinearRecurrence",
    "LinearRecurrenceConfig",
    "MLAAttention",
    "MLAAttentionConfig",
    "MLAPageAttention",
    "MLAPageAttentionConfig",
    "MeanPooling",
    "MeanPoolingConfig",
    "MergeAttentionStates",
    "MergeAttentionStatesConfig",
    "NativeSparseAttention",
    "NativeSparseAttentionConfig",
    "PageAttention",
    "PageAttentionConfig",
    "RaggedDecodeAttention",
    "RaggedDecodeAttentionConfig",
    "RaggedPageAttention",
    "RaggedPageAttentionConfig",
    "RaggedPageAttentionV3",
    "RaggedPageAttentionV3Config",
    "Recurrent",
    "RecurrentConfig",
    "RingAttention",
    "RingAttentionConfig",
    "SampledMatmul",
    "SampledMatmulConfig",
    "SparseMatmul",
    "SparseMatmulConfig",
    "UpdateKVPages",
    "UpdateKVPagesConfig",
    "UpdateLatentPages",
    "UpdateLatentPagesConfig",
    "UpdatePagedCache",
    "UpdatePagedCacheConfig",
    "apply_native_sparse_attention",
    "attention",
    "block_mask",
    "blocksparse_attention",
    "create_default_executor",
    "flash_attention",
    "flash_mla",
    "from_zigzag",
    "gla",
    "gla_attention",
    "grouped_matmul",
    "lightning_attention",
    "lightning_attn",
    "lightning_decay",
    "linear_recurrence",
    "mean_pooling",
    "merge_attention_states",
    "mla_attention",
    "mla_page_attention",
    "native_sparse_attention",
    "page_attention",
    "pages_from_interleaved",
    "pages_to_interleaved",
    "ragged_decode_attention",
    "ragged_page_attention",
    "ragged_page_attention_v3",
    "recurrent",
    "ring_attention",
    "sampled_matmul",
    "scaled_dot_product_attention",
    "sparse_matmul",
    "to_zigzag",
    "update_kv_pages",
    "update_latent_pages",
    "update_paged_cache",
]
