"""One row of results: its programs are found, checked, compiled and timed."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _device
from ejkernel.bench import _bars, _check, _peers, _programs, _results
from ejkernel.bench._programs import Call
from ejkernel.bench._results import OURS, Program, Row
from ejkernel.bench._workloads import AUTO, EAGER, MEMORY, TIME, Peer
from ejkernel.ops.execution import benchmark
from ejkernel.ops.execution.executor import default_executor

Run = Callable[[], Any]


_MORE_ROUNDS = 3  # times as many where a bar is missed, since a program may differ from itself


class DeviceLostError(RuntimeError):
    """A program failed, and the device does not answer since."""


@dataclasses.dataclass(eq=False)
class RowInTheMaking:
    """One row in the making: who can run the call, whose numbers are right, how long each takes.

    `wrong` is what the oracle said of each entry, shared by the modes of a workload.
    """

    run: Any  # of `_runner`
    call: Call
    mode: str
    wrong: dict[str, str | None]
    programs: list[Program] = dataclasses.field(default_factory=list)
    runs: dict[str, Run] = dataclasses.field(default_factory=dict)
    repeats: dict[str, int] = dataclasses.field(default_factory=dict)  # calls in a run, if many
    expected: Any = None
    auto: str = ""

    def measure(self) -> Row:
        """The row; a program that fails at any point has the reason in place of a number."""
        call, workload = self.call, self.call.workload
        self._add_ours()
        for peer in _peers.of(workload, self.run.kind, self.run.options.peers):
            self._add_peer(peer)
        self._add_public()
        if workload.quantity == TIME:
            self._say("timing")
            self._fill(self._rounds(self.runs))
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
        again = lambda names: self._rounds({n: self.runs[n] for n in names}, _MORE_ROUNDS)
        _bars.within(row, workload, again if workload.quantity == TIME else None)
        return row

    def _rounds(self, runs: dict[str, Run], times_as_many: int = 1) -> dict[str, list[float]]:
        """Milliseconds of one call; a program that fails now has none, and the reason."""
        times, failed = self.run.rounds(runs, times_as_many)
        for program in self.programs:
            if program.name in failed:
                program.failed = failed[program.name]
                program.median = program.spread = None
                self._look_at_device(program)
        return {n: [t / self.repeats.get(n, 1) for t in some] for n, some in times.items()}

    def _say(self, what: str) -> None:
        workload = self.call.workload
        self.run.progress.step(f"{workload.op}, {workload.name}, {self.mode}: {what}")

    def _begin(self, record: Program) -> bool:
        """Adds a program; False when an earlier process ended with it."""
        self.programs.append(record)
        record.failed = self.run.begin(record.name) or ""
        if not record.failed:
            self._say(f"checking {record.name}")
        return not record.failed

    def _look_at_device(self, record: Program) -> None:
        """Ends this process where a program that failed took the device with it."""
        if record.failed and self.run.kind != "cpu" and not _answers():
            raise DeviceLostError(record.failed)

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
        record = Program(entry.name, OURS, version=entry.version)
        if not self._begin(record):
            return None
        try:
            self._tune(str(entry.platform))
            record.failed = self._oracle(entry) or ""
            if record.failed:
                return None
            ours = _programs.of_entry(self.call, entry, self.mode)
            record.config = ours.config()
            record.failed = self._build(ours.name, ours.fn) or ""
        except Exception as error:  # noqa: BLE001 - a kernel may fail in any way; its row says how
            record.failed = short(error)
        self._look_at_device(record)
        return None if record.failed else ours

    def _oracle(self, entry: Any) -> str | None:
        """What the oracle says, once for all modes of a workload."""
        if entry.name not in self.wrong:
            mode, chosen = _programs.checked(self.call, entry)
            said = _check.against_oracle(self.call, entry, mode, _device.find(), chosen)
            self.wrong[entry.name] = None if said is None else f"wrong: {said}"
        return self.wrong[entry.name]

    def _tune(self, platform: str) -> None:
        if not self.run.options.tune_s:
            return
        chooser = default_executor().chooser
        for direction, inv in _programs.invocations(self.call, self.mode, platform).items():
            self._say(f"tuning {platform} {direction}")
            left = min(self.run.options.tune_s, self.run.budget.left)
            chooser.tune(inv, budget_s=left)

    def _add_auto(self, working: Sequence[Any]) -> None:
        """What "auto" runs; it is timed apart only where that is no program of an entry."""
        self.run.begin(AUTO)
        self._tune(AUTO)
        auto = _programs.of_auto(self.call, self.mode)
        if (same := _programs.stand_in(auto, working)) is not None:
            self.auto = same.name
            return
        self.auto = AUTO
        record = Program(AUTO, OURS, config=auto.config())
        record.note = "runs " + ", ".join(c.implementation.name for c in auto.choices.values())
        if not self._begin(record):
            return
        try:
            record.failed = self._build(AUTO, auto.fn) or ""
        except Exception as error:  # noqa: BLE001 - a kernel may fail in any way; its row says how
            record.failed = short(error)
        self._look_at_device(record)

    def _build(self, name: str, fn: Callable[..., Any], peer: Peer | None = None) -> str | None:
        """Compiles a program and compares what it gives; why it is not timed, or None."""
        quantity = self.call.workload.quantity
        if quantity == MEMORY:
            record = next(p for p in self.programs if p.name == name)
            analysis = self._program(name, self.call.without_data(), fn).compile().memory_analysis()
            record.median = float(analysis.temp_size_in_bytes)
            return None
        call = self.call.prepared(peer)
        run = self._program(name, call, fn)
        if (reason := self._compare(run(), peer)) is not None:
            return reason
        if quantity == EAGER:
            record = next(p for p in self.programs if p.name == name)
            record.median = _eager(self.call, fn, run)
            return None
        *_, timed = _programs.kinds(call, self.mode, peer)
        if timed != _programs.PURE:
            run = self._program(name, call, fn, timed)
            self.repeats[name] = call.workload.repeats
        self.runs[name] = run
        return None

    def _program(
        self, name: str, call: Call, fn: Callable[..., Any], kind: str = _programs.PURE
    ) -> _programs.Runnable:
        """A program, with what was compiled of it before this row."""
        made = _programs.program(call, fn, self.mode, kind)
        return self.run.ahead.take((call.workload, self.mode, name, kind), made)

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

    def _add_peer(self, peer: Peer) -> None:
        compared = self.expected is not None or self.call.workload.quantity == MEMORY
        if self.mode not in peer.modes or not compared:
            return
        record = Program(peer.name, same_work=peer.same_work)
        try:
            if peer.why_not(self.call.values) is not None:  # a call that is not its business
                return
            if not self._begin(record):
                return
            record.note = "" if peer.agrees else "its numbers are not compared"
            if peer.run is not None:
                record.failed = self._build(peer.name, peer.run, peer) or ""
            else:
                record.failed = self._build_foreign(peer, record) or ""
        except Exception as error:  # noqa: BLE001 - another library's failure is a result
            record.failed = short(error)
        self._look_at_device(record)

    def _build_foreign(self, peer: Peer, record: Program) -> str | None:
        """A program of another framework, whose results tell their arrays."""
        assert peer.build is not None
        call = self.call
        run = peer.build(call.values, call.grads, self.mode, call.cotangent)
        result = run()
        jax.block_until_ready(result)
        if peer.agrees and (reason := self._compare(result.arrays(), peer)) is not None:
            return reason
        notes = (record.note, getattr(run, "note", ""))
        record.note = "; ".join(text for text in notes if text)
        self.runs[peer.name] = run
        return None

    def _add_public(self) -> None:
        public = self.run.public
        if public is None or not self.runs or public.why_not(self.call) is not None:
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


def _answers() -> bool:
    """Whether the device still computes; an invalid access ends it for the whole process."""
    try:
        return int(jnp.arange(8).sum()) == 28
    except RuntimeError:  # of JAX, whatever it says
        return False


def _spread(times: Sequence[float]) -> float:
    """The range between the quartiles."""
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return ordered[-1 - quarter] - ordered[quarter]


def short(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:240]
