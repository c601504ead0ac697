"""Runs kernels: one cached program per kind of call, chosen and built on the first one."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ejkernel import _device, _settings
from ejkernel.errors import UnsupportedError
from ejkernel.ops import registry
from ejkernel.ops.config import selection
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import Choice, ConfigChooser, ConfigSelectorChain
from ejkernel.ops.core import autodiff, sharding
from ejkernel.ops.core.kernel import (
    BACKWARD,
    FORWARD,
    Implementation,
    Invocation,
    Kernel,
    Request,
)
from ejkernel.ops.core.types import AbstractArgs
from ejkernel.ops.execution import anywhere
from ejkernel.ops.utils import fingerprint, hlo

logger = logging.getLogger("ejkernel")

_MAX_PROGRAMS = 4096
NO_NUMBERS = "OSUMm"  # kinds of NumPy's dtypes: objects, texts and dates


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def check_numbers(op: str, call: dict[str, Any]) -> None:
    """Refuses arrays of NumPy that are no numbers, before JAX names them by a place in a list."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(call):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in NO_NUMBERS:
            name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
            raise TypeError(
                f"`{op}`: `{name}` must be an array of numbers; got "
                f"{leaf.dtype}{list(leaf.shape)}. Rows of different lengths make an array of "
                "objects: fill them up first."
            )


class _Array:
    """Stands for an array in the key of a program; `jax.jit` tells shapes and dtypes apart."""


_ARRAY = _Array()


@dataclasses.dataclass(eq=False)
class _Program:
    """A compiled kind of call, and what the chooser had remembered when it was traced."""

    fn: Callable[..., Any]
    generation: int
    known: dict[str, Any]
    held: list[dict[str, Any]]  # the call that runs, for a tuner that wants its arguments

    def run(self, call: dict[str, Any], arrays: list[Any], eager: bool) -> Any:
        if eager:
            self.held.append(call)
        try:
            return self.fn(*arrays)
        finally:
            self.held.clear()  # a program must not keep arrays alive

    def holds(self, chooser: ConfigChooser) -> bool:
        """Whether the chooser would still say the same; a later tuning is seen here."""
        if self.generation == chooser.generation:
            return True
        if any(chooser.known(key) is not value for key, value in self.known.items()):
            return False
        self.generation = chooser.generation
        return True


class Executor:
    """`executor(kernel, *args, **kwargs)`: chooses implementation and configuration, and runs."""

    def __init__(self, chooser: ConfigChooser | None = None):
        self.chooser = chooser if chooser is not None else ConfigSelectorChain()
        self._programs: dict[Any, _Program] = {}
        self._told: set[Any] = set()

    def __call__(self, kernel: Kernel, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
        return self.run(kernel, kernel.bind(args, kwargs, cfg))

    def run(self, kernel: Kernel, call: dict[str, Any]) -> Any:
        """Runs a bound call; a call of a known kind costs one dictionary lookup."""
        leaves, tree = jax.tree.flatten(call)
        arrays, statics, where, eager = [], [], None, True
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                if isinstance(leaf, jax.core.Tracer):
                    eager = False
                elif where is None:
                    where = leaf.sharding
                arrays.append(leaf)
                statics.append(_ARRAY)
            elif isinstance(leaf, np.ndarray):
                if leaf.dtype.kind in NO_NUMBERS:
                    check_numbers(kernel.name, call)
                arrays.append(leaf)
                statics.append(_ARRAY)
            else:
                # 1, 1.0 and True are equal but not alike, and so are 0.0 and -0.0
                statics.append((type(leaf), leaf if leaf else repr(leaf)))
        key = (kernel.cache_token(), tree, tuple(statics), where)
        try:
            program = self._programs.get(key)
        except TypeError:  # an option that cannot be hashed: nothing to remember the program by
            return self._program(kernel, leaves, tree, where).run(call, arrays, eager)
        if program is not None and program.holds(self.chooser):
            return program.run(call, arrays, eager)
        program = self._program(kernel, leaves, tree, where)
        result = program.run(call, arrays, eager)  # remembered only if it works
        if len(self._programs) >= _MAX_PROGRAMS:
            self._programs.pop(next(iter(self._programs)))
        self._programs[key] = program
        return result

    def invocation(
        self,
        kernel: Kernel,
        *args: Any,
        direction: str = FORWARD,
        wanted: frozenset[str] = frozenset(),
        cfg: Any = None,
        **kwargs: Any,
    ) -> Invocation:
        """The invocation that a call with these arguments makes."""
        call = kernel.bind(args, kwargs, cfg)
        canonical, request = kernel.prepare(call)
        target = _device.of_arrays(jax.tree.leaves(call)) or _device.find(request.mesh)
        split = next((x.sharding for x in jax.tree.leaves(call) if _is_concrete(x)), None)
        inv = _invocation(kernel, canonical, request, target, placement=split)
        if direction == FORWARD:
            return inv
        return dataclasses.replace(
            inv, direction=direction, wanted=wanted, override=request.backward
        )

    def choose(self, kernel: Kernel, *args: Any, **kwargs: Any) -> Choice:
        """The choice that a call with these arguments would run with."""
        return self.chooser.choose(self.invocation(kernel, *args, **kwargs))

    def _program(self, kernel: Kernel, leaves: list[Any], tree: Any, where: Any = None) -> _Program:
        """Compiles a kind of call; `where` is the sharding of an eager one."""
        slots = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        options = [None if slot else leaf for leaf, slot in zip(leaves, slots, strict=True)]
        placed = _device.of_arrays(leaves)
        eager = not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        known: dict[str, Any] = {}
        held: list[dict[str, Any]] = []

        def program(*arrays):
            remaining = iter(arrays)
            filled = [
                next(remaining) if slot else option
                for slot, option in zip(slots, options, strict=True)
            ]
            args, request = kernel.prepare(jax.tree.unflatten(tree, filled))
            target = placed or _device.find(request.mesh)
            concrete = lambda: kernel.prepare(held[0])[0] if held else None
            metadata = {"concrete": concrete, "eager": eager}

            def run(args: AbstractArgs) -> Any:
                inv = _invocation(kernel, args, request, target, metadata, where)
                return self._compute(inv, request, known)

            return kernel.finish(args, sharding.apply(kernel, run, args, request))

        return _Program(jax.jit(program, inline=True), self.chooser.generation, known, held)

    def _choose(self, inv: Invocation, known: dict[str, Any]) -> Choice:
        if _settings.current().ops_record:
            registry.record_invocation(inv.kernel, inv)
        choice = self.chooser.choose(inv)
        if choice.source != "override":
            known.setdefault(inv.key, self.chooser.known(inv.key))
        if inv.platform == "auto":
            self._tell(inv, choice)
        return choice

    def _tell(self, inv: Invocation, choice: Choice) -> None:
        """Logs a decision of "auto", once."""
        told = (inv.key, choice.implementation.name, repr(choice.cfg), choice.source)
        if told in self._told:
            return
        if len(self._told) >= _MAX_PROGRAMS:
            self._told.clear()
        self._told.add(told)
        what = f"{inv.kernel.name} ({inv.direction})"
        logger.info("%s for %s: %s %s, said by %s", what, selection.shapes(inv), *told[1:])

    def _check_backward(self, inv: Invocation, forward: Implementation, override: Any) -> None:
        """Refuses what a caller configured the backward with, before a gradient is asked for."""
        if forward.derivative == "jax":
            raise UnsupportedError(
                f"`{inv.kernel.name}`: {forward.name} has no backward to configure: JAX makes it."
            )
        there = dataclasses.replace(inv, direction=BACKWARD, override=override)
        try:
            selection.sort_out(there)
        except UnsupportedError:  # of which a gradient will tell; this call may want none
            return
        self.chooser.choose(there)

    def _compute(self, inv: Invocation, request: Request, known: dict[str, Any]) -> Any:
        choice = self._choose(inv, known)
        kernel, implementation = inv.kernel, choice.implementation
        if request.backward is not None and request.backward is not request.forward:
            self._check_backward(inv, implementation, request.backward)
        with hlo.stamp(inv, choice):
            run = anywhere.forward(inv, choice)
            if implementation.derivative == "jax":
                return run(inv.call)[0]

            def backward(args, outputs, residuals, cotangents, wanted):
                changes = {"direction": BACKWARD, "wanted": wanted, "override": request.backward}
                there = dataclasses.replace(inv, call=args, **changes)
                chosen = self._choose(there, known)
                with hlo.stamp(there, chosen):
                    pull = anywhere.backward(there, chosen)
                    return pull(args, outputs, residuals, cotangents)

            structure = []

            def forward(args):
                outputs, residuals = run(args)
                leaves, tree = jax.tree.flatten(outputs)
                structure[:] = [tree]
                return tuple(leaves), tuple(residuals)

            parts = kernel.derivative_parts(inv.call, choice)
            rule = autodiff.Rule(op=kernel.name, forward=forward, backward=backward, **parts)
            outputs = autodiff.apply(rule, inv.call)
            return jax.tree.unflatten(structure[0], outputs)


def _invocation(
    kernel: Kernel,
    args: AbstractArgs,
    request: Request,
    target: _device.Target,
    metadata: dict[str, Any] | None = None,
    placement: Any = None,
) -> Invocation:
    return Invocation(
        kernel=kernel,
        metadata=metadata or {},
        call=args,
        target=target,
        platform=request.platform,
        backend=request.backend,
        placement=fingerprint.of_sharding(placement),
        override=request.forward,
    )


@functools.cache
def default_executor() -> Executor:
    """The executor that public functions and directly called kernels use."""
    return Executor(ConfigSelectorChain(persistent=PersistentCache()))
