"""Tuning as a job: a process that may die does the work, and another one goes on where it ended."""

import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from ejkernel.aot import _runner as processes

# The worker imports what the caller would, and not what lies in the working folder.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ejkernel.bench import _tune_worker; _tune_worker.main()"
)
_MOST_DEATHS = 3  # of the worker at one call


class Progress:
    """What a job tells while it works; a subclass shows it."""

    def calls(self, device: str, labels: list[str]) -> None:
        """Says what will be tuned, and on what."""

    def start(self, call: str) -> None:
        """Says which call is tuned now."""

    def candidates(self, done: int, count: int, least_ms: float | None) -> None:
        """Says how many candidates of the call were tried."""

    def result(self, result: dict[str, Any]) -> None:
        """Gives the result of a call."""

    def died(self, call: str, reason: str) -> None:
        """Says that the worker ended at a call."""


@dataclasses.dataclass(eq=False)
class Job:
    """Results so far, by call, in the order of the request."""

    request: dict[str, Any]
    timeout_s: float
    progress: Any  # has the methods of `Progress`
    results: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    deaths: dict[str, int] = dataclasses.field(default_factory=dict)
    labels: list[str] = dataclasses.field(default_factory=list)

    def run(self) -> list[dict[str, Any]]:
        """Starts workers until one comes to the end; ValueError for a request without sense."""
        while (reason := self._worker()) is not None:
            call, why = reason
            if not call or call in self.results:
                raise ValueError(f"the tuning process ended before it began: {why}")
            self.progress.died(call, why)
            self.deaths[call] = self.deaths.get(call, 0) + 1
            if self.deaths[call] >= _MOST_DEATHS:
                self._finish({"call": call, "state": f"given up: {why}", "failures": {}})
        return [self.results[call] for call in self.labels if call in self.results]

    def _finish(self, result: dict[str, Any]) -> None:
        self.results[result["call"]] = result
        self.progress.result(result)

    def _worker(self) -> tuple[str, str] | None:
        """One worker: where it ended and how, or None when everything is done."""
        request = self.request | {"skip": [*self.results]}
        command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with tempfile.TemporaryFile("w+") as log:
            with subprocess.Popen(command, stderr=log, start_new_session=True, **pipes) as process:
                watch = _Watch(self.timeout_s, lambda: processes._kill(process))
                try:
                    processes._send(process, request)
                    call, done = self._listen(process, watch)
                    code = process.wait()
                finally:
                    watch.stop()
                    processes._kill(process)
            log.seek(0)
            said = log.read().strip().splitlines()
        if done:
            return None
        if watch.fired:
            return call, f"it said nothing for {self.timeout_s:g} s"
        return call, f"its process ended with {processes._end(code, said)}"

    def _listen(self, process: Any, watch: "_Watch") -> tuple[str, bool]:
        """The call that was tuned last, and whether the worker came to its end."""
        call = ""
        for line in process.stdout:
            watch.again()
            message = json.loads(line)
            if "error" in message:
                raise ValueError(message["error"])
            if "calls" in message and not self.labels:
                self.labels = message["calls"]
                self.progress.calls(message["device"], self.labels)
            elif "start" in message:
                call = message["start"]
                self.progress.start(call)
            elif "progress" in message:
                self.progress.candidates(*message["progress"])
            elif "result" in message:
                self._finish(message["result"])
            elif "done" in message:
                return call, True
        return call, False


class _Watch:
    """Calls a function when nothing happened for a while."""

    def __init__(self, seconds: float, fire: Callable[[], None]):
        self.fired = False
        self._seconds, self._fire = seconds, fire
        self._timer: threading.Timer | None = None
        self.again()

    def again(self) -> None:
        self.stop()
        self._timer = threading.Timer(self._seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self.fired = True
        self._fire()
