"""Compiles Triton candidates in processes without a device, into the cache that tuning reads."""

import json
import subprocess
import sys
from collections.abc import Callable
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
