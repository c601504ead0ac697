"""`ring_attention` as a formula that JAX can differentiate any number of times."""

import jax

from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._ring import gather
from ejkernel.kernels._specs.ring_attention import RingAttentionArgs


def ring_attention(args: RingAttentionArgs) -> tuple[jax.Array, ...]:
    """Outputs of `ring_attention`, from all keys at once."""
    return gather.formula(args, kernel_registry.spec("flash_attention").formula_fn())
