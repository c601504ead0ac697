"""A generated case of an operation, its Triton kernel compiled for Hopper and emulated."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _device
from ejkernel.kernels import _oracle, kernel_registry
from ejkernel.ops.core.kernel import BACKWARD, FORWARD
from tools.ptx import hook, launch

H200 = _device.Target(kind="gpu", model="NVIDIA H200", capability="9.0")


@dataclasses.dataclass
class Report:
    """What a case did: why it is not the oracle's answer, if so, and its launches."""

    op: str
    case: str
    mismatch: str | None
    launches: list[launch.Outcome]

    @property
    def clean(self) -> bool:
        """Whether at least one kernel ran, all agree with the oracle, and nothing was found."""
        ran = bool(self.launches) and all(x.clean for x in self.launches)
        return ran and self.mismatch is None

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"{self.op} {self.case}: {self.mismatch or 'agrees with the oracle'}"]
        for x in self.launches:
            lines.append(f"  {x.kernel} {x.grid}: {x.instructions} instructions")
            lines += [f"    race: {race}" for race in sorted(x.races)]
            lines += [f"    fault: {x.fault}"] if x.fault else []
        races = sum(len(x.races) for x in self.launches)
        stopped = sum(x.fault is not None for x in self.launches)
        total = sum(x.instructions for x in self.launches)
        end = (
            f"{len(self.launches)} launches, {total} instructions, {races} races, {stopped} faults"
        )
        return [*lines, end]


def entry_of(op: str) -> Any:
    """The Triton kernel of an operation."""
    ops = kernel_registry.ops()
    found = [e for e in kernel_registry.list(op) if e.name == "triton/gpu"] if op in ops else []
    if not found:
        raise LookupError(f"`{op}` is no operation with a Triton kernel.")
    return found[0]


def run(
    op: str,
    name: str | None = None,
    dtype: str = "bfloat16",
    *,
    gradients: bool = True,
    testing: bool = False,
) -> Report:
    """Runs a case in both directions.

    Args:
      op: The operation.
      name: The case; None for the first that the kernel serves.
      dtype: Of the case's arrays.
      gradients: Whether the kernel's backward runs too, if it has one.
      testing: Whether to use the small blocks of the tests instead of what an H200 would run.
    """
    case, args = _find(op, name, dtype)
    wanted = case.grads or kernel_registry.spec(op).differentiable
    return check(op, args, wanted if gradients else (), testing=testing, label=case.name)


def check(
    op: str, args: Any, wanted: Collection[str], *, testing: bool = False, label: str = "call"
) -> Report:
    """Runs a call, with gradients of the arrays in `wanted` if the kernel has a backward."""
    spec, entry = kernel_registry.spec(op), entry_of(op)
    differentiable = entry.why_not(args, direction=BACKWARD) is None
    wanted = tuple(n for n in args.arrays() if differentiable and n in wanted)
    problem = _oracle.solve(spec, args, wanted)

    def config(direction: str) -> Any:
        if entry.config is None:
            return None
        if testing:
            return entry.config.testing(args, direction)
        return entry.heuristic(args, direction, H200)

    def both(args: Any, cotangents: Any) -> Any:
        outputs, residuals = entry.fn(args, config(FORWARD))
        if not wanted:
            return outputs, {}
        names = frozenset(wanted)
        found = entry.backward(args, config(BACKWARD), outputs, residuals, cotangents, names)
        return outputs, {n: found[n] for n in wanted}

    with hook.emulated() as launches:
        outputs, found = jax.block_until_ready(jax.jit(both)(args, problem.cotangents))
    answer = _oracle.answer(spec, args, outputs, found)
    return Report(op, label, _oracle.mismatch(answer, problem), launches)


def _find(op: str, name: str | None, dtype: str) -> tuple[Any, Any]:
    """A case and its arguments; raises if there is none, or the kernel refuses it."""
    entry = entry_of(op)
    spec = kernel_registry.spec(op)
    cases = [case for case in spec.cases() if name in (None, case.name)]
    if not cases:
        known = ", ".join(case.name for case in spec.cases())
        raise LookupError(f"`{op}` has no case {name!r}; it has {known}.")
    reason = None
    for case in cases:
        args = spec.make(case, jnp.dtype(dtype), jax.random.key(11))
        if (reason := entry.why_not(args)) is None:
            return case, args
    raise LookupError(f"`{op}`: the Triton kernel refuses {name or 'all cases'}: {reason}")
