"""Derived ops: ops whose calls are rewritten to calls of another op, their base.

Every kernel of the base serves the derived op too, and calls of both that mean the same share a
key, and so their tuned rows and configurations.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ejkernel.kernels._registry import Backend, KernelEntry, kernel_registry
from ejkernel.kernels._spec import OpArgs, OpSpec

# The functions of a config module whose first argument is a call.
_TAKES_A_CALL = frozenset({"heuristic", "candidates", "testing", "memory", "misfit"})


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An op that runs before the base, such as the write into a cache that the base reads."""

    spec: OpSpec
    rewrite: Callable[[Any], OpArgs]  # arguments of the derived op -> arguments of this one
    # (arguments of the derived op, outputs of this one) -> arguments that the base starts from
    absorb: Callable[[Any, tuple[jax.Array, ...]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Lowering:
    """How the calls of a derived op become calls of its base.

    Arrays that have gradients reach the base unchanged, at most under another name (`renamed`, from
    the derived op's name to the base's), or are what arrays of the base are computed from (`made`,
    by the base's name); `pull` then brings gradients back. A lowering with a step before the base
    has no backward.
    """

    base: OpSpec
    rewrite: Callable[[Any], OpArgs]  # arguments of the derived op -> arguments of the base
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    before: Step | None = None
    # (arguments after the step before, outputs of the base) -> outputs of the derived op
    outputs: Callable[[Any, tuple[jax.Array, ...]], tuple[jax.Array, ...]] = lambda args, outputs: (
        outputs
    )
    made: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # (arguments of the derived op, gradients of arrays in `made`, wanted names) -> gradients of
    # those that are computed with
    pull: Callable[[Any, dict[str, jax.Array], frozenset[str]], dict[str, jax.Array]] | None = None
    # kernels of the derived op itself are rivals of the base's, and take the place of none
    beside: bool = False
    # whether other kernels are the better guess for a call that nobody has measured
    defers: Callable[[Any], bool] = lambda args: False

    def shapes(self, args: Any) -> Any:
        """The arguments of the base without data; `args` may hold shapes instead of arrays."""
        return jax.eval_shape(self.rewrite, args)

    def names(self, names: frozenset[str]) -> frozenset[str]:
        """Names of the arrays in the base that depend on some arrays of the derived op."""
        made = {name for name, parts in self.made.items() if names.intersection(parts)}
        return frozenset(made | {self.renamed.get(name, name) for name in names - self.parts})

    @property
    def parts(self) -> frozenset[str]:
        """The arrays of the derived op that arrays of the base are computed from."""
        return frozenset(name for parts in self.made.values() for name in parts)

    def formula(self) -> Callable[[Any], tuple[jax.Array, ...]]:
        """The base's differentiable formula, for arguments of the derived op."""
        formula = self.base.formula_fn()
        return lambda args: formula(self.rewrite(args))

    def ops(self) -> tuple[str, ...]:
        """The ops that a call becomes, in the order they run; the last is the base."""
        steps = () if self.before is None else (self.before.spec.name,)
        return (*steps, self.base.name)


def keyed_by(spec: OpSpec, entries: Sequence[KernelEntry]) -> Lowering | None:
    """How calls become calls of the op whose key they use; None if they use a key of their own.

    They do if one of the `entries` to choose from is registered for the derived op itself: no call
    of the base could use a choice of that one.
    """
    return spec.lowers_to if all(entry.base is not None for entry in entries) else None


@functools.cache
def derive(spec: OpSpec, base: KernelEntry, lowered: int = 0) -> KernelEntry:
    """A kernel of the base as a kernel of the derived op `spec`, its priority lowered."""
    lowering = spec.lowers_to
    assert lowering is not None
    shapes = lowering.shapes

    def forward(args: Any, cfg: Any) -> Any:
        if lowering.before is not None:
            args = _run_before(lowering.before, base, args)
        outputs, residuals = base.fn(lowering.rewrite(args), cfg)
        return lowering.outputs(args, outputs), residuals

    def backward(args: Any, cfg: Any, outputs: Any, residuals: Any, cotangents: Any, wanted: Any):
        assert base.backward is not None
        there, asked = lowering.rewrite(args), lowering.names(wanted)
        found = base.backward(there, cfg, outputs, residuals, cotangents, asked)
        same = wanted - lowering.parts
        grads = {name: found[lowering.renamed.get(name, name)] for name in same}
        if lowering.pull is not None:
            of_made = {name: found[name] for name in lowering.made if name in asked}
            grads |= lowering.pull(args, of_made, wanted - same)
        return grads

    def requires(args: Any) -> str | None:
        reason = base.why_not(shapes(args))
        if reason is not None:
            return f"{reason} (as a call of `{base.op}`)"
        return None if lowering.before is None else _why_not_before(lowering.before, base, args)

    return dataclasses.replace(
        base,
        op=spec.name,
        priority=base.priority - lowered,
        fn=forward,
        honours=_honours(spec, lowering, base),
        requires=requires,
        backward=None if base.backward is None or lowering.before is not None else backward,
        backward_requires=lambda args: base.backward_requires(shapes(args)),
        device_requires=lambda args, target: base.device_requires(shapes(args), target),
        config=None if base.config is None else _Config(base.config, lowering),
        base=base,
        defers=lowering.defers,
    )


class _Config:
    """The tuning knowledge of a base's kernel, asked about calls of the derived op."""

    def __init__(self, config: Any, lowering: Lowering):
        self._config, self._lowering = config, lowering

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._config, name)
        if name not in _TAKES_A_CALL:
            return found
        shapes = self._lowering.shapes
        if name == "memory":
            return lambda args, *rest: found(shapes(args), *rest) + self._made_bytes(args)
        return lambda args, *rest: found(shapes(args), *rest)

    def _made_bytes(self, args: Any) -> int:
        """Bytes of the base's arrays that a call computes first."""
        arrays = self._lowering.shapes(args).arrays()
        made = (arrays[name] for name in self._lowering.made)
        return sum(x.size * x.dtype.itemsize for x in made)


def _honours(spec: OpSpec, lowering: Lowering, base: KernelEntry) -> frozenset[str] | None:
    """The derived op's names of what a base's kernel acts on.

    The base does not have the arguments that the rewriting itself acts on.
    """
    if base.honours is None:
        return None
    known = {field.name for field in dataclasses.fields(lowering.base.args)}
    own = {f.name for f in dataclasses.fields(spec.args) if f.default is not dataclasses.MISSING}
    there = {name: lowering.renamed.get(name, name) for name in own}
    return frozenset(n for n in own if there[n] in base.honours or there[n] not in known)


# The step before the base


def _kernels_before(step: Step, base: KernelEntry) -> list[KernelEntry]:
    """Kernels of the step that run where a base's kernel runs, those of its platform first."""
    every = kernel_registry.list(step.spec.name)
    found = [e for e in every if e.backend in (base.backend, Backend.ANY)]
    return sorted(found, key=lambda e: e.platform != base.platform)


def _why_not_before(step: Step, base: KernelEntry, args: Any) -> str | None:
    call, reasons = jax.eval_shape(step.rewrite, args), []
    for entry in _kernels_before(step, base):
        if (reason := entry.why_not(call)) is None:
            return None
        reasons.append(f"{entry.name}: {reason}")
    return f"no kernel of `{step.spec.name}`, which runs first: {'; '.join(reasons) or 'none'}"


def _run_before(step: Step, base: KernelEntry, args: Any) -> Any:
    call = step.rewrite(args)
    entry = next(e for e in _kernels_before(step, base) if e.why_not(call) is None)
    outputs, _ = entry.fn(call, entry.heuristic(call))
    return step.absorb(args, outputs)
