"""Helpers on plain arrays, free of any operation."""

from ejkernel.xla_utils.segments import (
    cu_seqlens_to_lengths,
    cu_seqlens_to_positions,
    cu_seqlens_to_query_positions,
    cu_seqlens_to_segment_ids,
    lengths_to_cu_seqlens,
    lengths_to_segment_ids,
    mask_to_segment_ids,
    segment_ids_to_cu_seqlens,
    segment_ids_to_mask,
)
from ejkernel.xla_utils.zigzag import from_zigzag, to_zigzag

__all__ = [
    "cu_seqlens_to_lengths",
    "cu_seqlens_to_positions",
    "cu_seqlens_to_query_positions",
    "cu_seqlens_to_segment_ids",
    "from_zigzag",
    "lengths_to_cu_seqlens",
    "lengths_to_segment_ids",
    "mask_to_segment_ids",
    "segment_ids_to_cu_seqlens",
    "segment_ids_to_mask",
    "to_zigzag",
]
