"""Ring attention around Hopper's attention."""

from ejkernel.kernels._registry import Backend, Platform
from ejkernel.kernels._ring import entry

entry.register(Platform.PALLAS, Backend.GPU)
