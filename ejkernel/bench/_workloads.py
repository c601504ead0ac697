"""What is measured: calls of ops, the peers beside them, and the bars that they must reach."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FWD, BOTH = "fwd", "fwd+bwd"
MODES = (FWD, BOTH)
AUTO, BEST = "auto", "the best of ours"
# What a bar compares a program with, besides other programs: the matrix product or the copy that
# bounds its row, and a rate.
CEILING, TFLOPS = "its ceiling", "TFLOP/s"
# What a workload measures: time; temporary bytes that XLA reports, without running anything; or
# microseconds that an eager call costs over the same jitted call.
TIME, MEMORY, EAGER = "ms", "bytes", "us"


@dataclasses.dataclass(frozen=True)
class Bar:
    """A promise: `beside` takes at least `least` times what `of` takes.

    With `workload`, `of` itself is compared: its rate here must be at least `least` times its rate
    in the other workload of the same op. Without a second program (`beside` is ""), `of` takes at
    most `least` in the unit of the row. `beside=CEILING`: its rate is at least this share of the
    ceiling that was measured in the same run. `beside=TFLOPS`: it reaches at least so many.
    """

    least: float
    beside: str = ""
    of: str = AUTO
    modes: tuple[str, ...] = MODES
    workload: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Peer:
    """Another implementation of ops.

    `run` takes the public arguments of a call by name and returns what our function returns; it is
    compiled and differentiated as ours is. A peer of another framework has `build` instead, see
    `_peers_torch`. `why_not` says which calls it cannot serve.
    """

    name: str
    ops: tuple[str, ...]
    run: Callable[[dict[str, Any]], Any] | None = None
    build: Callable[..., Callable[[], Any]] | None = None
    needs: tuple[str, ...] = ()  # modules that must be installed
    backend: str = ""  # "gpu": only there
    why_not: Callable[[dict[str, Any]], str | None] = lambda values: None
    modes: tuple[str, ...] = MODES
    # arrays that it takes besides those of the call, made before anything is timed
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    agrees: bool = True  # False: its numbers may rightly be others, and only its time is compared
    same_work: bool = True  # False: it does other work for the same purpose, so it has no rate
    tolerance: float | None = None  # relative to the largest value; None: what the dtype allows


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """A call of an op: `values(dtype, key)` makes its public arguments."""

    op: str
    name: str
    values: Callable[[Any, Any], dict[str, Any]]
    dtype: str = "float32"
    grads: tuple[str, ...] | None = None  # arguments with gradients; None: all that have one
    modes: tuple[str, ...] = MODES
    peers: tuple[Peer, ...] = ()  # besides the known ones
    known_peers: bool = True
    bars: tuple[Bar, ...] = ()
    quantity: str = TIME
    # how ours is called, when not by the public function: takes a platform and the arguments
    ours: Callable[[str, dict[str, Any]], Any] | None = None
    devices: int = 1  # that the workload needs
    # arguments that our programs donate, each with the output that is the next call's argument
    carried: tuple[tuple[str, str], ...] = ()
    # Forward calls in one compiled loop, where one call takes less than the host needs to start
    # it; results are for one call.
    repeats: int = 1


def find(
    ops: Sequence[str],
    device_kind: str,
    *,
    shapes: str = "auto",
    dtype: str | None = None,
    options: bool = False,
) -> list[Workload]:
    """The workloads of ops from their specs.

    Args:
      ops: Names; empty for all.
      device_kind: "cpu", "gpu" or "tpu".
      shapes: "small", "full", or "auto": small on a CPU, full elsewhere.
      dtype: None for float32 on a CPU and bfloat16 elsewhere.
      options: Also those that show what an option costs.
    """
    from ejkernel.kernels import kernel_registry

    small = shapes == "small" or (shapes == "auto" and device_kind == "cpu")
    tag = "cpu" if small else "device"
    kind = dtype or ("float32" if device_kind == "cpu" else "bfloat16")
    found = []
    for op in ops or kernel_registry.ops():
        spec = kernel_registry.spec(op)
        for case in spec.work.benchmarks() if spec.work is not None else ():
            if tag in case.tags and (options or "options" not in case.tags):
                modes = MODES if spec.differentiable else (FWD,)
                found.append(Workload(op, case.name, case.values, kind, case.grads, modes))
    return found


def load(path: str) -> list[Workload]:
    """The list `WORKLOADS` of a Python file."""
    file = pathlib.Path(path)
    spec = importlib.util.spec_from_file_location(f"ejkernel_workloads_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    found = getattr(module, "WORKLOADS", None)
    if not isinstance(found, Sequence) or not all(isinstance(w, Workload) for w in found):
        raise ValueError(f"{path} must define `WORKLOADS`, a list of `ejkernel.bench.Workload`")
    return list(found)


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments that hold arrays, and the others, which are part of a program."""
    import jax
    import numpy as np

    def holds_arrays(value: Any) -> bool:
        leaves = jax.tree.leaves(value)
        return bool(leaves) and all(isinstance(x, jax.Array | np.ndarray) for x in leaves)

    traced = {name: value for name, value in values.items() if holds_arrays(value)}
    return traced, {name: value for name, value in values.items() if name not in traced}
