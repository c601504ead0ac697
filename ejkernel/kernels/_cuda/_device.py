"""What every CUDA kernel needs of the machine that it runs on."""

from typing import Any

from ejkernel._device import Target
from ejkernel.callib import _cuda_build


def requires(args: Any, target: Target) -> str | None:
    """Why a source cannot be built for a device."""
    del args
    if target.kind == "cpu":
        return _cuda_build.why_not(_cuda_build.HOST)
    if target.capability is not None and target.capability.startswith("gfx"):
        return f"needs a GPU of NVIDIA; this is {target.capability}"
    return _cuda_build.why_not("cuda")
