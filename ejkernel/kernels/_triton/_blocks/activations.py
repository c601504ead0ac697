"""Activations by name, and their slopes."""

import triton
import triton.language as tl

from ejkernel.kernels._triton._blocks import logits

NAMES = ("tanh", "sigmoid", "relu", "softsign", "identity")


@triton.jit
def activate(x, NAME: tl.constexpr, FINE: tl.constexpr):
    """The activation of a tile in float32; FINE: as accurate near zero as elsewhere."""
    if NAME == "tanh":
        return logits.tanh(x, FINE)
    elif NAME == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-x))
    elif NAME == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif NAME == "softsign":
        return x / (1.0 + tl.abs(x))
    else:
        return x


@triton.jit
def slope(x, y, NAME: tl.constexpr):
    """The derivative at x, where the activation is y."""
    if NAME == "tanh":
        return 1.0 - y * y
    elif NAME == "sigmoid":
        return y * (1.0 - y)
    elif NAME == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    elif NAME == "softsign":
        s = 1.0 / (1.0 + tl.abs(x))
        return s * s
    else:
        return tl.full(x.shape, 1.0, tl.float32)
