"""Activations by name, and their slopes."""

import triton
import triton.language as tl

NAMES = ("tanh", "sigmoid", "relu", "softsign", "identity")


@triton.jit
def tanh(x, FINE: tl.constexpr):
    """Absolute error below 1e-7; FINE: small relative to tanh itself too, near zero.

    A recurrence multiplies each step's error.
    """
    e = tl.math.exp2(tl.abs(x) * -2.8853900817779268)  # e^(-2|x|)
    y = 1.0 - 2.0 * e / (1.0 + e)  # half the error of (1 - e) / (1 + e)
    if FINE:  # the difference cancels near zero: there, the series to x^11
        s = x * x
        series = s * (62.0 / 2835.0 - s * (1382.0 / 155925.0))
        series = 1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - series)))
        y = tl.where(tl.abs(x) < 0.375, tl.abs(x) * series, y)
    return tl.where(x < 0, -y, y)


@triton.jit
def activate(x, NAME: tl.constexpr, FINE: tl.constexpr):
    """The activation of a tile in float32; FINE: as accurate near zero as elsewhere."""
    if NAME == "tanh":
        return tanh(x, FINE)
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
        return (1.0 - y) * (1.0 + y)
    elif NAME == "sigmoid":
        return y * (1.0 - y)
    elif NAME == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    elif NAME == "softsign":
        s = 1.0 / (1.0 + tl.abs(x))
        return s * s
    else:
        return tl.full(x.shape, 1.0, tl.float32)
