"""Which device a call is for, and what that device can do."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import platform
from typing import Any

import jax

_KINDS = {"cuda": "gpu", "rocm": "gpu", "gpu": "gpu", "tpu": "tpu", "cpu": "cpu"}
_DISPATCH = {"gpu": "triton", "tpu": "pallas", "cpu": "xla"}


@dataclasses.dataclass(frozen=True)
class Target:
    """The device a call is compiled for."""

    kind: str  # "cpu", "gpu" or "tpu"
    model: str  # what the driver calls the device, e.g. "NVIDIA H200"
    capability: str | None = None  # compute capability or architecture of a GPU


@functools.cache
def _cpu_model() -> str:
    """The processor and its cores: what is fast differs from one to another."""
    name = platform.processor() or platform.machine() or "cpu"
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        found = [
            line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line
        ]
        name = found[0] if found else name
    return f"{name} x{os.cpu_count()}"


# bytes, by compute capability or architecture
_SHARED = {
    "8.0": 163 << 10,
    "8.6": 99 << 10,
    "8.7": 163 << 10,
    "8.9": 99 << 10,
    "9.0": 227 << 10,
    "10.0": 227 << 10,
    "12.0": 99 << 10,
    "gfx950": 160 << 10,
}


def shared_memory(capability: str | None) -> int | None:
    """Bytes of shared memory that one program of a GPU may use; None when that is not known."""
    other_amd = 64 << 10 if capability is not None and capability.startswith("gfx") else None
    return _SHARED.get(capability or "", other_amd)


# by compute capability or architecture: of an A100, an H200, a B200, an MI300X and an MI355X
_MULTIPROCESSORS = {"8.0": 108, "9.0": 132, "10.0": 148, "gfx942": 304, "gfx950": 256}


def multiprocessors(capability: str | None) -> int | None:
    """How many multiprocessors a GPU has; None when that is not known."""
    return _MULTIPROCESSORS.get(capability or "")


@functools.lru_cache(maxsize=64)
def describe(device: Any) -> Target:
    """The target that a JAX device stands for."""
    capability = getattr(device, "compute_capability", None)
    kind = _KINDS.get(device.platform) or str(device.platform)
    return Target(
        kind=kind,
        model=_cpu_model() if kind == "cpu" else device.device_kind,
        capability=None if capability is None else str(capability),
    )


def devices(platform: str | None = None) -> list[Any]:
    """JAX's devices; where there are none, the error says what was asked of JAX."""
    try:
        return jax.devices(platform)
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a platform has a device
        asked = jax.config.jax_platforms
        why = " ".join(str(error).split()) or f"none of the platforms {asked!r} has one"
        raise RuntimeError(
            f"JAX finds no device: {why}. JAX_PLATFORMS is {asked!r}; set it to cpu, or leave it "
            "out to get the devices that are here."
        ) from error


def default_device() -> Any:
    """The device that a call without placement runs on."""
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        return devices(device)[0]
    return device


def of_arrays(leaves: list[Any]) -> Target | None:
    """The target of the first concrete JAX array; None when there is none."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            return describe(next(iter(leaf.sharding.device_set)))
    return None


def find(mesh: Any = None) -> Target:
    """The target of a call without concrete arrays: its mesh, the current mesh, the default."""
    if mesh is not None and not mesh.empty:
        return describe(mesh.devices.flat[0])
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None and _KINDS.get(abstract.platform) != "cpu":
        return Target(kind=_KINDS.get(abstract.platform, "gpu"), model=abstract.device_kind)
    return describe(default_device())


def device_kind() -> str:
    """`"gpu"`, `"tpu"` or `"cpu"`: the kind of the default device."""
    return describe(default_device()).kind


def get_device_platform() -> str:
    """`"triton"`, `"pallas"` or `"xla"`: the platform kernels for the default device use."""
    return _DISPATCH.get(device_kind(), "xla")
