"""The framework under the operations; usable alone for a kernel of your own."""

from ejkernel._device import device_kind, get_device_platform
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.selection import Choice, ConfigChooser, ConfigSelectorChain
from ejkernel.ops.core.kernel import Implementation, Invocation, Kernel
from ejkernel.ops.core.types import BwdParams, Cfg, FwdParams, Out
from ejkernel.ops.execution.benchmark import benchmark
from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.utils.fingerprint import device_fingerprint, sharding_fingerprint
from ejkernel.ops.utils.serialize import from_json, stable_json, to_json

__all__ = [
    "BwdParams",
    "Cfg",
    "Choice",
    "ConfigCache",
    "ConfigChooser",
    "ConfigSelectorChain",
    "Executor",
    "FwdParams",
    "Implementation",
    "Invocation",
    "Kernel",
    "Out",
    "benchmark",
    "device_fingerprint",
    "device_kind",
    "from_json",
    "get_device_platform",
    "sharding_fingerprint",
    "stable_json",
    "to_json",
]
