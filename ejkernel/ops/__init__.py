"""The framework under the operations; usable alone for a kernel of your own."""

from ejkernel._device import device_kind, get_device_platform
from ejkernel.ops.config.cache import ConfigCache, overlay_cache
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy, policy_override
from ejkernel.ops.config.selection import Choice, ConfigChooser, ConfigSelectorChain
from ejkernel.ops.core.kernel import Implementation, Invocation, Kernel
from ejkernel.ops.core.types import BwdParams, Cfg, FwdParams, Out
from ejkernel.ops.execution.batch import pmap_with_config, vmap_with_config
from ejkernel.ops.execution.benchmark import benchmark
from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.execution.recorded import Autotuner, autotune, autotune_recorded
from ejkernel.ops.execution.tuning import Tuner
from ejkernel.ops.registry import (
    clear_invocations,
    get_invocations,
    record_invocation,
    save_invocations,
)
from ejkernel.ops.utils.fingerprint import (
    default_key_builder_with_sharding,
    device_fingerprint,
    sharding_fingerprint,
)
from ejkernel.ops.utils.hlo import (
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    label,
    labels_to_configs,
)
from ejkernel.ops.utils.serialize import from_json, stable_json, to_json

__all__ = [
    "AutotunePolicy",
    "Autotuner",
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
    "PersistentCache",
    "Tuner",
    "autotune",
    "autotune_recorded",
    "benchmark",
    "clear_invocations",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "from_json",
    "get_device_platform",
    "get_invocations",
    "label",
    "labels_to_configs",
    "overlay_cache",
    "pmap_with_config",
    "policy_override",
    "record_invocation",
    "save_invocations",
    "sharding_fingerprint",
    "stable_json",
    "to_json",
    "vmap_with_config",
]
