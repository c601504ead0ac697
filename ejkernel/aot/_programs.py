"""Every program that a call may become: entries, directions and configurations."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _device
from ejkernel.aot import _targets
from ejkernel.aot._calls import Call
from ejkernel.kernels import _derived
from ejkernel.kernels._registry import KernelEntry, kernel_registry
from ejkernel.ops.core.kernel import BACKWARD, FORWARD
from ejkernel.ops.utils import fingerprint, serialize

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One program to compile, or why it is none."""

    entry: KernelEntry
    direction: str
    config: Any = None
    refusal: str | None = None

    def facts(self) -> dict[str, Any]:
        """What a report says about it."""
        return {
            "op": self.entry.op,
            "entry": self.entry.name,
            "version": self.entry.version,
            "direction": self.direction,
            "config": serialize.describe(self.config),
        }


class Programs:
    """The programs of a call for a target; `wrap` is put around what is traced."""

    def __init__(self, call: Call, target: _targets.Target, wrap: Wrap = lambda fn: fn):
        self.call, self.wrap = call, wrap
        kind = "tpu" if target.kind == "tpu" else "gpu"
        self.device = _device.Target(kind=kind, model=target.model, capability=target.capability)
        self.args = self._shapes_of(lambda args: args)
        floats = (n for n, x in self.args.arrays().items() if jnp.issubdtype(x.dtype, jnp.inexact))
        self.wanted = frozenset(floats) & call.spec.differentiable

    def _shapes_of(self, fn: Callable[[Any], Any]) -> Any:
        """Shapes and dtypes of what `fn` makes of the canonical arguments."""
        found: list[Any] = []

        def trace(arrays: Any) -> Any:
            made = fn(self.call.args(arrays))
            found.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made))
            return jnp.zeros(())

        jax.eval_shape(self.wrap(trace), self.call.arrays)
        return found[0]

    def jobs(
        self,
        entries: Sequence[KernelEntry],
        directions: Sequence[str],
        every: bool,
        refuse: Callable[[KernelEntry], str | None],
    ) -> Iterator[Job]:
        """`every` candidate, or the first guess; `refuse` tells why a compiler takes no entry."""
        for entry in entries:
            for direction in directions:
                refusal = self._refusal(entry, direction) or refuse(entry)
                if refusal is not None or entry.config is None:
                    yield Job(entry, direction, None, refusal)
                    continue
                guess = entry.heuristic(self.args, direction, self.device)
                more = entry.candidates(self.args, direction, self.device) if every else ()
                for config in dict.fromkeys((guess, *more)):
                    yield Job(entry, direction, config)

    def _refusal(self, entry: KernelEntry, direction: str) -> str | None:
        reason = entry.why_not(self.args, self.device, direction)
        if reason is None and direction == BACKWARD:
            if not self.wanted:
                return "nothing to differentiate"
            if entry.backward is None and entry.derivative != "jax":
                return "has no backward kernel"
        return reason

    def program(self, job: Job) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function and the shapes of its arguments, the first of them the call's arrays."""
        entry, call = job.entry, self.call
        if job.direction == FORWARD:
            forward = lambda arrays: entry.fn(call.args(arrays), job.config)
            return self.wrap(forward), (call.arrays,)
        guess = entry.heuristic(self.args, FORWARD, self.device)
        outputs, residuals = self._shapes_of(lambda args: entry.fn(args, guess))

        def backward(arrays: Any, outputs: Any, residuals: Any, cotangents: Any) -> Any:
            args = call.args(arrays)
            if entry.backward is not None:
                given = (outputs, residuals, cotangents, self.wanted)
                return entry.backward(args, job.config, *given)
            names = sorted(self.wanted)
            run = lambda *xs: entry.fn(args.with_arrays(dict(zip(names, xs, strict=True))), guess)[
                0
            ]
            return jax.vjp(run, *(args.arrays()[n] for n in names))[1](cotangents)

        return self.wrap(backward), (call.arrays, outputs, residuals, outputs)

    def document(self, direction: str) -> dict[str, Any]:
        """The call as tables of tuned configurations know it."""
        spec, args, wanted = self.call.spec, self.args, self.wanted
        lowering = _derived.keyed_by(spec, kernel_registry.list(spec.name))
        if lowering is not None:
            spec, args, wanted = lowering.base, lowering.shapes(args), lowering.names(wanted)
        made = fingerprint.document(
            op=spec.name,
            direction=direction,
            platform="auto",
            device="",
            arrays=args.arrays(),
            statics=args.statics(),
            placement=None,
            wanted=sorted(wanted) if direction == BACKWARD else [],
        )
        return {name: value for name, value in made.items() if name != "device"}


def chosen(op: str, names: Sequence[str] | None) -> list[KernelEntry]:
    """Entries by name, such as "pallas/tpu", or by platform."""
    every = kernel_registry.list(op)
    if names is None:
        return list(every)
    for name in names:
        if not any(name in (e.name, e.platform) for e in every):
            known = ", ".join(e.name for e in every)
            raise ValueError(f"`{op}` has no entry {name!r}; it has {known}.")
    return [e for e in every if e.name in names or e.platform in names]


def share(jobs: Sequence[Job], number: int, count: int) -> list[tuple[int, Job]]:
    """What one of several processes does, with places among all jobs: whole entries, if it can."""
    able = list(dict.fromkeys(job.entry.name for job in jobs if job.refusal is None))
    mine = []
    for place, job in enumerate(jobs):
        name = job.entry.name
        owner = able.index(name) if len(able) >= count and name in able else place
        if owner % count == number:
            mine.append((place, job))
    return mine
