"""One process for one target: a request as JSON on the standard input, answers as JSON lines.

A line is {"progress": text}, {"report": …, "place": number} or, as the last one of a request that
makes no sense, {"error": …, "text": …}.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Emit = Callable[[dict[str, Any]], None]


def main() -> None:
    # compilers write to the standard output, too; answers keep it for themselves
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        run(json.load(sys.stdin), emit)
    except (ValueError, TypeError, NotImplementedError) as error:
        emit({"error": type(error).__name__, "text": str(error)})


def run(request: dict[str, Any], emit: Emit) -> None:
    """Compiles everything that a request asks for, one report each."""
    import jax

    from ejkernel import _settings
    from ejkernel.aot import _calls, _programs, _targets

    # a program found in JAX's cache is not compiled, and leaves no schedule
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    for name, value in request["jax"].items():
        jax.config.update(name, value)
    for module in request["imports"]:
        importlib.import_module(module)
    target = _targets.parse(request["target"])
    settings = {"interpret": False}
    if request["cache_dir"] is not None:
        settings["cache_dir"] = request["cache_dir"]
    with _settings.override(**settings):
        call = _calls.decode(request["op"], request["call"], request["dtype"])
        compiler = _compiler(target, call)
        programs = _programs.Programs(call, target, compiler.wrap)
        entries = _programs.chosen(request["op"], request["entries"])
        every = request["configs"] == "all"
        jobs = list(programs.jobs(entries, request["directions"], every, compiler.refusal))
        mine = _programs.share(jobs, *request["share"])
        compiler.expect([job.entry for _, job in mine])
        for place, job in mine:
            if job.refusal is None:
                emit({"progress": f"{place + 1}/{len(jobs)} {job.entry.name} {job.direction}"})
            emit({"report": _report(job, programs, compiler, target), "place": place})


def _compiler(target: Any, call: Any) -> Any:
    if target.kind != "tpu":
        from ejkernel.aot import _gpu

        return _gpu.Compiler(target)
    from ejkernel.aot import _tpu
    from ejkernel.kernels import _spec

    fields = {f.name: f.default for f in _spec.static_fields(call.spec.args)}
    return _tpu.Compiler(target, call.options.get("axis_name", fields.get("axis_name", "chips")))


def _report(job: Any, programs: Any, compiler: Any, target: Any) -> dict[str, Any]:
    from ejkernel.aot import _reports, _trips

    facts = job.facts() | {"target": str(target), "call": programs.document(job.direction)}
    if job.refusal is not None:
        return _reports.Report(status=_reports.REFUSED, reason=job.refusal, **facts).as_dict()
    start = time.monotonic()
    try:
        names = list(programs.args.arrays())
        known = _trips.example_inputs(programs.call.spec, programs.args, names)
        with compiler.tracing(job.entry):
            made = compiler.compile(*programs.program(job), known)
        made["kernels"] = tuple(made["kernels"])
        status = {"status": _reports.COMPILED}
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; the next job runs
        made, status = {}, {"status": _reports.FAILED, "reason": _brief(error)}
    seconds = round(time.monotonic() - start, 3)
    return _reports.Report(seconds=seconds, **facts, **status, **made).as_dict()


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


if __name__ == "__main__":
    main()
