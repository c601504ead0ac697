"""Mosaic GPU kernels compiled for an H200 that is not here, by JAX's plugin for CUDA."""

import contextlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from ejkernel.aot._reports import KernelReport

_TARGET = "cuda:sm_90"
# What XLA asks a GPU when it has one, of an H200.
_DEVICE = """
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  clock_rate_ghz: 1.98 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  device_memory_size: 151397597184
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 8 }
"""
# what ptxas says of a kernel; its name is the same for all
_USAGE = re.compile(r"(\d+) bytes stack frame[^\n]*\n[^\n]*Used (\d+) registers")
# ptxas's notes that products run one after the other; others of their numbers are harmless
_SERIALISED = re.compile(r"\((C75\d\d)\) Potential Performance Loss")


def why_not(target: Any) -> str | None:
    """Why Mosaic kernels are not compiled for a target here; None when they are."""
    if str(target) != _TARGET:
        return f"Mosaic GPU kernels are compiled for {_TARGET} alone"
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return "Mosaic GPU kernels need JAX's plugin for CUDA here: pip install 'jax[cuda13]'"
    return None


def kernels(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> list[KernelReport]:
    """The kernels that a program launches, in the order in which they are compiled.

    To be called inside `tracing`.
    """
    from jax.experimental import topologies

    os.putenv("MOSAIC_GPU_DUMP_PTXAS", "1")  # read where C reads it
    (device,) = topologies.get_topology_desc(
        platform="cuda", topology_name="gpu", topology="1x1x1", target_config=_DEVICE
    ).devices
    place = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), inputs)
    with _printed() as said:
        jax.jit(fn).trace(*placed).lower(lowering_platforms=("cuda",)).compile()
        text = said()
    return reports(text)


def reports(text: str) -> list[KernelReport]:
    """One for each kernel of which ptxas speaks.

    Raises if it makes products run one after the other, which it tells in a note only.
    """
    if note := _SERIALISED.search(text):
        raise RuntimeError(f"ptxas serialises tensor-core products ({note[1]})")
    return [
        KernelReport(name=f"mosaic_{i}", registers=int(registers), spill_bytes=int(stack))
        for i, (stack, registers) in enumerate(_USAGE.findall(text))
    ]


def tracing() -> Any:
    """A context in which kernels are traced for an H200."""
    from jax._src.mesh import AbstractDevice
    from jax.sharding import AbstractMesh, AxisType

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("gpu",), (AxisType.Explicit,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@contextlib.contextmanager
def _printed() -> Iterator[Callable[[], str]]:
    """What compilers print, which they do past Python."""
    with tempfile.TemporaryFile("w+") as file:
        kept = {fd: os.dup(fd) for fd in (1, 2)}
        for fd in kept:
            os.dup2(file.fileno(), fd)
        try:
            yield lambda: (file.seek(0), file.read())[1]
        finally:
            for fd, old in kept.items():
                os.dup2(old, fd)
                os.close(old)
