"""Value types that users hold."""

from ejkernel.types import block_mask
from ejkernel.types.mask_info import MaskInfo

__all__ = ["MaskInfo", "block_mask"]
