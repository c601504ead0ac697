"""Measures in a process that may die or hang: another one goes on, without what ended the first.

The process is the same command once more, with a folder in which it says what it does.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from ejkernel._cli_text import tell
from ejkernel.aot import _runner as processes
from ejkernel.ops.execution import benchmark

# In a worker, JAX takes memory as it needs it: others on the same device need some, too.
ROOMY = "import os; os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false'); "
# The worker imports what the caller would, and not what lies in the working folder.
_START = (
    f"{ROOMY}import json, sys; path, argv = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from ejkernel import cli; sys.exit(cli.main(argv))"
)
_JOURNAL, _GIVEN_UP, _RESULTS = "journal", "given_up.json", "results.json"
_MOST_DEATHS_OF_A_ROW = 4
_MOST_DEATHS_BY_A_PROGRAM = 2  # in one op; then it is not tried in its other rows
_POLL_S = 0.1

Key = tuple[str, str, str, str]  # op, workload, mode, program
AHEAD: Key = ("", "all programs, compiled ahead", "", "")


class Journal:
    """What the worker says about itself, a line of JSON each, for the process that waits for it."""

    def __init__(self, folder: str):
        self._file = (pathlib.Path(folder) / _JOURNAL).open("a")
        self._parent = os.getppid()

    def write(self, **facts: Any) -> None:
        if os.getppid() != self._parent:  # nobody waits any more
            raise SystemExit(1)
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()


class Recorded:
    """Progress that is shown as another one shows it, and written to a journal."""

    def __init__(self, shown: Any, journal: Journal):
        self._shown, self._journal = shown, journal

    def begin(self, op: str, workload: str, mode: str, program: str) -> None:
        self._journal.write(begin=[op, workload, mode, program])

    def lost(self, reason: str) -> None:
        self._journal.write(lost=reason)

    def step(self, text: str) -> None:
        self._journal.write(step=text)
        self._shown.step(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


def given_up(folder: str) -> dict[Key, str]:
    """What ended earlier processes, and how."""
    path = pathlib.Path(folder) / _GIVEN_UP
    found = json.loads(path.read_text()) if path.exists() else []
    return {(op, workload, mode, program): why for (op, workload, mode, program), why in found}


def run(argv: Sequence[str], timeout_s: float, budget_s: float, out: str | None) -> int:
    """Runs the command in workers until one comes to its end; the exit code of that one."""
    with tempfile.TemporaryDirectory(prefix="ejkernel-bench-") as folder:
        return _Supervisor(list(argv), timeout_s, budget_s, out, pathlib.Path(folder)).run()


@dataclasses.dataclass(eq=False)
class _Supervisor:
    argv: list[str]
    timeout_s: float
    budget_s: float
    out: str | None
    folder: pathlib.Path
    dead: dict[Key, str] = dataclasses.field(default_factory=dict)

    def run(self) -> int:
        clock, first = benchmark.Stopwatch(self.budget_s), True
        while True:
            (self.folder / _JOURNAL).write_text("")
            said = [[list(key), why] for key, why in self.dead.items()]
            (self.folder / _GIVEN_UP).write_text(json.dumps(said))
            code, late = self._worker(clock.left, first)
            lines = [json.loads(line) for line in self._journal().splitlines()]
            if any("ended" in line for line in lines):
                return code
            if not self._learn(lines, self._how(code, late, lines)):
                return code or 1
            first = False

    def _worker(self, budget_s: float, first: bool) -> tuple[int, bool]:
        """The exit code of one worker, and whether it was ended because it said nothing."""
        more = ["--timeout", "0", "--state", str(self.folder), "--budget", str(budget_s)]
        more += ["--out", self.out or str(self.folder / _RESULTS)]
        more += [] if first else ["--resume"]
        argv = [*self.argv, *more]
        command = [sys.executable, "-P", "-c", _START, json.dumps([sys.path, argv])]
        # In the session of this process, so that both end together.
        process = subprocess.Popen(command)
        size, watch = -1, benchmark.Stopwatch(self.timeout_s)
        try:
            while process.poll() is None:
                if (now := (self.folder / _JOURNAL).stat().st_size) != size:
                    size, watch = now, benchmark.Stopwatch(self.timeout_s)
                if watch.over:
                    return -9, True
                time.sleep(_POLL_S)
            return process.returncode, False
        finally:
            process.kill()
            process.wait()

    def _journal(self) -> str:
        text = (self.folder / _JOURNAL).read_text()
        return text[: text.rfind("\n") + 1]  # the last line may be half of one

    def _how(self, code: int, late: bool, lines: list[dict[str, Any]]) -> str:
        lost = [line["lost"] for line in lines if "lost" in line]
        if lost:
            return f"the device does not answer since it failed: {lost[-1]}"
        if late:
            return f"took more than {self.timeout_s:g} s"
        return f"its process ended with {processes._end(code, [])}"

    def _learn(self, lines: list[dict[str, Any]], why: str) -> bool:
        """Notes what the worker ended with; False when another one would end there, too."""
        begun = [tuple(line["begin"]) for line in lines if "begin" in line]
        if begun and begun[-1] == AHEAD and AHEAD not in self.dead:
            tell(f"ejkernel: compiling in threads: {why}; going on without --threads")
            self.dead[AHEAD] = why
            return True
        if not begun or not begun[-1][0] or begun[-1] in self.dead:
            tell(f"ejkernel: error: the process that measures ended before it began: {why}")
            return False
        op, workload, mode, program = begun[-1]
        tell(f"ejkernel: {op}, {workload}, {mode}: {program or 'inputs'}: {why}; going on without")
        self.dead[op, workload, mode, program] = why
        alike = [key for key in self.dead if (key[0], key[3]) == (op, program)]
        if program and len(alike) >= _MOST_DEATHS_BY_A_PROGRAM:
            self.dead[op, "", "", program] = f"given up after {len(alike)} processes: {why}"
        if sum(key[:3] == (op, workload, mode) for key in self.dead) >= _MOST_DEATHS_OF_A_ROW:
            self.dead[op, workload, mode, ""] = f"given up: {why}"
        return True
