"""CPU seconds that each part of the suite may take; twice as many fail the run."""

import collections
import os
import pathlib
from typing import Any

from tests import selection

_OP = 30.0  # the kernel tests of one op on XLA
_INTERPRETED = 20.0  # and of each of its kernels for GPUs and TPUs
_KERNELS = pathlib.Path(__file__).parents[1] / "ejkernel" / "kernels"
_BACKENDS = ("_triton", "_pallas/tpu", "_cuda")
_PARTS = {
    "kernels/flash_attention": 260.0,
    "kernels/several ops": 120.0,
    "blocks": 75.0,
    "modules": 290.0,  # 13 s an op
    "ops": 90.0,
    "aot": 60.0,
    "bench": 75.0,
    "distributed": 100.0,
    "reliability": 30.0,
    "other": 220.0,
}
_FAILS = 2.0
_SLOWEST = 25

_spent: dict[str, float] = collections.defaultdict(float)
_tests: dict[str, float] = collections.defaultdict(float)
_last = 0.0


def cpu_seconds_since_last_time() -> float:
    """CPU seconds of this process and of those it waited for, since this was last asked."""
    global _last
    now = sum(os.times()[:4])
    spent, _last = now - _last, now
    return spent


def part_of(nodeid: str) -> str:
    """The line of the budget that a test belongs to."""
    folder = nodeid.removeprefix("tests/").partition("/")[0]
    if folder != "kernels":
        return folder if folder in _PARTS else "other"
    named = selection.ops_of(nodeid)
    return f"kernels/{min(named)}" if len(named) == 1 else "kernels/several ops"


def group_of(item: Any) -> str:
    """The tests that run in one process: kernel tests of an op, or those of a file."""
    part = part_of(item.nodeid)
    return part if part.startswith("kernels/") else item.nodeid.partition("::")[0]


def limit_of(part: str) -> float:
    if part in _PARTS:
        return _PARTS[part]
    op = part.removeprefix("kernels/")
    return _OP + _INTERPRETED * sum((_KERNELS / name / op).is_dir() for name in _BACKENDS)


def add(nodeid: str, seconds: float, is_slow: bool) -> None:
    """Slow tests have no budget: they are for runs that take their time."""
    if not is_slow:
        _spent[part_of(nodeid)] += seconds
    _tests[nodeid] += seconds


def report() -> list[str]:
    """The budget table of this run, and its slowest tests."""
    lines = ["", f"{'CPU seconds':<28}{'budget':>8}{'spent':>8}"]
    for part in sorted(_spent):
        seconds, spent = limit_of(part), _spent[part]
        note = "  over budget" if spent > seconds else ""
        lines.append(f"{part:<28}{seconds:>7.0f}s{spent:>7.0f}s{note}")
    slowest = sorted(_tests.items(), key=lambda pair: -pair[1])[:_SLOWEST]
    return [*lines, "", *(f"{seconds:6.1f}s {name}" for name, seconds in slowest)]


def broken() -> list[str]:
    """The parts that took so long that the run fails."""
    return [part for part, spent in _spent.items() if spent > _FAILS * limit_of(part)]
