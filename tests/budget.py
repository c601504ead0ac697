"""Seconds that each part of the suite may take on two cores, and what it took.

Machines are noisy: only a part four times over its budget fails the run.
"""

import collections
import pathlib
import re

_SPECS = pathlib.Path(__file__).parents[1] / "ejkernel" / "kernels" / "_specs"
_TEST = 15.0  # one test that is not marked slow
_OP = 65.0  # the kernel tests of one op
_PARTS = {
    "kernels/flash_attention": 450.0,  # and the transformations of all ops
    "blocks": 130.0,
    "modules": 450.0,  # 20 s an op
    "ops": 120.0,
    "aot": 60.0,
    "distributed": 200.0,
    "reliability": 65.0,
    "other": 220.0,
}
_FAILS = 4.0

_spent: dict[str, float] = collections.defaultdict(float)
_tests: dict[str, float] = collections.defaultdict(float)


def part_of(nodeid: str) -> str:
    """The line of the budget that a test belongs to."""
    folder = nodeid.removeprefix("tests/").partition("/")[0]
    if folder != "kernels":
        return folder if folder in _PARTS else "other"
    named = re.search(r"\[([a-z_0-9]+)-[a-z]+/[a-z]+", nodeid)  # [op-platform/backend-…]
    known = named and (_SPECS / f"{named[1]}.py").exists()
    return f"kernels/{named[1] if known else 'flash_attention'}"


def limit_of(part: str) -> float:
    return _PARTS.get(part, _OP)


def add(nodeid: str, seconds: float) -> None:
    _spent[part_of(nodeid)] += seconds
    _tests[nodeid] += seconds


def report() -> list[str]:
    """The budget table of this run."""
    lines = ["", f"{'part':<28}{'budget':>8}{'spent':>8}"]
    for part in sorted({*_PARTS, *_spent}):
        seconds, spent = limit_of(part), _spent.get(part, 0.0)
        note = "  over budget" if spent > seconds else ""
        lines.append(f"{part:<28}{seconds:>7.0f}s{spent:>7.0f}s{note}")
    slow = {name: s for name, s in _tests.items() if s > _TEST}
    lines += [f"over {_TEST:.0f} s: {s:.0f}s {name}" for name, s in sorted(slow.items())]
    return lines


def broken() -> list[str]:
    """The parts that took so long that the run fails."""
    return [part for part, spent in _spent.items() if spent > _FAILS * limit_of(part)]
