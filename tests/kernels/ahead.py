"""Prepares a GPU run of the generated tests on a machine without one.

python -m tests.kernels.ahead --target cuda:sm_90 --dtype bfloat16 --kind heuristic --part 1/2

The answers of the oracles and the compiled Triton kernels are kept in `.cache`, which may be copied
to another machine with the same versions of Python, JAX and Triton.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator, Sequence

import jax

from ejkernel import _settings
from ejkernel._device import Target
from ejkernel.aot import _targets
from ejkernel.callib import _triton_call, _triton_compile
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._oracle import Problem
from tests.kernels import harness

CACHE = pathlib.Path(__file__).resolve().parents[2] / ".cache"
DTYPES, KINDS = ("bfloat16", "float32", "float16"), ("heuristic", "testing")


def cases(ops: Sequence[str], dtypes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(op, case, dtype) of all tests that compare a kernel with an oracle."""
    for op in ops or kernel_registry.ops():
        for case in kernel_registry.spec(op).cases():
            if {"core", "full"} & set(case.tags):
                yield from ((op, case.name, dtype) for dtype in dtypes)


def compile_kernels(op: str, made: Problem, kinds: Sequence[str], target: Target) -> int:
    """How many launches of Triton kernels a case has, which are compiled now."""
    made_for, count = _triton_compile.GpuTarget.of(target.capability or ""), 0
    for entry in kernel_registry.list(op):
        if entry.platform != "triton" or entry.why_not(made.args, target) is not None:
            continue
        for kind in kinds:
            cfg = harness.configs(entry, made.args, kind, target)
            program = harness.program_of(entry, made, cfg, target)
            jaxpr = jax.make_jaxpr(program)(made.args, made.cotangents).jaxpr
            for eqn in _triton_call.launches(jaxpr):
                avals = [v.aval for v in eqn.invars]
                _triton_call.compile_launch(eqn.params["launch"], avals, made_for)
                count += 1
    return count


def gpu(text: str) -> Target:
    """The GPU that a target such as cuda:sm_90 is for."""
    found = _targets.parse(text)
    if found.kind == "tpu":
        raise ValueError(f"target {text!r} must be a GPU: Triton compiles for no TPU.")
    return Target("gpu", found.model, found.capability)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=gpu, help="such as cuda:sm_90; none: only the oracles")
    parser.add_argument("--op", action="append", default=[], help="an operation; all by default")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="all by default")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of configurations")
    parser.add_argument("--part", default="1/1", help="2/3: each third case, from the second on")
    given = parser.parse_args(argv)
    part, parts = map(int, given.part.split("/"))
    every, failed = list(cases(given.op, given.dtype or DTYPES)), 0
    with _settings.override(cache_dir=str(CACHE)):
        for op, case, dtype in every[part - 1 :: parts]:
            text = f"{op}, {case}, {dtype}"
            try:
                made = harness.problem.__wrapped__(op, case, dtype)
                if given.target is not None:
                    count = compile_kernels(op, made, given.kind or KINDS, given.target)
                    text += f": {count} launches"
            except Exception as error:  # noqa: BLE001 - it is told, and the others are prepared
                failed += 1
                text += f": {type(error).__name__}: {error}"[:300]
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
