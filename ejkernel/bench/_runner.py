"""Runs workloads: numbers are checked, then all programs are timed in shuffled rounds."""

import dataclasses
import random
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ejkernel import _device
from ejkernel.bench import _bars, _results
from ejkernel.bench._programs import Call
from ejkernel.bench._public import Public
from ejkernel.bench._results import Ceiling, Document, Row
from ejkernel.bench._row import RowInTheMaking, Run
from ejkernel.bench._workloads import BOTH, FWD, Workload
from ejkernel.kernels import kernel_registry
from ejkernel.ops import policy_override
from ejkernel.ops.execution import benchmark

# Calls are enqueued together for this long on a device, so that waiting for it does not show.
_TOGETHER_MS = 25.0
_LEAST_ROUNDS = 3
_CEILING_ROUNDS = 3  # times as many as for a row: a ceiling is the best of its rounds
# Rows of the square matrices, and float32 numbers of the copy, of the ceilings. A larger copy on a
# CPU measures how fast the system hands out fresh memory.
_MATMUL, _MATMUL_ELSEWHERE = {"cpu": 1024}, 8192
_COPY, _COPY_ELSEWHERE = {"cpu": 1 << 20}, 1 << 29


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure."""

    rounds: int = 5
    seconds: float = 3.0  # that the rounds of one row may take
    modes: tuple[str, ...] = (FWD, BOTH)
    entries: tuple[str, ...] | None = None  # None: all that serve the call
    peers: tuple[str, ...] | None = None  # None: all that are installed
    public: str = ""  # a folder with the public package of our name
    tune_s: float = 0.0  # seconds of tuning for each kernel and direction before it is timed
    seed: int = 0


class Progress:
    """What a run tells while it works; a subclass shows it."""

    def start(self, total: int) -> None:
        """Says how many rows there will be."""

    def step(self, text: str) -> None:
        """Says what is done now."""

    def done(self, row: Row) -> None:
        """Gives a finished row."""


def run(
    workloads: Sequence[Workload],
    options: Options,
    progress: Progress | None = None,
    save: Callable[[Document], None] = lambda document: None,
) -> Document:
    """Measures workloads; `save` is given the document after every row."""
    made = _Run(options, progress or Progress(), _results.new([]), save)
    with policy_override(autotune=False):  # a call is tuned before its rounds, or not at all
        return made.all(workloads)


@dataclasses.dataclass(eq=False)
class _Run:
    options: Options
    progress: Progress
    document: Document
    save: Callable[[Document], None]
    public: Public | None = None
    kind: str = dataclasses.field(default_factory=_device.device_kind)
    rng: random.Random = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.options.seed)

    def all(self, workloads: Sequence[Workload]) -> Document:
        modes = [self._modes(workload) for workload in workloads]
        self.progress.start(sum(map(len, modes)))
        if self.options.public:
            self.public = Public(self.options.public)
            self.document.versions["public ejkernel"] = self.public.version
        try:
            seen: set[tuple[str, str]] = set()
            for workload, some in zip(workloads, modes, strict=True):
                if some and (workload.op, workload.dtype) not in seen:
                    seen.add((workload.op, workload.dtype))
                    self._ceilings(workload.dtype)
                self._workload(workload, some)
        finally:
            if self.public is not None:
                self.public.close()
        return self.document

    def _modes(self, workload: Workload) -> list[str]:
        """The modes to measure; an op without gradients has no backward."""
        gradients = bool(kernel_registry.spec(workload.op).differentiable)
        asked = [mode for mode in workload.modes if mode in self.options.modes]
        return [mode for mode in asked if mode == FWD or gradients]

    def _workload(self, workload: Workload, modes: Sequence[str]) -> None:
        if len(jax.devices()) < workload.devices:
            self.document.notes.append(
                f"{workload.op}, {workload.name}: needs {workload.devices} devices"
            )
            return
        self.progress.step(f"{workload.op}, {workload.name}: inputs")
        call = Call.of(workload)
        wrong: dict[str, str | None] = {}
        for mode in modes:
            row = RowInTheMaking(self, call, mode, wrong).measure()
            self.document.rows.append(row)
            _results.fill_rates(self.document)
            _bars.across(self.document, workload, row)
            self.progress.done(row)
            self.save(self.document)

    def _ceilings(self, dtype: str) -> None:
        """A matrix product and a copy, again with every op; the best of all rounds counts."""
        self.progress.step(f"ceilings of {dtype}: a matrix product and a copy")
        n = _MATMUL.get(self.kind, _MATMUL_ELSEWHERE)
        a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.float32) for i in (0, 1))
        a, b = (x.astype(dtype) for x in (a, b))
        x = jnp.ones(_COPY.get(self.kind, _COPY_ELSEWHERE), jnp.float32)
        product, copy = jax.jit(jnp.dot), jax.jit(jnp.copy)
        runs = {"matmul": lambda: product(a, b), "copy": lambda: copy(x)}
        times = self.rounds(runs, _CEILING_ROUNDS)
        self._raise_ceiling("matmul", dtype, 2 * n**3 / min(times["matmul"]) / 1e9, "TFLOP/s")
        self._raise_ceiling("copy", dtype, 2 * x.nbytes / min(times["copy"]) / 1e6, "GB/s")

    def _raise_ceiling(self, name: str, dtype: str, rate: float, unit: str) -> None:
        found = [c for c in self.document.ceilings if (c.name, c.dtype) == (name, dtype)]
        if found:
            found[0].rate = max(found[0].rate, rate)
        else:
            self.document.ceilings.append(Ceiling(name, dtype, rate, unit))

    def rounds(self, runs: dict[str, Run], times_as_many: int = 1) -> dict[str, list[float]]:
        """Milliseconds of each program in each round; the order is another one every time."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        clock = benchmark.Stopwatch(self.options.seconds * times_as_many)
        order, rounds = list(runs.items()), self.options.rounds * times_as_many
        for turn in range(max(rounds, 1)):
            if clock.over and turn >= min(_LEAST_ROUNDS, rounds):
                break
            self.rng.shuffle(order)
            for name, run in order:
                times[name].append(self._time(name, run, first=turn == 0))
        return times

    def _time(self, name: str, run: Run, first: bool) -> float:
        if self.public is not None and name.startswith("public"):
            return run()
        together = None if self.kind == "cpu" else _TOGETHER_MS
        warmup = 1 if first else 0
        return benchmark.measure(
            run, num_warmup=warmup, num_iters=2, budget_s=2.0, together_ms=together
        ).median
