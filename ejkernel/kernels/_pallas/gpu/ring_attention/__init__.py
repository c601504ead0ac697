"""Ring attention around Hopper's attention."""

from ejkernel.kernels._registry import Backend, Platform
from ejkernel.kernels._ring import entry

entry.register(
    Platform.PALLAS,
    Backend.GPU,
    by_name="has not run on several GPUs yet; ask for it with platform='pallas'",
)
