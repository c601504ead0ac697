"""Triton, Mosaic and CUDA kernels compiled for a GPU that is not here, and what they take."""

import contextlib
import dataclasses
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ejkernel.aot import _mosaic, _xla_gpu
from ejkernel.aot._reports import KernelReport
from ejkernel.aot._targets import Target
from ejkernel.callib import _cuda_build, _cuda_call, _triton_call, _triton_compile
from ejkernel.kernels._registry import KernelEntry, Platform

_CUDNN = "cuDNN builds its kernels on the GPU itself"


class Compiler:
    """Triton, nvcc, and Mosaic GPU where JAX's plugin for CUDA is, for one target."""

    wrap = staticmethod(lambda fn: fn)

    def __init__(self, target: Target):
        self._target = _triton_compile.GpuTarget.parse(str(target))
        self._why_no_mosaic = _mosaic.why_not(target)
        self._why_no_xla = _xla_gpu.why_not(target, "XLA's programs are")
        self._platform: Platform | None = None

    def expect(self, entries: Sequence[KernelEntry]) -> None:
        """What comes; all kernels are alike to Triton."""

    def refusal(self, entry: KernelEntry) -> str | None:
        if entry.platform == Platform.PALLAS:
            return self._why_no_mosaic
        if entry.platform == Platform.CUDA:
            if self._target.backend != "cuda":
                return "CUDA sources are compiled for GPUs of NVIDIA alone"
            return _cuda_build.why_not(f"sm_{self._target.arch}")
        if entry.platform == Platform.XLA:
            return self._why_no_xla
        return _CUDNN if entry.platform == Platform.CUDNN else None

    @contextlib.contextmanager
    def tracing(self, entry: KernelEntry) -> Iterator[None]:
        """Around all that is traced and compiled of an entry."""
        self._platform = entry.platform
        is_mosaic = entry.platform == Platform.PALLAS
        with _mosaic.tracing() if is_mosaic else contextlib.nullcontext():
            yield

    def compile(
        self, fn: Callable[..., Any], inputs: tuple[Any, ...], known: dict[str, Any]
    ) -> dict[str, Any]:
        """The kernels of a program, and numbers of all of it where XLA compiles it too."""
        if self._platform == Platform.PALLAS:
            return _mosaic.program(fn, inputs)
        jaxpr = jax.make_jaxpr(fn)(*inputs).jaxpr
        if sources := dict.fromkeys(call.source for call in _cuda_call.calls(jaxpr)):
            arch = f"sm_{self._target.arch}"
            found = [kernel for source in sources for kernel in _cuda_build.usage(source, arch)]
            return {"kernels": [KernelReport(**dataclasses.asdict(kernel)) for kernel in found]}
        made = {"kernels": [self._kernel(eqn) for eqn in _triton_call.launches(jaxpr)]}
        if self._why_no_xla is None:
            with _triton_call.lower_for(self._target):
                made |= _xla_gpu.numbers(_xla_gpu.compiled(fn, inputs))
        return made

    def _kernel(self, eqn: Any) -> KernelReport:
        avals = [v.aval for v in eqn.invars]
        launch = eqn.params["launch"]
        made = _triton_call.compile_launch(launch, avals, self._target)
        usage: dict[str, Any]
        usage = _nvidia(made) if self._target.backend == "cuda" else amd_usage(made.asm["amdgcn"])
        flops = None if launch.cost is None else launch.cost.flops
        return KernelReport(name=made.name, shared_bytes=made.shared_bytes, flops=flops, **usage)


def _nvidia(made: _triton_compile.Compiled) -> dict[str, int]:
    import triton

    folder = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [folder / "cuobjdump", "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return nvidia_usage(done.stdout, made.name)


def nvidia_usage(text: str, name: str) -> dict[str, int]:
    """Registers and bytes of local memory, from what cuobjdump says of a kernel."""
    found = re.search(rf"Function {re.escape(name)}:\s*(.*)", text)
    if found is None:
        return {}
    sizes = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", found[1])}
    # registers that do not fit live in the stack frame, which is local memory
    return {"registers": sizes["REG"], "spill_bytes": max(sizes["STACK"], sizes["LOCAL"])}


def amd_usage(text: str) -> dict[str, int]:
    """Vector registers and bytes of scratch, from the assembly's own notes."""
    value = lambda name: int((re.findall(rf"\.{name}:\s+(\d+)", text) or ["0"])[-1])
    return {"registers": value("vgpr_count"), "spill_bytes": 4 * value("vgpr_spill_count")}
