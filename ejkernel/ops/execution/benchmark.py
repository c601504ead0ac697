"""The only timer: device time of a function, as the median of repeated calls."""

import contextlib
import contextvars
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

# Short calls are enqueued together, so that the host's share of each disappears; to wait for a GPU
# costs about 0.1 ms.
_BATCH_MS = {"cpu": 2.0}
_BATCH_MS_ELSEWHERE = 10.0
_MOST_IN_A_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, and the spread between the quartiles."""

    median: float
    spread: float
    calls: int


class OverBudget(Exception):
    """The tuning run that a step belongs to has used up its budget."""


class Stopwatch:
    """Seconds left of a budget."""

    def __init__(self, budget_s: float):
        self._end = time.perf_counter() + budget_s

    @property
    def left(self) -> float:
        return max(self._end - time.perf_counter(), 0.0)

    @property
    def over(self) -> bool:
        return self.left == 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Makes this the budget that `look` asks, for what runs inside."""
        token = _budget.set(self)
        try:
            yield
        finally:
            _budget.reset(token)


_budget: contextvars.ContextVar[Stopwatch | None] = contextvars.ContextVar("budget", default=None)


def _over() -> bool:
    budget = _budget.get()
    return budget is not None and budget.over


def look() -> None:
    """Raises `OverBudget` where a tuning run has no time left; called before each long step."""
    if _over():
        raise OverBudget


def measure(
    fn: Callable[[], Any],
    *,
    num_warmup: int = 1,
    num_iters: int = 10,
    budget_s: float | None = None,
    give_up_ms: float | None = None,
    together_ms: float | None = None,
) -> Timing:
    """Times `fn()` until its results are ready.

    Args:
      fn: The call; its results are waited for.
      num_warmup: Calls before the clock starts; the first one compiles. None are made once the
        budget of the tuning run around this is used up.
      num_iters: Timed calls, or batches of short ones.
      budget_s: Stop when this many seconds are used up.
      give_up_ms: Stop after the first call that takes longer.
      together_ms: How long calls enqueued together should take; None for what suits the backend.
    """
    for _ in range(num_warmup):
        if not _over():
            jax.block_until_ready(fn())
    watch = Stopwatch(float("inf") if budget_s is None else budget_s)
    first = _timed(fn, 1)
    if together_ms is None:
        together_ms = _BATCH_MS.get(jax.default_backend(), _BATCH_MS_ELSEWHERE)
    batch = max(1, min(_MOST_IN_A_BATCH, int(together_ms / max(first, 1e-3))))
    spent = lambda: watch.over or _over()
    times = [first] if batch == 1 or spent() else []
    # one slow sample may be a hiccup of the machine
    slow = give_up_ms is not None and first > give_up_ms and not spent()
    slow = slow and _timed(fn, 1) > (give_up_ms or 0.0)
    while len(times) < max(num_iters, 1) and not (times and (slow or spent())):
        times.append(_timed(fn, batch))
    times.sort()
    quarter = len(times) // 4
    return Timing(statistics.median(times), times[-1 - quarter] - times[quarter], len(times))


def _timed(fn: Callable[[], Any], count: int) -> float:
    """Milliseconds a call, of `count` calls enqueued one after another."""
    start = time.perf_counter()
    for _ in range(count):
        result = fn()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) * 1e3 / count


def benchmark(fn: Callable[[], Any], *, num_warmup: int = 1, num_iters: int = 10) -> float:
    """The median time of `fn()` in milliseconds, with its results ready."""
    return measure(fn, num_warmup=max(num_warmup, 1), num_iters=num_iters).median
