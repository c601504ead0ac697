"""A generated case of an operation, its Triton kernel compiled for Hopper and emulated."""

import dataclasses
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
    found = [e for e in kernel_registry.list(op) if e.name == "triton/gpu"]
    if not found:
        raise LookupError(f"`{op}` has no Triton kernel.")
    return found[0]


def run(
    op: str,
    name: str | None = None,
    dtype: str = "bfloat16",
    *,
    gradients: bool = True,
    config: str = "heuristic",
) -> Report:
    """Runs a case, by default the first that the kernel serves, in both directions.

    Args:
      op: The operation.
      name: The case; None for the first that the kernel serves.
      dtype: Of the case's arrays.
      gradients: Whether the kernel's backward runs too, if it has one.
      config: "heuristic" for what an H200 would run, "testing" for the small blocks of the tests.
    """
    spec, entry = kernel_registry.spec(op), entry_of(op)
    case, args = _find(spec, entry, name, dtype)
    gradients = gradients and entry.why_not(args, direction=BACKWARD) is None
    able = case.grads or spec.differentiable
    wanted = tuple(n for n in args.arrays() if gradients and n in able)
    problem = _oracle.solve(spec, args, wanted)
    choose = lambda direction: (
        None
        if entry.config is None
        else entry.heuristic(args, direction, H200)
        if config == "heuristic"
        else entry.config.testing(args, direction)
    )

    def both(args: Any, cotangents: Any) -> Any:
        outputs, residuals = entry.fn(args, choose(FORWARD))
        if not wanted:
            return outputs, {}
        found = entry.backward(
            args, choose(BACKWARD), outputs, residuals, cotangents, frozenset(wanted)
        )
        return outputs, {n: found[n] for n in wanted}

    with hook.emulated() as launches:
        outputs, found = jax.block_until_ready(jax.jit(both)(args, problem.cotangents))
    answer = _oracle.answer(spec, args, outputs, found)
    return Report(op, case.name, _oracle.mismatch(answer, problem), launches)


def _find(spec: Any, entry: Any, name: str | None, dtype: str) -> tuple[Any, Any]:
    """A case and its arguments; raises if there is none, or the kernel refuses it."""
    cases = [case for case in spec.cases() if name in (None, case.name)]
    if not cases:
        known = ", ".join(case.name for case in spec.cases())
        raise LookupError(f"`{entry.op}` has no case {name!r}; it has {known}.")
    reason = None
    for case in cases:
        args = spec.make(case, jnp.dtype(dtype), jax.random.key(11))
        if (reason := entry.why_not(args)) is None:
            return case, args
    raise LookupError(f"`{entry.op}`: the Triton kernel refuses {name or 'all cases'}: {reason}")
