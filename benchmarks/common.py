"""What the benchmark scripts share: agreement first, interleaved rounds, one table, one file."""

import argparse
import dataclasses
import datetime as dt
import importlib.metadata
import json
import pathlib
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel.ops import device_fingerprint, policy_override
from ejkernel.ops.execution.benchmark import measure

_RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A measurement beside a peer; `make()` gives our function, the peer's, and their arrays.

    `bar` is the least ratio peer / ours that we promise. `tolerance` is relative to the largest
    value of the peer's result.
    """

    label: str
    bar: float
    make: Callable[[], tuple[Callable[..., Any], Callable[..., Any], Sequence[Any]]]
    tolerance: float = 2e-5
    iterations: int = 5


def with_gradient(fn: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Forward and backward over the first `count` arguments; the last is the cotangent."""

    def both(*xs: Any) -> Any:
        *xs, cotangent = xs
        out, pull = jax.vjp(lambda *wanted: fn(*wanted, *xs[count:]), *xs[:count])
        return out, pull(cotangent)

    return both


def agree(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        limit = tolerance * max(float(jnp.abs(e).max()), 1e-30)
        np.testing.assert_allclose(a, e, rtol=0, atol=limit)


def temporaries(fn: Callable[..., Any], *xs: Any) -> int:
    """Temporary bytes that XLA reports, without running anything."""
    return jax.jit(fn).lower(*xs).compile().memory_analysis().temp_size_in_bytes


def time_pair(
    ours: Callable[..., Any],
    peer: Callable[..., Any],
    xs: Sequence[Any],
    rounds: int,
    iterations: int = 5,
    tolerance: float = 2e-5,
) -> dict[str, float]:
    """Medians of interleaved rounds, so that a slow moment of the machine hits both."""
    programs = {"ours": jax.jit(ours), "peer": jax.jit(peer)}
    agree(programs["ours"](*xs), programs["peer"](*xs), tolerance)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            once = lambda run=run: run(*xs)
            times[name].append(measure(once, num_iters=iterations, budget_s=4.0).median)
    return {name: float(np.median(values)) for name, values in times.items()}


def _peers() -> dict[str, str]:
    """Versions of what may have been compiled with or compared to."""
    found = {}
    for name in ("triton", "torch", "libtpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def save(name: str, shape: str, **content: Any) -> None:
    """Writes benchmarks/results/<name>.json with device and versions."""
    _RESULTS.mkdir(exist_ok=True)
    document = {
        "date": dt.date.today().isoformat(),
        "device": device_fingerprint(),
        "machine": platform.processor() or platform.machine(),
        "versions": versions(),
        "shape": shape,
        **content,
    }
    (_RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def versions() -> dict[str, str]:
    return {"jax": jax.__version__, "ejkernel": ejkernel.__version__} | _peers()


def load(name: str) -> dict[str, Any]:
    """What `save` wrote last; nothing where it never did."""
    path = _RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def options(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--only", default="", help="labels that contain this")
    return parser.parse_args()


def run(comparisons: Sequence[Comparison], chosen: argparse.Namespace) -> tuple[list[dict], list]:
    """Times each, prints a table; the rows, and the labels below their bar."""
    rows, failed = [], []
    width = max(len(c.label) for c in comparisons)
    print(f"{'':<{width}} {'peer ms':>10} {'ours ms':>10} {'ratio':>7} {'bar':>5}")
    for c in comparisons:
        if chosen.only not in c.label:
            continue
        ours, peer, xs = c.make()
        times = time_pair(ours, peer, xs, chosen.rounds, c.iterations, c.tolerance)
        ratio = times["peer"] / times["ours"]
        cells = f"{times['peer']:>10.2f} {times['ours']:>10.2f} {ratio:>7.2f} {c.bar:>5}"
        print(f"{c.label:<{width}} {cells}", flush=True)
        rows.append({"label": c.label, **times, "ratio": ratio, "bar": c.bar})
        failed += [c.label] if ratio < c.bar else []
    return rows, failed


def main(doc: str | None, name: str, shape: str, comparisons: Sequence[Comparison]) -> None:
    """A whole benchmark script; leaves with 1 when something is below its bar."""
    chosen = options(doc)
    with policy_override(autotune=False):  # what a call gets before anything was measured
        rows, failed = run(comparisons, chosen)
    if chosen.save:
        save(name, shape, rows=rows)
    if failed:
        print("below the bar: " + ", ".join(failed))
    sys.exit(1 if failed else 0)
