"""The private names of jaxlib that launch a compiled Triton kernel, all in one place.

`jaxlib.gpu_triton` holds what JAX's own Triton lowering uses: a description of the kernel and its
parameters, serialised into the custom call that the GPU plugin registers. tests/callib holds the
names to the JAX versions that the package supports.
"""

import functools
import importlib.metadata
import zlib
from collections.abc import Sequence
from typing import Any, cast

import jax

from ejkernel.callib._triton_compile import Compiled, GpuTarget, int_type
from ejkernel.errors import UnsupportedError

NAMES = ("TritonKernel", "TritonKernelCall", "create_array_parameter", "create_scalar_parameter")


@functools.cache
def library() -> Any:
    """`jaxlib.gpu_triton`, with its custom call registered; an error names what is missing."""
    from jaxlib import gpu_triton

    if missing := [name for name in NAMES if not hasattr(gpu_triton, name)]:
        raise UnsupportedError(
            f"Triton kernels need JAX's GPU plugin (no {missing[0]} in jaxlib.gpu_triton): "
            "pip install 'jax[cuda13]'."
        )
    return gpu_triton


@functools.cache
def has_scratch() -> bool:
    """Whether a launch gives a kernel global memory of its own, which tensor descriptors need."""
    version = importlib.metadata.version("jaxlib")
    return tuple(int(part) for part in version.split(".")[:2]) >= (0, 11)


@functools.cache
def device_target(platform: str) -> GpuTarget:
    """The target of the first GPU here."""
    if platform == "rocm":
        return GpuTarget("hip", library().get_arch_details(0).split(":")[0])
    return GpuTarget("cuda", int(library().get_compute_capability(0)))


def lower(
    ctx: Any,
    operands: Sequence[Any],
    compiled: Compiled,
    target: GpuTarget,
    parameters: Sequence[Any],
    launch: dict[str, Any],
) -> Any:
    """The custom call of one launch.

    `parameters` are ints, or bytes to set to zero first wrapped in a tuple, in the kernel's order.
    """
    gpu = library()
    scratch = ()
    if compiled.scratch[0]:
        scratch = compiled.scratch
    kernel = gpu.TritonKernel(
        compiled.name,
        compiled.num_warps,
        1,
        compiled.shared_bytes,
        compiled.code,
        compiled.ttir,
        target.arch if isinstance(target.arch, int) else 0,
        *scratch,
    )
    made = [
        gpu.create_array_parameter(p[0], 16)
        if isinstance(p, tuple)
        else gpu.create_scalar_parameter(p, int_type(p))
        for p in parameters
    ]
    call = gpu.TritonKernelCall(kernel, *launch["grid"], made)
    opaque = zlib.compress(call.to_proto(launch["name"], b""))
    aliases = dict(launch["aliases"])
    if _has_ffi():
        rule = jax.ffi.ffi_lowering(
            "triton_kernel_call_ffi", api_version=4, operand_output_aliases=aliases
        )
        return rule(ctx, *operands, opaque=opaque)
    rule = jax.ffi.ffi_lowering(
        "triton_kernel_call",
        api_version=2,
        backend_config=cast(Any, opaque),  # bytes pass, though JAX's annotation has only str
        operand_output_aliases=aliases,
    )
    return rule(ctx, *operands)


@functools.cache
def _has_ffi() -> bool:
    """Whether the plugin registers the newer call, which keeps CUDA graphs whole."""
    gpu = library()
    plugin = getattr(gpu, "_cuda_triton", None) or getattr(gpu, "_hip_triton", None)
    return "triton_kernel_call_ffi" in getattr(plugin, "registrations", dict)()
