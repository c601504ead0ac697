"""Lets `triton_call` on a CPU run compiled kernels instead of Triton's interpreter."""

import contextlib
import copy
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ejkernel.callib import _triton_arguments as arguments
from ejkernel.callib import _triton_call, _triton_compile, _triton_interpret, _triton_launch
from tools.ptx import launch as emulator

HOPPER = _triton_compile.GpuTarget("cuda", 90)
# results and outcomes by code, grid and arrays
Seen = dict[str, tuple[list[np.ndarray], emulator.Outcome]]


@contextlib.contextmanager
def emulated(seen: Seen | None = None) -> Iterator[list[emulator.Outcome]]:
    """Yields a list that gets an outcome for each launch; one with a fault returns nan.

    For as long as this lasts, calls of `triton_call` that were traced before run here too. What is
    in `seen` does not run again, and what runs is added to it.
    """
    outcomes: list[emulator.Outcome] = []

    def run(arrays: list[np.ndarray], launch: Any) -> list[np.ndarray]:
        results, outcome = _run(arrays, launch, seen)
        outcomes.append(outcome)
        return results

    before = _triton_call._run_on_host
    _triton_call._run_on_host = run
    try:
        yield outcomes
    finally:
        _triton_call._run_on_host = before


def _key(code: str, plan: Any, arrays: list[np.ndarray]) -> str:
    """What a launch depends on; not on a limit of registers, nor on lines of the source."""
    text = re.sub(r"(?m)^\s*\.(?:maxnreg|loc)\b.*$", "", code)
    numbers = [x for x in plan.parameters if isinstance(x, int)]
    made = hashlib.sha256(f"{text}{plan.grid}{numbers}".encode())
    for array in arrays:
        made.update(f"{array.shape}{array.dtype}".encode() + array.tobytes())
    return made.hexdigest()


def _run(
    arrays: list[np.ndarray], launch: Any, seen: Seen | None
) -> tuple[list[np.ndarray], emulator.Outcome]:
    plan = _triton_launch.plan(launch, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
    compiled = _triton_compile.compile_kernel(plan.kernel, plan.signature, launch.options, HOPPER)
    key = _key(compiled.code, plan, arrays) if seen is not None else ""
    if seen is not None and key in seen:
        results, outcome = seen[key]
        outcome = copy.copy(outcome)
        outcome.code = compiled.code
        return results, outcome
    aliased = {out: array for array, out in launch.aliases}
    arrays, results = list(arrays), []
    for i, (shape, dtype) in enumerate(launch.results()):
        if i in aliased:
            arrays[aliased[i]] = arrays[aliased[i]].copy()
            results.append(arrays[aliased[i]])
        elif i in launch.zeroed:
            results.append(np.zeros(shape, dtype))
        else:
            results.append(_triton_interpret.poisoned(shape, dtype))
    memory = {arguments.Array: arrays, arguments.Output: results}
    pointers = (
        memory[type(leaf)][leaf.index]
        for _, leaf in arguments.all_leaves(launch.kernel.arg_names, launch.parameters)
        if type(leaf) in memory
    )
    values = [x if isinstance(x, int) else next(pointers) for x in plan.parameters]
    outcome = emulator.run(compiled.code, values, plan.grid, compiled.shared_bytes, results)
    outcome.kernel = launch.kernel.fn.__name__
    if seen is not None:
        seen[key] = results, outcome
    return results, outcome
