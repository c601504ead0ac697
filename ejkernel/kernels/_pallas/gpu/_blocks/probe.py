"""Whether the Mosaic GPU of this JAX has what the kernels use."""

import functools
import importlib
from typing import Any

import jax

from ejkernel._device import Target

CAPABILITY = "9.0"  # of Hopper
_OLDEST = (0, 11)


@functools.cache
def why_not() -> str | None:
    """Why this JAX cannot run the kernels; None when it can. The first call imports Mosaic."""
    if jax.__version_info__ < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        return f"needs JAX {oldest} or newer for its Mosaic GPU; this is {jax.__version__}"
    try:
        importlib.import_module("ejkernel.kernels._pallas.gpu._blocks.mosaic")
    except (ImportError, AttributeError) as error:
        return f"the Mosaic GPU of JAX {jax.__version__} lacks something: {error}"
    return None


def why_not_interpreted() -> str | None:
    """Why this JAX cannot interpret the kernels on a CPU; None when it can."""
    if (reason := why_not()) is not None:
        return reason
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not hasattr(plgpu, "InterpretGPUParams"):
        return f"needs JAX 0.12 or newer to be interpreted; this is {jax.__version__}"
    return None


def device_requires(args: Any, target: Target) -> str | None:
    """Hopper has the products and the copies that the kernels issue; no other GPU has both."""
    del args
    if target.kind == "cpu":
        return why_not_interpreted()
    if target.capability is None:  # a device that is only named
        return None if "H100" in target.model or "H200" in target.model else _only(target.model)
    return None if target.capability == CAPABILITY else _only(target.capability)


def _only(found: str) -> str:
    return f"needs a GPU of compute capability {CAPABILITY}, such as an H200; this is {found}"
