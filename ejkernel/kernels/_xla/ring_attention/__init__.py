"""Ring attention around XLA's blockwise attention."""

from ejkernel.kernels._registry import Backend, Platform
from ejkernel.kernels._ring import entry

entry.register(Platform.XLA, Backend.ANY)
