"""The process that tunes: a request as JSON on the standard input, answers as JSON lines.

Answers are {"device": …, "calls": [labels]}, then for every call {"start": label}, some
{"progress": …} and {"result": …}, and at the end {"done": true}. A request that makes no sense is
answered with {"error": text}. The process may be killed at any time: what is measured is on disk.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Emit = Callable[[dict[str, Any]], None]
_MOST_THREADS = 16


def main() -> None:
    # compilers write to the standard output, too; answers keep it for themselves
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        run(json.load(sys.stdin), emit)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        emit({"error": " ".join(str(error).split())})


def run(request: dict[str, Any], emit: Emit) -> None:
    """Tunes every call of a request, one after another."""
    from ejkernel import _settings
    from ejkernel.ops import ConfigSelectorChain, PersistentCache
    from ejkernel.ops.execution import benchmark
    from ejkernel.ops.execution.tuning import Tuner
    from ejkernel.ops.utils import fingerprint

    for module in request["imports"]:
        importlib.import_module(module)
    cache = PersistentCache(request["folder"])
    with _settings.override(cache_dir=request["cache_dir"]):
        calls = invocations(request)
        labels = [label(inv) for inv in calls]
        emit({"device": fingerprint.device_fingerprint(), "calls": labels})
        if request["workers"]:
            from ejkernel.bench import _precompile

            _precompile.in_processes(request, emit)
        clock = benchmark.Stopwatch(request["total_s"] or float("inf"))
        for name, inv in zip(labels, calls, strict=True):
            if name in request["skip"]:
                continue
            emit({"start": name})
            report = lambda done, count, least: emit({"progress": [done, count, least]})
            tuner = Tuner(report=report, threads=threads())
            chain = ConfigSelectorChain(persistent=cache, tuner=tuner)
            emit({"result": tune(chain, inv, request, clock.left) | {"call": name}})
    emit({"done": True})


def threads() -> int:
    """That compile candidates: XLA compiles a program for a CPU on all cores, for a GPU on one."""
    from ejkernel import _device

    return 0 if _device.device_kind() == "cpu" else min(_MOST_THREADS, os.cpu_count() or 1)


def tune(chain: Any, inv: Any, request: dict[str, Any], left: float) -> dict[str, Any]:
    """One call: what was chosen, or why nothing was measured."""
    import jax

    from ejkernel.ops.config.selection import sort_out
    from ejkernel.ops.utils import serialize

    where = {"op": inv.kernel.name, "device": inv.device_fingerprint}
    known = chain.persistent.read(inv.key, **where)
    if known is not None and known.complete and not request["again"]:
        return facts("known already", known.implementation, known.config, known.times_ms, known)
    if left <= 0:
        return facts("not started: the time for all calls is used up")
    try:
        able, _ = sort_out(inv)
        with jax.default_matmul_precision(inv.document["precision"]):
            choice = chain.tune(inv, budget_s=min(request["budget_s"], left))
    except (NotImplementedError, ExceptionGroup) as error:
        return facts(f"nothing can run it: {' '.join(str(error).split())[:200]}")
    stored = chain.cache.get(inv.key)
    if stored is None:
        said = [text for text in choice.trail if text.startswith("autotune")]
        reason = said[-1].partition(": ")[2] if said else "nothing was measured"
        return facts(f"not tuned: {reason}", able[0].name)
    state = "tuned" if stored.complete else "cut short, goes on next time"
    plain = serialize.to_builtins(stored.config)
    return facts(state, stored.implementation, plain, dict(stored.times_ms), stored)


def facts(
    state: str, entry: str = "", config: Any = None, times: Any = None, stored: Any = None
) -> dict[str, Any]:
    """A result as plain values."""
    failures = {} if stored is None else dict(stored.failures)
    return {
        "state": state,
        "entry": entry,
        "config": config,
        "best_ms": min(times.values()) if times else None,
        "measured": len(times or {}),
        "failed": len(failures),
        "failures": failures,
    }


def label(inv: Any) -> str:
    """A call in words, which tell it from the others."""
    arrays = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in inv.call.arrays().items())
    where = "" if inv.platform == "auto" else f" on {inv.platform}"
    return f"{inv.kernel.name} {inv.direction}{where}: {arrays} [{inv.key[:8]}]"


def invocations(request: dict[str, Any]) -> list[Any]:
    """The calls of a request, each once, without data."""
    found = []
    if request["documents"] is not None:
        found = [restored(document) for document in request["documents"]]
    elif request["call"] is not None:
        found = of_call(request["ops"][0], request)
    else:
        found = of_workloads(request)
    return list({inv.key: inv for inv in found}.values())


def restored(document: dict[str, Any]) -> Any:
    """The call that was recorded, for the device that is here."""
    import ejkernel.modules  # noqa: F401 - makes the ops known by name
    from ejkernel.ops import registry
    from ejkernel.ops.core.kernel import Kernel

    kernel = registry.kernel_named(document["op"])
    if kernel is None or type(kernel).restore is Kernel.restore:
        raise ValueError(f"there is no op {document['op']!r} here; --import the module that has it")
    try:
        return kernel.restore(document)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a recorded call of {document['op']} does not hold: {error!r}") from None


def of_call(op: str, request: dict[str, Any]) -> list[Any]:
    """One call given by the shapes of its arrays and its options."""
    import jax

    from ejkernel.aot import _calls

    call = _calls.decode(op, request["call"], request["dtype"] or "float32")
    return _directions(op, jax.eval_shape(call.args, call.arrays), request)


def of_workloads(request: dict[str, Any]) -> list[Any]:
    """The benchmark shapes of ops."""
    import jax
    import jax.numpy as jnp

    from ejkernel import _device
    from ejkernel.bench import _workloads
    from ejkernel.kernels import kernel_registry

    kind, made = _device.device_kind(), []
    shapes = {"shapes": request["shapes"], "dtype": request["dtype"]}
    for workload in _workloads.find(request["ops"], kind, **shapes):
        if request["only"] not in workload.name:
            continue
        spec = kernel_registry.spec(workload.op)

        def args(key: Any, spec: Any = spec, workload: Any = workload) -> Any:
            values = workload.values(jnp.dtype(workload.dtype), key)
            return spec.canonicalize(spec.unpack(spec.complete(values)))

        made += _directions(workload.op, jax.eval_shape(args, jax.random.key(0)), request)
    if not made:
        raise ValueError(f"no workload has {request['only']!r} in its name")
    return made


def _directions(op: str, args: Any, request: dict[str, Any]) -> list[Any]:
    from ejkernel import _device
    from ejkernel.bench import _programs
    from ejkernel.kernels import kernel_registry
    from ejkernel.ops.core.kernel import BACKWARD, Invocation

    spec, kernel, made = kernel_registry.spec(op), _programs.kernel_of(op), []
    wanted = frozenset(n for n in args.arrays() if n in spec.differentiable)
    backward = any(entry.backward is not None for entry in kernel_registry.list(op))
    for platform in request["platforms"]:
        for direction in request["directions"]:
            if direction == BACKWARD and not (wanted and backward):
                continue
            made.append(
                Invocation(
                    kernel=kernel,
                    call=args,
                    target=_device.find(),
                    platform=platform,
                    direction=direction,
                    wanted=wanted if direction == BACKWARD else frozenset(),
                )
            )
    return made


if __name__ == "__main__":
    main()
