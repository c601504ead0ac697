"""Every configuration that the tuner may choose for an operation, in the emulator."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ejkernel.kernels import _oracle, kernel_registry
from ejkernel.ops.core.kernel import BACKWARD, FORWARD
from tools.ptx import assembler, calls, case, hook


@dataclasses.dataclass
class Report(case.Report):
    """What a configuration did."""

    def lines(self) -> list[str]:
        """One line, and more for what is not clean."""
        told = [f"{self.case}: {'clean' if self.clean else self.mismatch or 'not clean'}"]
        if not self.clean:
            told += super().lines()[1:-1]
        for kernel, code in {x.kernel: x.code for x in self.launches}.items():
            if "wgmma" in code or "mma.sync" in code:
                told.append(f"  {kernel}: {assembler.assemble(code)}")
        return told


def names(op: str) -> tuple[str, ...]:
    """The calls of an operation."""
    if op not in calls.CALLS:
        raise LookupError(f"`{op}` has no calls that are long enough; {', '.join(calls.CALLS)} do.")
    return tuple(calls.CALLS[op])


def run(op: str, name: str, dtype: str = "bfloat16", *, gradients: bool = True) -> Iterator[Report]:
    """Runs a call once with each configuration of forward, then of backward.

    Launches of equal code over equal arrays run once.
    """
    spec, entry = kernel_registry.spec(op), case.entry_of(op)
    if name not in names(op):
        raise LookupError(f"`{op}` has no call {name!r}; it has {', '.join(names(op))}.")
    args = calls.make(op, name, dtype)
    if (reason := entry.why_not(args)) is not None:
        raise LookupError(f"`{op}`: the Triton kernel refuses {name!r}: {reason}")
    differentiable = gradients and entry.why_not(args, direction=BACKWARD) is None
    wanted = tuple(n for n in args.arrays() if differentiable and n in spec.differentiable)
    problem = _oracle.solve(spec, args, wanted)
    seen: hook.Seen = {}

    def tried(direction: str, cfg: Any, function: Callable[..., Any], *given: Any) -> Any:
        """What a direction returned, if it compiled, and the report."""
        made, problems, launches = None, None, []
        try:
            with hook.emulated(seen) as launches:
                made = jax.block_until_ready(jax.jit(function)(args, *given))
        except jax.errors.JaxRuntimeError as error:  # the compiler's, through the callback
            problems = str(error)
        else:
            outputs, found = (made[0], {}) if direction == FORWARD else (first[0], made)
            answer = _oracle.answer(spec, args, outputs, {n: found[n] for n in wanted if found})
            problems = _oracle.mismatch(answer, problem)
        return made, Report(op, f"{name} {direction} {_changed(cfg)}", problems, launches)

    first: Any = None
    for cfg in _configs(op, entry, args, FORWARD):
        forward = lambda args, cfg=cfg: entry.fn(args, cfg)
        made, report = tried(FORWARD, cfg, forward)
        first = made if first is None else first
        yield report
    if first is None or not wanted:
        return
    for cfg in _configs(op, entry, args, BACKWARD):
        backward = lambda args, *given, cfg=cfg: entry.backward(
            args, cfg, *given, frozenset(wanted)
        )
        yield tried(BACKWARD, cfg, backward, *first, problem.cotangents)[1]


def _configs(op: str, entry: Any, args: Any, direction: str) -> list[Any]:
    """The tuner's configurations; few programs, so that each has several tiles.

    A kernel without any has one way to run.
    """
    if entry.config is None:
        return [None]
    found = entry.config.candidates(calls.of_tuner(op, args), direction, case.H200)
    few = lambda cfg: (
        dataclasses.replace(cfg, num_programs=2) if hasattr(cfg, "num_programs") else cfg
    )
    return list(dict.fromkeys(few(cfg) for cfg in found))


def _changed(cfg: Any) -> str:
    """The members of a configuration that are not its defaults."""
    if cfg is None:
        return "without configurations"
    shown = [
        f"{f.name}={value}"
        for f in dataclasses.fields(cfg)
        if (value := getattr(cfg, f.name)) != f.default or f.name in ("num_warps", "num_stages")
    ]
    return " ".join(shown)
