"""Plain attention: the differentiable formula with all rows at once, weights kept."""

from typing import Any

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.flash_attention import formula


@kernel_registry.register("attention", Platform.XLA, Backend.ANY, derivative="jax")
def attention(args: Any, cfg: None) -> tuple[tuple[Any, Any], tuple[()]]:
    """Output and weights; JAX differentiates."""
    out, _, weights = formula.attend(args, max(args.query.shape[1], 1), with_weights=True)
    return (out, weights), ()
