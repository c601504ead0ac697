"""Runs kernels: one cached program per kind of call, chosen and built on the first one."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from ejkernel import _device
from ejkernel.ops.config.selection import Choice, ConfigChooser, ConfigSelectorChain
from ejkernel.ops.core import autodiff, sharding
from ejkernel.ops.core.kernel import BACKWARD, Invocation, Kernel, Request
from ejkernel.ops.core.types import AbstractArgs

_MAX_PROGRAMS = 4096


class Executor:
    """`executor(kernel, *args, **kwargs)`: chooses implementation and configuration, and runs."""

    def __init__(self, chooser: ConfigChooser | None = None):
        self.chooser = chooser if chooser is not None else ConfigSelectorChain()
        self._programs: dict[Any, Any] = {}

    def __call__(self, kernel: Kernel, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
        return self.run(kernel, kernel.bind(args, kwargs, cfg))

    def run(self, kernel: Kernel, call: dict[str, Any]) -> Any:
        """Runs a bound call; a call of a known kind costs one dictionary lookup."""
        leaves, tree = jax.tree.flatten(call)
        arrays, statics, where = [], [], None
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                if where is None and not isinstance(leaf, jax.core.Tracer):
                    where = leaf.sharding
                arrays.append(leaf)
                statics.append(_ARRAY)
            elif isinstance(leaf, np.ndarray):
                arrays.append(leaf)
                statics.append(_ARRAY)
            else:
                # 1, 1.0 and True are equal but not alike, and so are 0.0 and -0.0
                statics.append((type(leaf), leaf if leaf else repr(leaf)))
        key = (kernel.cache_token(), tree, tuple(statics), where, self.chooser.generation)
        try:
            program = self._programs.get(key)
        except TypeError:  # an option that cannot be hashed: nothing to remember the program by
            return self._program(kernel, leaves, tree, [])(*arrays)
        if program is None:
            held = [call] if where is not None else []
            program = self._program(kernel, leaves, tree, held)
            try:
                result = program(*arrays)  # remembered only if it works
            finally:
                held.clear()  # the program must not keep the arrays of its first call alive
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            self._programs[key] = program
            return result
        return program(*arrays)

    def choose(self, kernel: Kernel, *args: Any, cfg: Any = None, **kwargs: Any) -> Choice:
        """The choice that a call with these arguments would run with."""
        call = kernel.bind(args, kwargs, cfg)
        canonical, request = kernel.prepare(call)
        target = _device.of_arrays(jax.tree.leaves(call)) or _device.find(request.mesh)
        return self.chooser.choose(_invocation(kernel, canonical, request, target))

    def _program(
        self, kernel: Kernel, leaves: list[Any], tree: Any, held: list[dict[str, Any]]
    ) -> Any:
        """Compiles a kind of call; `held` has the first call while it is traced."""
        slots = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        options = [None if slot else leaf for leaf, slot in zip(leaves, slots, strict=True)]
        placed = _device.of_arrays(leaves)

        def program(*arrays):
            remaining = iter(arrays)
            filled = [
                next(remaining) if slot else option
                for slot, option in zip(slots, options, strict=True)
            ]
            args, request = kernel.prepare(jax.tree.unflatten(tree, filled))
            target = placed or _device.find(request.mesh)
            metadata = {"concrete": lambda: kernel.prepare(held[0])[0] if held else None}
            run = functools.partial(
                self._compute, kernel, request=request, target=target, metadata=metadata
            )
            return kernel.finish(args, sharding.apply(kernel, run, args, request))

        return jax.jit(program, inline=True)

    def _compute(
        self,
        kernel: Kernel,
        args: AbstractArgs,
        *,
        request: Request,
        target: _device.Target,
        metadata: dict[str, Any],
    ) -> tuple[jax.Array, ...]:
        inv = _invocation(kernel, args, request, target, metadata)
        choice = self.chooser.choose(inv)
        implementation = choice.implementation
        with jax.named_scope(f"ejkernel.{kernel.name}.{implementation.name}"):
            if implementation.derivative == "jax":
                return implementation.forward(args, choice.cfg)[0]

            def backward(args, outputs, residuals, cotangents, wanted):
                chosen = self.chooser.choose(
                    dataclasses.replace(
                        inv,
                        call=args,
                        direction=BACKWARD,
                        wanted=wanted,
                        override=request.backward,
                    )
                )
                return chosen.implementation.backward(
                    args, chosen.cfg, outputs, residuals, cotangents, wanted
                )

            structure = []

            def forward(args):
                outputs, residuals = implementation.forward(args, choice.cfg)
                leaves, tree = jax.tree.flatten(outputs)
                structure[:] = [tree]
                return tuple(leaves), tuple(residuals)

            rule = autodiff.Rule(
                op=kernel.name,
                forward=forward,
                backward=backward,
                **kernel.derivative_parts(args),
            )
            outputs = autodiff.apply(rule, args)
            return jax.tree.unflatten(structure[0], outputs)


def _invocation(
    kernel: Kernel,
    args: AbstractArgs,
    request: Request,
    target: _device.Target,
    metadata: dict[str, Any] | None = None,
) -> Invocation:
    return Invocation(
        kernel=kernel,
        metadata=metadata or {},
        call=args,
        target=target,
        platform=request.platform,
        override=request.forward,
    )


class _Array:
    """Stands for an array in the key of a program; `jax.jit` tells shapes and dtypes apart."""


_ARRAY = _Array()


@functools.cache
def default_executor() -> Executor:
    """The executor that public functions and directly called kernels use."""
    return Executor()
