"""Whether the Mosaic GPU of this JAX has what the kernels use."""

import functools
import importlib

import jax

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
