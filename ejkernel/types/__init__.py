"""Value types that users hold."""

from ejkernel.types.mask_info import MaskInfo

__all__ = ["MaskInfo"]
