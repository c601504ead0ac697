"""A program traced for one kind of device may be lowered for another: then a portable kernel runs.

Only `platform="auto"` may choose, so only its choices have a stand-in; and only in a trace, which
does not know its devices. JAX keeps the branch of the platform that a program is lowered for.
"""

from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops.config.selection import Choice
from ejkernel.ops.core.kernel import BACKWARD, Implementation, Invocation
from ejkernel.ops.core.types import AbstractArgs
from ejkernel.ops.execution.spread import spread
from ejkernel.ops.utils import hlo
from ejkernel.xla_utils import manual

_PLATFORMS = {"gpu": ("cuda", "rocm"), "tpu": ("tpu",)}


def forward(inv: Invocation, choice: Choice) -> Callable[[AbstractArgs], Any]:
    """Outputs and residuals of a choice."""

    def of(made: Implementation, cfg: Any) -> Callable[[AbstractArgs], Any]:
        return lambda args: made.forward(args, cfg)

    return _placed(inv, choice, of)


def backward(inv: Invocation, choice: Choice) -> Callable[..., dict[str, jax.Array]]:
    """Gradients of a choice from arguments, outputs, residuals and cotangents."""

    def of(made: Implementation, cfg: Any) -> Callable[..., dict[str, jax.Array]]:
        assert made.backward is not None  # of those that can serve a backward
        function = made.backward

        def run(*operands: Any) -> dict[str, jax.Array]:
            gradients = function(operands[0], cfg, *operands[1:], inv.wanted)
            return {name: gradients[name] for name in sorted(inv.wanted)}

        return run

    return _placed(inv, choice, of)


def _placed(inv: Invocation, choice: Choice, of: Callable[..., Any]) -> Callable[..., Any]:
    """A choice for any number of devices, and for devices of other kinds."""
    made = choice.implementation
    run, other, instead = of(made, choice.cfg), _stand_in(inv, choice), None
    if other is not None:
        cfg = other.heuristic(inv.call, inv.direction)
        instead = hlo.named(inv, other, of(other, cfg))
    run = spread(inv, made, run, instead)
    if instead is None or inv.metadata.get("eager"):  # which knows its kind of device
        return run
    return lambda *operands: _either(inv, run, instead, *operands)


def _stand_in(inv: Invocation, choice: Choice) -> Implementation | None:
    """A kernel for every device with the same residuals, where the chosen one is for some."""
    made = choice.implementation
    if inv.platform != "auto" or inv.target is None or inv.target.kind not in _PLATFORMS:
        return None
    if made.portable:
        return None
    for other in inv.kernel.implementations(inv):
        if not other.portable or other.derivative != made.derivative:
            continue
        missing = inv.direction == BACKWARD and other.backward is None
        if not missing and other.why_not(inv.call, inv.direction) is None:
            return other
    return None


def _either(
    inv: Invocation, run: Callable[..., Any], instead: Callable[..., Any], args: Any, *more: Any
) -> Any:
    names, leaves = list(args.arrays()), list(args.arrays().values())

    def of_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
        def branch(arrays: Any, *rest: Any) -> Any:
            made = function(args.with_arrays(dict(zip(names, arrays, strict=True))), *rest)
            flat, tree = jax.tree.flatten(made)
            # branches must agree in this too
            return jax.tree.unflatten(tree, manual.vary_alike([*flat, *arrays])[: len(flat)])

        return branch

    assert inv.target is not None
    chosen = of_arrays(run)
    return jax.lax.platform_dependent(
        leaves,
        *more,
        default=of_arrays(instead),
        **dict.fromkeys(_PLATFORMS[inv.target.kind], chosen),
    )
