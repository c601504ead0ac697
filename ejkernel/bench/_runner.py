"""Runs workloads: numbers are checked, then all programs are timed in shuffled rounds."""

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _device
from ejkernel.bench import _bars, _check, _peers, _programs, _results
from ejkernel.bench._programs import Call
from ejkernel.bench._public import Public
from ejkernel.bench._results import OURS, Ceiling, Document, Program, Row
from ejkernel.bench._workloads import AUTO, BOTH, EAGER, FWD, MEMORY, TIME, Peer, Workload
from ejkernel.kernels import kernel_registry
from ejkernel.ops import policy_override
from ejkernel.ops.execution import benchmark
from ejkernel.ops.execution.executor import default_executor

Run = Callable[[], Any]
# Calls are enqueued together for this long on a device, so that waiting for it does not show.
_TOGETHER_MS = 25.0
_LEAST_ROUNDS = 3
_MORE_ROUNDS = 3  # times as many where a bar is missed, since a program may differ from itself
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
        modes = [[m for m in w.modes if m in self.options.modes] for w in workloads]
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
            row = _Row(self, call, mode, wrong).measure()
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
        times = self.rounds({"matmul": lambda: product(a, b), "copy": lambda: copy(x)})
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


@dataclasses.dataclass(eq=False)
class _Row:
    """One row in the making: who can run the call, whose numbers are right, how long each takes.

    `wrong` is what the oracle said of each entry, shared by the modes of a workload.
    """

    run: _Run
    call: Call
    mode: str
    wrong: dict[str, str | None]
    programs: list[Program] = dataclasses.field(default_factory=list)
    runs: dict[str, Run] = dataclasses.field(default_factory=dict)
    expected: Any = None
    auto: str = ""

    def measure(self) -> Row:
        call, workload = self.call, self.call.workload
        self._add_ours()
        for peer in self._peers():
            self._add_peer(peer)
        self._add_public()
        if workload.quantity == TIME:
            self._say("timing")
            self._fill(self.run.rounds(self.runs))
        flops, size = call.work(self.mode)
        row = Row(
            op=call.op,
            workload=workload.name,
            mode=self.mode,
            dtype=workload.dtype,
            programs=self.programs,
            shapes={n: _results.describe(x) for n, x in call.traced.items()},
            unit=workload.quantity,
            flops=flops,
            bytes=size,
            auto=self.auto,
        )
        again = lambda names: self.run.rounds({n: self.runs[n] for n in names}, _MORE_ROUNDS)
        _bars.within(row, workload, again if workload.quantity == TIME else None)
        return row

    def _say(self, what: str) -> None:
        workload = self.call.workload
        self.run.progress.step(f"{workload.op}, {workload.name}, {self.mode}: {what}")

    def _fill(self, times: dict[str, list[float]]) -> None:
        for program in self.programs:
            if some := times.get(program.name):
                program.median, program.rounds = statistics.median(some), len(some)
                program.spread = _spread(some)

    # Ours

    def _add_ours(self) -> None:
        found = list(_programs.entries(self.call, self.mode, self.run.options.entries))
        able = []
        for entry, reason in found:
            if reason is None:
                able.append(entry)
            else:
                self.programs.append(Program(entry.name, OURS, failed=f"refused: {reason}"))
        made = [self._entry(entry) for entry in able]
        working = [ours for ours in made if ours is not None]
        if self.run.options.entries is None and working:
            self._add_auto(working)

    def _entry(self, entry: Any) -> Any:
        """Checks and builds the program of an entry; None when it is not to be timed."""
        self._say(f"checking {entry.name}")
        record = Program(entry.name, OURS, version=entry.version)
        self.programs.append(record)
        try:
            self._tune(str(entry.platform))
            record.failed = self._oracle(entry) or ""
            if record.failed:
                return None
            ours = _programs.of_entry(self.call, entry, self.mode)
            record.config = ours.config()
            record.failed = self._build(ours.name, ours.fn) or ""
        except Exception as error:  # noqa: BLE001 - one kernel's failure is a result
            record.failed = _short(error)
        return None if record.failed else ours

    def _oracle(self, entry: Any) -> str | None:
        """What the oracle says, once for all modes of a workload."""
        if entry.name not in self.wrong:
            modes = self.call.workload.modes
            mode = BOTH if BOTH in modes and self._differentiates(entry) else FWD
            said = _check.against_oracle(self.call, entry, mode, _device.find())
            self.wrong[entry.name] = None if said is None else f"wrong: {said}"
        return self.wrong[entry.name]

    def _differentiates(self, entry: Any) -> bool:
        reasons = dict(_programs.entries(self.call, BOTH, (entry.name,)))
        return reasons.get(entry) is None and bool(
            kernel_registry.spec(self.call.op).differentiable
        )

    def _tune(self, platform: str) -> None:
        if not self.run.options.tune_s:
            return
        self._say(f"tuning {platform}")
        chooser = default_executor().chooser
        for inv in _programs.invocations(self.call, self.mode, platform).values():
            chooser.tune(inv, budget_s=self.run.options.tune_s)

    def _add_auto(self, working: Sequence[Any]) -> None:
        """What "auto" runs; it is timed apart only where that is no program of an entry."""
        self._tune(AUTO)
        auto = _programs.of_auto(self.call, self.mode)
        same = [ours for ours in working if auto.choices and ours.same_as(auto)]
        if same or len(working) == 1:
            self.auto = (same or working)[0].name
            return
        self.auto = AUTO
        record = Program(AUTO, OURS, config=auto.config())
        record.note = "runs " + ", ".join(c.implementation.name for c in auto.choices.values())
        record.failed = self._build(AUTO, auto.fn) or ""
        self.programs.append(record)

    def _build(self, name: str, fn: Callable[..., Any], peer: Peer | None = None) -> str | None:
        """Compiles a program and compares what it gives; why it is not timed, or None."""
        quantity = self.call.workload.quantity
        if quantity == MEMORY:
            record = next(p for p in self.programs if p.name == name)
            record.median = float(_programs.temporaries(self.call, fn, self.mode))
            return None
        call = self.call
        if peer is not None and peer.prepare is not None:
            call = dataclasses.replace(call, traced=call.traced | peer.prepare(call.values))
        run = _programs.pure(call, fn, self.mode)
        if (reason := self._compare(run(), peer)) is not None:
            return reason
        if quantity == EAGER:
            record = next(p for p in self.programs if p.name == name)
            record.median = _eager(self.call, fn, run)
            return None
        if kernel_registry.spec(self.call.op).written:
            run = _programs.in_place(self.call, fn, self.mode)
        self.runs[name] = run
        return None

    def _compare(self, actual: Any, peer: Peer | None) -> str | None:
        if self.expected is None:
            self.expected = actual  # an entry of ours, which the oracle has accepted
            return None
        if peer is not None and not peer.agrees:
            return None
        tolerance = None if peer is None else peer.tolerance
        said = _check.disagreement(actual, self.expected, tolerance)
        return None if said is None else f"disagrees with ours: {said}"

    # Peers

    def _peers(self) -> list[Peer]:
        workload, wanted = self.call.workload, self.run.options.peers
        found = [*workload.peers]
        if workload.known_peers:
            found += _peers.known(workload.op, self.run.kind)
        return [p for p in found if wanted is None or p.name in wanted]

    def _add_peer(self, peer: Peer) -> None:
        compared = self.expected is not None or self.call.workload.quantity == MEMORY
        if self.mode not in peer.modes or not compared:
            return
        record = Program(peer.name)
        self.programs.append(record)
        self._say(f"checking {peer.name}")
        try:
            if peer.why_not(self.call.values) is not None:
                self.programs.remove(record)  # a call that is not its business
                return
            if peer.run is not None:
                record.failed = self._build(peer.name, peer.run, peer) or ""
            else:
                record.failed = self._build_foreign(peer) or ""
            record.note = "" if peer.agrees else "computes something else: its time alone counts"
        except Exception as error:  # noqa: BLE001 - another library's failure is a result
            record.failed = _short(error)

    def _build_foreign(self, peer: Peer) -> str | None:
        """A program of another framework, whose results tell their arrays."""
        assert peer.build is not None
        call = self.call
        run = peer.build(call.values, call.grads, self.mode, call.cotangent)
        result = run()
        jax.block_until_ready(result)
        if peer.agrees and (reason := self._compare(result.arrays(), peer)) is not None:
            return reason
        self.runs[peer.name] = run
        return None

    def _add_public(self) -> None:
        public = self.run.public
        if public is None or self.call.op not in public.ops or not self.runs:
            return
        self._say("the public package")
        for name, failed in public.prepare(self.call, self.mode).items():
            note = "in a process of its own; its numbers are not compared"
            self.programs.append(Program(name, failed=failed, note=note))
            if not failed:
                self.runs[name] = lambda name=name, public=public: public.milliseconds(name)


def _eager(call: Call, fn: Callable[..., Any], jitted: Run) -> float:
    """Microseconds that an eager call costs over the same jitted call."""

    def cost(run: Run) -> float:
        def many() -> Any:
            for _ in range(200):
                out = run()
            return out

        return benchmark.measure(many, num_iters=20).median / 200 * 1e3

    return min(cost(lambda: fn(call.values)) - cost(jitted) for _ in range(3))


def _spread(times: Sequence[float]) -> float:
    """The range between the quartiles."""
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return ordered[-1 - quarter] - ordered[quarter]


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:240]
