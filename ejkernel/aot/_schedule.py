"""Cycles of a TPU kernel from the schedule that libtpu writes down.

A bundle is a cycle when nothing stalls. Each is weighed by the trip counts of the loops around it
and by how often the branches around it are taken; how often, where the schedule does not tell, is
`control`, in the program's order. Stalls on copies are not counted.
"""

import dataclasses
import re
from collections.abc import Sequence

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*(?:>\s*)*\{(.*)$")
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel \((!?)(%\w+)\) target = \$region(\d+)")
_NEAR = 8  # bundles in the shadow of a branch, at most


@dataclasses.dataclass(frozen=True)
class Control:
    """A loop or a branch of a kernel: mean trips, or the share of times that it is entered."""

    kind: str  # "loop" or "branch"
    mean: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a schedule costs."""

    cycles: float
    exact: bool  # every loop and branch was weighed
    mxu_share: float | None
    vpu_share: float | None
    steps: int  # of the grid, on one core


@dataclasses.dataclass
class _Span:
    """Bundles of a loop, or those that a branch jumps over."""

    start: int
    end: int  # the first after it
    trips: float | None  # None: not in the schedule
    branch: int  # the bundle that jumps


def read(
    bundles: str,
    utilization: str,
    control: Sequence[Control] | None = None,
    grid_steps: int | None = None,
) -> Schedule:
    """Weighs a schedule.

    Args:
      bundles: Text of `*-final_bundles.txt`.
      utilization: Text of `*-final_hlo-static-per-bundle-utilization.txt`, or nothing.
      control: Loops with bounds from data, and branches; None when nobody knows.
      grid_steps: Steps of the kernel's grid.
    """
    lines = [match for line in bundles.splitlines() if (match := _BUNDLE.match(line))]
    labels, texts = [m[1] for m in lines], [m[2] for m in lines]
    loops, skips = _spans(labels, texts)
    grid, pipelined = _grid_loop(loops, grid_steps)
    branches = _branches(loops, skips, pipelined)
    counted = [loop for loop in loops if loop.trips is None]
    exact = _fill("loop", counted, control)
    exact &= _fill("branch", branches, control) or _fill_between(counted, branches, control)
    weights = [1.0] * len(texts)
    for span in (*loops, *branches):
        for i in range(span.start, span.end):
            weights[i] *= 1.0 if span.trips is None else span.trips
    shares = _shares(utilization, weights)
    steps = int(grid.trips) if grid is not None and grid.trips is not None else 1
    return Schedule(sum(weights), exact, *shares, steps)


def _spans(labels: list[str | None], texts: list[str]) -> tuple[list[_Span], list[_Span]]:
    """Loops by their start, and forward branches."""
    starts: dict[str, int] = {}
    for i, text in enumerate(texts):
        for region in _STARTS.findall(text):
            starts.setdefault(region, i)
    loops, skips = [], []
    for i, text in enumerate(texts):
        for branch in _BRANCH.finditer(text):
            if (target := starts.get(branch[3])) is None:
                continue
            shadow = _shadow(labels, texts, i)
            if target <= i:
                loops.append(_Span(target, shadow, _trips(texts[target : i + 1], branch[2]), i))
            elif target > shadow:
                skips.append(_Span(shadow, target, None, i))
    return sorted(loops, key=lambda loop: (loop.start, -loop.end)), skips


def _shadow(labels: list[str | None], texts: list[str], branch: int) -> int:
    """The first bundle after a branch that runs only when it is not taken."""
    for i in range(branch + 1, min(branch + _NEAR, len(texts))):
        if labels[i] or "Start region" in texts[i]:
            return i
        if not texts[i].startswith("}"):
            continue
        if "End region" in texts[i]:
            return i + 1
    return min(branch + 1, len(texts))


def _trips(body: list[str], predicate: str) -> float | None:
    """The trip count of a loop whose exit test is against a number."""
    text = "\n".join(body)
    test = rf"{re.escape(predicate)} = scmp\.ge\.s32\.totalorder (%\w+), (\d+)\b"
    if (found := re.search(test, text)) is None:
        return None
    step = re.search(rf"{re.escape(found[1])} = sadd\.s32 (\d+), %\w+", text)
    return -(-int(found[2]) // max(int(step[1]), 1)) if step else int(found[2])


def _grid_loop(loops: list[_Span], steps: int | None) -> tuple[_Span | None, bool]:
    """The loop over the grid, its trips those that compute, and whether it is pipelined.

    The first and the last round of a pipelined one only copy. Where two cores share the grid, each
    has half of it.
    """
    if not loops or steps is None or steps == 1 or loops[0].trips is None:
        return None, False
    loop = loops[0]
    for cores in (1, 2):
        mine = -(-steps // cores)
        if loop.trips in (mine, mine + 1, mine + 2):
            pipelined, loop.trips = loop.trips != mine, mine
            return loop, pipelined
    return None, False


def _branches(loops: list[_Span], skips: list[_Span], pipelined: bool) -> list[_Span]:
    """The branches of the kernel itself, without those that guard loops and the pipeline."""
    made = []
    for skip in skips:
        # a loop whose trips are known runs at least once, and needs no guard
        inner = [p for p in loops if skip.start <= p.start and p.end <= skip.end and not p.trips]
        if not any(p.start - skip.branch <= _NEAR and skip.end - p.end <= _NEAR for p in inner):
            made.append(skip)
    # the first one around everything else is the round without a block to compute
    around = lambda skip, other: skip.start <= other.start and other.end <= skip.end
    rest = [*loops[1:], *made[1:]]
    if pipelined and made and all(around(made[0], other) for other in rest):
        return made[1:]
    return made


def _fill(kind: str, spans: list[_Span], control: Sequence[Control] | None) -> bool:
    """Gives spans their means; False where they do not correspond.

    A branch that is always or never entered may be none in the schedule.
    """
    if not spans:
        return True
    means = [c.mean for c in control or () if c.kind == kind]
    for some in (means, [mean for mean in means if kind == "loop" or 0.0 < mean < 1.0]):
        if len(some) == len(spans):
            for span, mean in zip(spans, some, strict=True):
                span.trips = mean
            return True
    return False


def _fill_between(
    loops: list[_Span], branches: list[_Span], control: Sequence[Control] | None
) -> bool:
    """Gives branches their means, loop by loop: those between two loops' starts correspond.

    Where the schedule has fewer, the missing ones are always or never entered. False where it
    matters which ones these are.
    """
    means: list[list[float]] = [[]]
    for one in control or ():
        if one.kind == "loop":
            means.append([])
        else:
            means[-1].append(one.mean)
    spans: list[list[_Span]] = [[] for _ in range(len(loops) + 1)]
    for span in sorted(branches, key=lambda span: (span.start, -span.end)):
        spans[sum(loop.start <= span.start for loop in loops)].append(span)
    if len(means) != len(spans):
        return False
    for some, known in zip(spans, means, strict=True):
        certain = [mean for mean in known if mean in (0.0, 1.0)]
        missing = len(known) - len(some)
        alike = len(set(certain)) == 1 or missing == len(certain)
        if not 0 <= missing <= len(certain) or (missing and not alike):
            return False
        left = list(known)
        for mean in certain[:missing]:
            left.remove(mean)
        for span, mean in zip(some, left, strict=True):
            span.trips = mean
    return True


def _shares(text: str, weights: list[float]) -> tuple[float | None, float | None]:
    """Shares of the slots for matrix products and for vectors that are in use."""
    lines = text.splitlines()
    heads = ("MATMUL,", "MXU,")  # the name changed between versions of libtpu
    head = next((i for i, line in enumerate(lines) if line.startswith(heads)), None)
    if head is None:
        return None, None
    names = [name.strip() for name in lines[head].split(",")]
    rows = [
        [int(n) for n in line.split()] for line in lines[head + 1 :] if line[:1] in "0123456789 "
    ]
    rows = [row for row in rows if len(row) == len(names)]
    capacity, used = rows[0], rows[1:]
    made: list[float | None] = []
    for name in (names[0], "VALU"):
        i = names.index(name)
        total = sum(row[i] * weight for row, weight in zip(used, weights, strict=False))
        made.append(total / (capacity[i] * sum(weights)) if weights else None)
    return made[0], made[1]
