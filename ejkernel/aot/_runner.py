"""Starts a process for each target and collects what it says; nothing of it touches the caller."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ejkernel.aot import _reports, _targets
from ejkernel.aot._reports import Report
from ejkernel.errors import UnsupportedError

Progress = Callable[[str, str], None]
_AT_ONCE = 2
# the worker imports what the caller would, and not what lies in the working folder
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ejkernel.aot import _worker; _worker.main()"
)
_ERRORS = {"TypeError": TypeError, "UnsupportedError": UnsupportedError}


def compile(  # noqa: PLR0913 - the public signature
    op: str,
    *,
    targets: Sequence[str],
    call: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    entries: Sequence[str] | None = None,
    configs: str = "heuristic",
    directions: Sequence[str] = ("forward", "backward"),
    imports: Sequence[str] = (),
    timeout: float = 600.0,
    progress: Progress | None = None,
) -> list[Report]:
    """Compiles an op for devices that need not be here, and says what its kernels take.

    Each target has processes of its own, two at a time, so that a compiler that crashes or hangs is
    a report and nothing else. Backward is compiled for the gradients of all arrays that have one.

    Args:
      op: The operation.
      targets: Such as "tpu:v5e", "tpu:v5e:16x16", "cuda:sm_90" or "hip:gfx942".
      call: Arguments by name; of arrays only shapes and dtypes count. Without arrays: the first
        call of the op that `ejkernel bench` measures on devices.
      dtype: Of the floats in arrays that are not given.
      entries: Names such as "pallas/tpu", or platforms. Default: all.
      configs: "heuristic", the first guess of every entry, or "all", its candidates.
      directions: "forward", "backward" or both.
      imports: Modules that register further kernels.
      timeout: Seconds that a target may take.
      progress: Called with a target and a line of text while it works.

    Returns:
      Reports, in the order of `targets` and best entry first.

    Raises:
      ValueError: for a target, op or entry that there is not, and for a call that makes no sense.
      UnsupportedError: if the compiler of a target is not installed.
    """
    parsed = [_targets.parse(text) for text in targets]
    if configs not in ("heuristic", "all"):
        raise ValueError(f"`configs` must be 'heuristic' or 'all'; got {configs!r}.")
    if not parsed or not set(directions) <= {"forward", "backward"} or not directions:
        raise ValueError("`targets` and `directions` must name at least one each.")
    for target in parsed:
        _targets.require(target)
    request = {
        "op": op,
        "call": _encode(call) if call else {"arrays": {}, "options": {}},
        "dtype": str(dtype),
        "entries": None if entries is None else list(entries),
        "configs": configs,
        "directions": list(directions),
        "imports": list(imports),
        **_context(),
    }
    count = _AT_ONCE if len(parsed) == 1 else 1  # a single target has both cores
    parts = [
        request | {"target": str(target), "share": [number, count]}
        for target in parsed
        for number in range(count)
    ]
    live: list[Any] = []
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            futures = [pool.submit(_one, part, timeout, progress, live) for part in parts]
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()  # the first to fail, before those that still run
            made = [future.result() for future in futures]
        except BaseException:  # an interrupt, too, ends the others
            pool.shutdown(wait=False, cancel_futures=True)
            for process in live:
                _kill(process)
            raise
    placed = [(i // count, place, report) for i, some in enumerate(made) for place, report in some]
    reports: list[Report] = []
    for _, _, report in sorted(placed, key=lambda x: x[:2]):
        if report not in reports:  # processes of a target may fail alike
            reports.append(report)
    return reports


def _encode(call: Mapping[str, Any]) -> dict[str, Any]:
    from ejkernel.aot import _calls

    return _calls.encode(call)


def _context() -> dict[str, Any]:
    """What the caller has set in this process and a new one would not see."""
    if "jax" not in sys.modules:
        return {"jax": {}, "cache_dir": None}
    import jax

    from ejkernel import _settings

    names = ("jax_enable_x64", "jax_default_matmul_precision")
    return {
        "jax": {name: getattr(jax.config, name) for name in names},
        "cache_dir": _settings.current().cache_dir,
    }


def _one(
    request: dict[str, Any], timeout: float, progress: Progress | None, live: list[Any]
) -> list[tuple[float, Report]]:
    """The reports of one process, with their places; it is one of the `live` ones."""
    command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    late = threading.Event()
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(command, stderr=log, start_new_session=True, **pipes) as process:
            timer = threading.Timer(timeout, lambda: (late.set(), _kill(process)))
            live.append(process)
            timer.start()
            try:
                reports, last, error = _talk(process, request, progress)
                code = process.wait()
            finally:
                timer.cancel()
                _kill(process)
        log.seek(0)
        said = log.read().strip().splitlines()
    if error is not None:
        raise _ERRORS.get(error["error"], ValueError)(error["text"])
    if late.is_set():
        reports.append(_broken(request, last, f"stopped after {timeout:g} s"))
    elif code:
        reports.append(_broken(request, last, f"its process ended with {_end(code, said)}"))
    return reports


def _talk(
    process: Any, request: dict[str, Any], progress: Progress | None
) -> tuple[list[tuple[float, Report]], str, dict[str, str] | None]:
    """Reports with their places, the last word of progress, and an error."""
    reports, last, error = [], "starting", None
    _send(process, request)
    for line in process.stdout:
        message = json.loads(line)
        if "report" in message:
            reports.append((message["place"], Report.from_dict(message["report"])))
        elif "progress" in message:
            last = message["progress"]
            if progress is not None:
                progress(request["target"], last)
        else:
            error = message
    return reports, last, error


def _send(process: Any, request: dict[str, Any]) -> None:
    try:
        with process.stdin as stream:
            json.dump(request, stream)
    except BrokenPipeError:  # it is gone already, which its exit code tells
        return


def _kill(process: Any) -> None:
    """Ends a worker and the compilers that it started."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, AttributeError):
            process.kill()


def _end(code: int, said: list[str]) -> str:
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return f"{how}: {said[-1][:300]}" if said else how


def _broken(request: dict[str, Any], last: str, reason: str) -> tuple[float, Report]:
    """A report, the last one, for the program that was being compiled."""
    words = last.split()
    entry, direction = words[1:3] if len(words) == 3 else ("", "")
    made = Report(
        op=request["op"],
        target=request["target"],
        entry=entry,
        direction=direction,
        status=_reports.FAILED,
        reason=f"{reason} ({last})",
    )
    return float("inf"), made
