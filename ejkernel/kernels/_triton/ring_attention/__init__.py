"""Ring attention around Triton's attention."""

from ejkernel.kernels._registry import Backend, Platform
from ejkernel.kernels._ring import entry

entry.register(Platform.TRITON, Backend.GPU)
