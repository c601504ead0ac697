"""Compiles Triton kernels without a device, into the cache that tuning and benchmarks read."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ejkernel.bench import _precompile; _precompile.main()"
)


def in_processes(request: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Compiles the candidates of a request's calls for the GPU that is here; elsewhere nothing."""
    from ejkernel import _device

    target = _device.find()
    if target.kind != "gpu" or target.capability is None:
        return
    command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path)]
    running = []
    for number in range(request["workers"]):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        share = {"share": [number, request["workers"]], "target": [target.model, target.capability]}
        with process.stdin as stream:
            json.dump(request | share, stream)
        running.append(process)
    for done, process in enumerate(running):
        process.wait()
        emit({"progress": [done + 1, len(running), None]})


def main() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    request = json.load(sys.stdin)
    compile_share(request)


def compile_share(request: dict[str, Any]) -> int:
    """Every count-th candidate of the calls; how many launches were compiled."""
    from ejkernel import _device, _settings
    from ejkernel.bench import _tune_worker

    model, capability = request["target"]
    target = _device.Target("gpu", model, capability)
    with _settings.override(cache_dir=request["cache_dir"]):
        jobs = [
            job for inv in _tune_worker.invocations(request) for job in _candidates(inv, target)
        ]
        number, count = request["share"]
        return sum(_compile(*job, target) for job in jobs[number::count])


def _candidates(inv: Any, target: Any) -> list[tuple[Any, Any, Any]]:
    from ejkernel.kernels import kernel_registry

    made = []
    for entry in kernel_registry.list(inv.kernel.name):
        if entry.platform == "triton" and entry.why_not(inv.call, target, inv.direction) is None:
            if inv.direction == "forward" or entry.backward is not None:
                configs = entry.candidates(inv.call, inv.direction, target)
                made += [(entry, inv, config) for config in configs]
    return made


def _compile(entry: Any, inv: Any, config: Any, target: Any) -> int:
    import jax
    import jax.numpy as jnp

    from ejkernel.callib import _triton_call, _triton_compile

    def forward(args: Any) -> Any:
        return entry.fn(args, config)

    def backward(args: Any) -> Any:
        # a backward has configurations of its own; the forward here only tells shapes
        guess = entry.heuristic(args, "forward", target)
        outputs, residuals = jax.eval_shape(lambda args: entry.fn(args, guess), args)
        zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
        outputs, residuals = zeros(outputs), zeros(residuals)
        return entry.backward(args, config, outputs, residuals, outputs, inv.wanted)

    program = forward if inv.direction == "forward" else backward
    launches = list(_triton_call.launches(jax.make_jaxpr(program)(inv.call).jaxpr))
    for eqn in launches:
        avals = [v.aval for v in eqn.invars]
        gpu = _triton_compile.GpuTarget.of(target.capability)
        _triton_call.compile_launch(eqn.params["launch"], avals, gpu)
    return len(launches)


@dataclasses.dataclass
class Done:
    """What was compiled for one workload."""

    op: str
    workload: str
    kernels: int = 0  # launches of all programs
    failed: list[str] = dataclasses.field(default_factory=list)


def workloads(
    found: Sequence[Any], modes: Sequence[str], target: Any, candidates: bool
) -> Iterator[Done]:
    """Compiles what a benchmark launches on a GPU that is not here, workload by workload.

    That is every Triton kernel with the configuration that a call would get there, at the size of
    the workload and at the small one that is checked; with `candidates`, all that would be tuned.
    """
    from ejkernel.bench import _programs
    from ejkernel.ops import policy_override

    for workload in found:
        done = Done(workload.op, workload.name)
        asked = [mode for mode in workload.modes if mode in modes]
        directions = dict.fromkeys(d for mode in asked for d in _programs.DIRECTIONS[mode])
        with policy_override(autotune=False):
            for direction in directions:
                for entry, inv, cfg in _jobs(workload, direction, target, candidates):
                    try:
                        done.kernels += _compile(entry, inv, cfg, target)
                    # Triton raises errors of any type; each is told, and the command ends with 1
                    except Exception as error:  # noqa: BLE001 - the other kernels are compiled
                        done.failed.append(f"{entry.name} {direction}, {cfg}: {error}"[:300])
        yield done


def invocation(workload: Any, direction: str, target: Any) -> Any:
    """The call of a workload without its data, for a GPU; None for a backward that there is not."""
    import jax
    import jax.numpy as jnp

    from ejkernel.bench import _programs
    from ejkernel.kernels import kernel_registry
    from ejkernel.ops.core.kernel import BACKWARD, Invocation

    spec = kernel_registry.spec(workload.op)

    def args(key: Any) -> Any:
        values = workload.values(jnp.dtype(workload.dtype), key)
        return spec.canonicalize(spec.unpack(spec.complete(values)))

    whole = jax.eval_shape(args, jax.random.key(0))
    wanted = frozenset(n for n in whole.arrays() if n in spec.differentiable)
    if workload.grads is not None and set(workload.grads) <= spec.differentiable:
        wanted &= set(workload.grads)
    if direction != BACKWARD:
        wanted = frozenset()
    elif not wanted:
        return None
    kernel = _programs.kernel_of(workload.op)
    given = {"target": target, "platform": "triton", "direction": direction, "wanted": wanted}
    return Invocation(kernel=kernel, call=whole, **given)


def _jobs(
    workload: Any, direction: str, target: Any, candidates: bool
) -> Iterator[tuple[Any, Any, Any]]:
    """Entries, calls and configurations of a workload in one direction."""
    from ejkernel.kernels import kernel_registry
    from ejkernel.ops.core.kernel import Invocation

    inv = invocation(workload, direction, target)
    if inv is None:
        return
    spec = kernel_registry.spec(workload.op)
    for entry, configs in _configs(inv, target, candidates):
        for config in configs:
            yield entry, inv, config
        small = spec.reduced(inv.call, max(16, getattr(configs[0], "block_q", 16)))
        if small is not None:
            given = {"target": target, "direction": direction, "wanted": inv.wanted}
            yield entry, Invocation(kernel=inv.kernel, call=small, **given), configs[0]


def _configs(inv: Any, target: Any, candidates: bool) -> Iterator[tuple[Any, list[Any]]]:
    """The Triton entries that serve a call, each with its configurations, the chosen one first."""
    from ejkernel.kernels import kernel_registry
    from ejkernel.ops.execution.executor import default_executor

    chosen = None
    for entry in kernel_registry.list(inv.kernel.name):
        if entry.platform != "triton" or entry.why_not(inv.call, target, inv.direction) is not None:
            continue
        if inv.direction == "backward" and entry.backward is None:
            continue
        chosen = chosen or default_executor().chooser.choose(inv)
        made = [chosen.cfg] if chosen.implementation.name == entry.name else []
        made.append(entry.heuristic(inv.call, inv.direction, target))
        if candidates:
            made += entry.candidates(inv.call, inv.direction, target)
        yield entry, list(dict.fromkeys(made))
