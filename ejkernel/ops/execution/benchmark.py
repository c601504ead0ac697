"""The only timer: device time of a function, as the median of repeated calls."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, and the spread between the quartiles."""

    median: float
    spread: float
    calls: int


def measure(
    fn: Callable[[], Any],
    *,
    num_warmup: int = 1,
    num_iters: int = 10,
    budget_s: float | None = None,
) -> Timing:
    """Times `fn()` until its results are ready; stops early when the budget is used up."""
    for _ in range(max(num_warmup, 1)):
        jax.block_until_ready(fn())
    times = []
    begin = time.perf_counter()
    for _ in range(max(num_iters, 1)):
        start = time.perf_counter()
        jax.block_until_ready(fn())
        now = time.perf_counter()
        times.append((now - start) * 1e3)
        if budget_s is not None and now - begin > budget_s:
            break
    times.sort()
    quarter = len(times) // 4
    return Timing(statistics.median(times), times[-1 - quarter] - times[quarter], len(times))


def benchmark(fn: Callable[[], Any], *, num_warmup: int = 1, num_iters: int = 10) -> float:
    """The median time of `fn()` in milliseconds, with its results ready."""
    return measure(fn, num_warmup=num_warmup, num_iters=num_iters).median
