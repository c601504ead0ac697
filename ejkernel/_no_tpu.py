"""Keeps JAX from loading libtpu on a machine without a TPU.

Where libtpu is installed, as for compiling ahead of time, JAX loads it whether or not a TPU is
there. It then prints several warnings and may wait for seconds.
"""

import importlib.util
import os
import pathlib
import pkgutil

_GOOGLE = "0x1ae0"  # the vendor of TPUs on the PCI bus
# what JAX calls a kind of GPU, and the files that its driver makes
_GPUS = {"cuda": ("nvidia0", "nvidiactl", "dxg"), "rocm": ("kfd",)}


def name_platforms(root: str = "/") -> None:
    """Sets `JAX_PLATFORMS`, unless it is set, to what is here, if libtpu is and no TPU is.

    JAX reads the variable when it is first imported; later calls change nothing.
    """
    environ = os.environ  # noqa: TID251 - a variable of JAX's, not one of our settings
    if not environ.get("JAX_PLATFORMS") and _installed("libtpu") and not _has_tpu(root):
        environ["JAX_PLATFORMS"] = ",".join([*_gpus(root), "cpu"])


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _has_tpu(root: str) -> bool:
    vendors = pathlib.Path(root, "sys/bus/pci/devices").glob("*/vendor")
    on_bus = any(path.read_text().strip() == _GOOGLE for path in vendors)
    return on_bus or any(pathlib.Path(root, "dev").glob("accel*"))


def _gpus(root: str) -> list[str]:
    """The kinds of GPUs that have both a driver and a plugin of JAX."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    plugins = [module.name for module in pkgutil.iter_modules(folders)]
    return [
        name
        for name, files in _GPUS.items()
        if any(plugin.startswith(f"xla_{name}") for plugin in plugins)
        and any(pathlib.Path(root, "dev", file).exists() for file in files)
    ]
