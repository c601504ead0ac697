"""Runs workloads: numbers are checked, then all programs are timed in shuffled rounds."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from ejkernel import _device
from ejkernel.bench import _bars, _peers_torch, _results
from ejkernel.bench._ahead import Ahead
from ejkernel.bench._programs import Call
from ejkernel.bench._public import Public
from ejkernel.bench._results import Ceiling, Document, Row
from ejkernel.bench._row import DeviceLostError, RowInTheMaking, Run, short
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
    threads: int = 0  # that compile all programs before the first row; 0: each in its row
    budget_s: float = float("inf")  # no row is begun after so many seconds
    resume: Document | None = None  # rows that are there already
    # why programs are not tried: by op, workload, mode and program. "" as the program stands for
    # the whole row, "" as workload and mode for all rows of the op.
    given_up: Mapping[tuple[str, str, str, str], str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.threads and self.tune_s:
            raise ValueError(f"`threads={self.threads}` compiles before tuning chooses: give one.")


class Progress:
    """What a run tells while it works; a subclass shows it."""

    def start(self, total: int) -> None:
        """Says how many rows there will be."""

    def step(self, text: str) -> None:
        """Says what is done now."""

    def begin(self, op: str, workload: str, mode: str, program: str) -> None:
        """Says which program is compiled, checked or timed now, in case it ends the process."""

    def ahead(self, compiled: int, failed: int) -> None:
        """Says how many programs were compiled before the first row, and how many were not."""

    def lost(self, reason: str) -> None:
        """Says why this process cannot go on."""

    def done(self, row: Row) -> None:
        """Gives a finished row."""

    def left(self, count: int) -> None:
        """Says how many rows there was no time for."""


def run(
    workloads: Sequence[Workload],
    options: Options,
    progress: Progress | None = None,
    save: Callable[[Document], None] = lambda document: None,
) -> Document:
    """Measures workloads; `save` is given the document after every row."""
    made = _Run(options, progress or Progress(), _results.continued(options.resume), save)
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
    budget: benchmark.Stopwatch = dataclasses.field(init=False)
    ahead: Ahead = dataclasses.field(default_factory=Ahead)
    here: tuple[str, str, str] = ("", "", "")  # the row: op, workload and mode
    left: int = 0  # rows without time

    def __post_init__(self) -> None:
        self.rng = random.Random(self.options.seed)
        self.budget = benchmark.Stopwatch(self.options.budget_s)

    def all(self, workloads: Sequence[Workload]) -> Document:
        modes = [self._modes(workload) for workload in workloads]
        self.progress.start(sum(map(len, modes)))
        self.save(self.document)  # what is wrong with the place is known before anything runs
        self.ahead.compile(self, list(zip(workloads, modes, strict=True)))
        if self.options.public:
            self.public = Public(self.options.public)
            self.document.versions["public ejkernel"] = self.public.version
        try:
            seen: set[tuple[str, str]] = set()
            for workload, some in zip(workloads, modes, strict=True):
                if self.budget.over:
                    self.left += len(some)
                    continue
                if some and (workload.op, workload.dtype) not in seen:
                    seen.add((workload.op, workload.dtype))
                    self._ceilings(workload.dtype)
                self._workload(workload, some)
        except DeviceLostError as error:
            self.progress.lost(str(error))
            raise
        finally:
            if self.public is not None:
                self.public.close()
        if self.left:
            self.progress.left(self.left)
        return self.document

    def _modes(self, workload: Workload) -> list[str]:
        """The modes to measure; an op without gradients has no backward."""
        gradients = bool(kernel_registry.spec(workload.op).differentiable)
        asked = [mode for mode in workload.modes if mode in self.options.modes]
        unit, done = workload.quantity, {row.key for row in self.document.rows}
        asked = [m for m in asked if (workload.op, workload.name, m, unit) not in done]
        return [mode for mode in asked if mode == FWD or gradients]

    def _workload(self, workload: Workload, modes: Sequence[str]) -> None:
        if len(jax.devices()) < workload.devices:
            self._note(f"{workload.op}, {workload.name}: needs {workload.devices} devices")
            return
        if not modes:
            return
        self.progress.step(f"{workload.op}, {workload.name}: inputs")
        self.here = (workload.op, workload.name, modes[0])
        reasons = {mode: self.given_up(workload, mode) for mode in modes}
        call = None if all(reasons.values()) else self._call(workload)
        wrong: dict[str, str | None] = {}
        for mode in modes:
            if self.budget.over:
                self.left += 1
                continue
            self.here = (workload.op, workload.name, mode)
            row = Row(workload.op, workload.name, mode, workload.dtype, [], unit=workload.quantity)
            if call is not None and reasons[mode] is None:
                row = RowInTheMaking(self, call, mode, wrong).measure()
            elif reasons[mode] is not None:
                self._note(f"{', '.join(self.here)}: {reasons[mode]}")
            self._finish(workload, row)

    def _call(self, workload: Workload) -> Call | None:
        """The inputs of a workload; None, and a note, where there is no room for them."""
        self.begin("")
        try:
            return Call.of(workload)
        except RuntimeError as error:  # of JAX, when the memory is used up
            self._note(f"{workload.op}, {workload.name}: {short(error)}")
            return None

    def _note(self, text: str) -> None:
        if text not in self.document.notes:  # of a run that is resumed
            self.document.notes.append(text)

    def _finish(self, workload: Workload, row: Row) -> None:
        self.document.rows.append(row)
        _results.fill_rates(self.document)
        _bars.across(self.document, workload, row)
        self.progress.done(row)
        self.save(self.document)
        _peers_torch.release()

    def begin(self, program: str) -> str | None:
        """Says which program comes now; why not, if an earlier process ended with it."""
        self.progress.begin(*self.here, program)
        return self._given_up(*self.here, program)

    def given_up(self, workload: Workload, mode: str, program: str = "") -> str | None:
        """Why a program, or a whole row, is not tried."""
        return self._given_up(workload.op, workload.name, mode, program)

    def _given_up(self, op: str, workload: str, mode: str, program: str) -> str | None:
        given_up = self.options.given_up
        return given_up.get((op, workload, mode, program), given_up.get((op, "", "", program)))

    def _ceilings(self, dtype: str) -> None:
        """A matrix product and a copy, again with every op; the best of all rounds counts."""
        self.progress.step(f"ceilings of {dtype}: a matrix product and a copy")
        self.here = ("", f"ceilings of {dtype}", "")
        n = _MATMUL.get(self.kind, _MATMUL_ELSEWHERE)
        a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.float32) for i in (0, 1))
        a, b = (x.astype(dtype) for x in (a, b))
        x = jnp.ones(_COPY.get(self.kind, _COPY_ELSEWHERE), jnp.float32)
        product, copy = jax.jit(jnp.dot), jax.jit(jnp.copy)
        runs = {"matmul": lambda: product(a, b), "copy": lambda: copy(x)}
        times, failed = self.rounds(runs, _CEILING_ROUNDS)
        if failed:
            raise DeviceLostError(f"no ceiling can be measured: {failed}")
        self._raise_ceiling("matmul", dtype, 2 * n**3 / min(times["matmul"]) / 1e9, "TFLOP/s")
        self._raise_ceiling("copy", dtype, 2 * x.nbytes / min(times["copy"]) / 1e6, "GB/s")

    def _raise_ceiling(self, name: str, dtype: str, rate: float, unit: str) -> None:
        found = [c for c in self.document.ceilings if (c.name, c.dtype) == (name, dtype)]
        if found:
            found[0].rate = max(found[0].rate, rate)
        else:
            self.document.ceilings.append(Ceiling(name, dtype, rate, unit))

    def rounds(
        self, runs: dict[str, Run], times_as_many: int = 1
    ) -> tuple[dict[str, list[float]], dict[str, str]]:
        """Milliseconds of each program in each round, and why some failed.

        The order is another one every time.
        """
        times: dict[str, list[float]] = {name: [] for name in runs}
        failed: dict[str, str] = {}
        clock = benchmark.Stopwatch(self.options.seconds * times_as_many)
        order, rounds = list(runs.items()), self.options.rounds * times_as_many
        for turn in range(max(rounds, 1)):
            if clock.over and turn >= min(_LEAST_ROUNDS, rounds):
                break
            self.rng.shuffle(order)
            for name, run in [one for one in order if one[0] not in failed]:
                self.progress.begin(*self.here, name)
                try:
                    times[name].append(self._time(name, run, first=turn == 0))
                except Exception as error:  # noqa: BLE001 - it may fail in any way; its row says how
                    failed[name] = short(error)
        return {name: some for name, some in times.items() if name not in failed}, failed

    def _time(self, name: str, run: Run, first: bool) -> float:
        if self.public is not None and name.startswith("public"):
            return run()
        together = None if self.kind == "cpu" else _TOGETHER_MS
        warmup = 1 if first else 0
        return benchmark.measure(
            run, num_warmup=warmup, num_iters=2, budget_s=2.0, together_ms=together
        ).median
