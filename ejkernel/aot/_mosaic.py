"""Mosaic GPU kernels compiled for an H200 that is not here, by JAX's plugin for CUDA."""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ejkernel.aot import _xla_gpu
from ejkernel.aot._reports import KernelReport

# what ptxas says of a kernel; its name is the same for all
_USAGE = re.compile(r"(\d+) bytes stack frame[^\n]*\n[^\n]*Used (\d+) registers")
# ptxas's notes that products run one after the other; others of their numbers are harmless
_SERIALISED = re.compile(r"\((C75\d\d)\) Potential Performance Loss")


def why_not(target: Any) -> str | None:
    """Why Mosaic kernels are not compiled for a target here; None when they are."""
    return _xla_gpu.why_not(target, "Mosaic GPU kernels are")


def program(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Any]:
    """The numbers of a program, its kernels in the order in which they are compiled.

    To be called inside `tracing`.
    """
    os.putenv("MOSAIC_GPU_DUMP_PTXAS", "1")  # read where C reads it
    with _printed() as said:
        made = _xla_gpu.compiled(fn, inputs)
        text = said()
    return {"kernels": reports(text)} | _xla_gpu.numbers(made)


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
