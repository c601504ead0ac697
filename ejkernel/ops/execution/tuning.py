"""Measures candidates of a call: right before fast, within a budget, never fatal."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ejkernel import _settings
from ejkernel.ops.config import policy as policies
from ejkernel.ops.config import table
from ejkernel.ops.config.cache import CUT_SHORT, Stored
from ejkernel.ops.core.kernel import Implementation, Invocation
from ejkernel.ops.execution import benchmark
from ejkernel.ops.execution.trial import Trial, name_of

logger = logging.getLogger("ejkernel")

_CPU_CANDIDATES = 4
# Candidates closer than this are equal; the fixed order decides.
_NOISE = 0.01
# The best and those within a tenth of it are measured again, in turns: a device's clock wanders.
# On a GPU 25 ms at a time: one call in a row of a few may find another clock than a long program.
_CLOSE, _FINALISTS, _ROUNDS, _SUSTAINED_MS = 0.1, 4, 3, 25.0

# among the failures of a run that did not come to its end
_ENDED = "the process ended while this was measured"
_ENDED_TWICE = f"{_ENDED}, twice"

Candidate = tuple[Implementation, Any]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a tuning run found; `stored` is None when nothing was measured, with the reason."""

    stored: Stored | None
    failures: dict[str, str]
    reason: str = ""


class Tuner:
    """Times candidates on representative inputs, each only after it gave the right numbers.

    Args:
      num_warmup: Calls before the clock starts.
      num_iters: Calls that are timed, at most.
      max_candidates: How many to try; None tries all, on a CPU four.
      threads: How many threads compile candidates before the first is timed; 0 compiles each
        candidate when its turn comes. A process that dies meanwhile leaves no record of why.
      report: Called with what is done, how many candidates there are, and the least time so far,
        in milliseconds, or None; without it a terminal shows a line.
    """

    def __init__(
        self,
        *,
        num_warmup: int = 1,
        num_iters: int = 10,
        max_candidates: int | None = None,
        threads: int = 0,
        report: Callable[[int, int, float | None], None] | None = None,
    ):
        self.num_warmup, self.num_iters = num_warmup, num_iters
        self.max_candidates, self.threads = max_candidates, threads
        self.report = report
        self.measured = 0  # candidates timed so far, by this tuner

    def candidates(
        self, inv: Invocation, implementations: Sequence[Implementation]
    ) -> list[Candidate]:
        """What to measure, in the fixed order: each implementation's guess first."""
        guesses: list[Candidate] = []
        variations: list[Candidate] = []
        for implementation in implementations:
            configs = []
            try:
                configs.append(implementation.heuristic(inv.call, inv.direction))
            except NotImplementedError:
                logger.debug("%s has no heuristic", implementation.name)
            configs += implementation.candidates(inv.call, inv.direction)
            named: dict[str, Any] = {}
            for config in configs:
                named.setdefault(name_of(implementation, config), config)
            if named:
                first, *rest = named.values()
                guesses.append((implementation, first))
                variations += [(implementation, config) for config in rest]
        # guesses before variations, so that a short budget has met every implementation
        made = guesses + variations
        if (near := table.guess(inv, implementations)) is not None:  # most likely the best
            owner = next(i for i in implementations if i.name == near.implementation)
            first = (owner, near.config)
            made = [first, *(c for c in made if name_of(*c) != name_of(*first))]
        limit = self.max_candidates
        if limit is None and inv.target is not None and inv.target.kind == "cpu":
            limit = _CPU_CANDIDATES
        return made[:limit]

    def tune(
        self,
        inv: Invocation,
        implementations: Sequence[Implementation],
        budget_s: float,
        *,
        known: Stored | None = None,
        save: Callable[[Stored], None] = lambda stored: None,
        configs: Sequence[Any] | None = None,
    ) -> Result:
        """The best candidate; `known` is an earlier run that was cut short."""
        if configs is not None:
            candidates = [(implementations[0], config) for config in configs]
        else:
            candidates = self.candidates(inv, implementations)
        if len(candidates) < 2:
            return Result(None, {}, "fewer than two candidates")
        rivals = {i.name: i.version for i in implementations}
        run = _Run(inv, candidates, rivals, budget_s, save)
        if known is not None:
            run.times.update(known.times_ms)
            run.tried.update(known.failures)

        def work() -> Result:
            with run.in_thread():
                return self._measure(run)

        with concurrent.futures.ThreadPoolExecutor(1, "ejkernel-tuner") as pool:
            try:
                return pool.submit(work).result()
            finally:
                run.stop.set()  # interrupted: the thread ends with the candidate it is at

    def _measure(self, run: "_Run") -> Result:
        logger.warning(
            "tuning %s (%s): %d candidates, at most %.0f s; EJKERNEL_AUTOTUNE_POLICY=heuristics "
            "turns this off",
            run.inv.kernel.name,
            run.inv.direction,
            len(run.candidates),
            run.budget_s,
        )
        try:
            trial = Trial(run.inv)
        except Exception as error:  # noqa: BLE001 - tuning never stops a call
            return Result(None, {}, f"no inputs to measure on: {_short(error)}")
        finalists: list[Candidate] = []
        try:
            if self.threads:
                self._compile_ahead(run, trial)
            # the fixed order, the compiled ones first
            ordered = sorted(run.candidates, key=lambda c: not trial.is_compiled(*c))
            for done, candidate in enumerate(ordered):
                self._say(run, done)
                self._measure_one(run, trial, candidate)
            if not run.stop.is_set():
                finalists = self._measure_again(run, trial)
        finally:
            trial.release()
        self._say(run, len(run.candidates))
        cut_short = run.stop.is_set() or not {CUT_SHORT, _ENDED}.isdisjoint(run.failures.values())
        if not run.timed():
            reason = f"all {len(run.candidates)} candidates failed"
            if cut_short:
                reason = f"nothing was measured within the budget of {run.budget_s:g} s"
            return Result(None, run.failures, reason)
        return Result(run.best(complete=not cut_short, among=finalists), run.failures)

    def _compile_ahead(self, run: "_Run", trial: Trial) -> None:
        """Compiles in threads, none of which is left: they would disturb the clock.

        Half of the budget is for this; what has not begun by then is compiled when its turn comes.
        """

        def compile_one(candidate: Candidate) -> str | None:
            """Why it failed, in words: an error would keep the arrays of its frames alive."""
            if run.stop.is_set() or run.clock.left < run.budget_s / 2:
                return None
            try:
                with contextlib.suppress(benchmark.OverBudget), run.in_thread():
                    trial.compile(*candidate)
            except Exception as error:  # noqa: BLE001 - a candidate may fail in any way
                return _short(error)
            return None

        try:
            trial.prepare()
        except Exception as error:  # noqa: BLE001 - every candidate fails with it in its turn
            logger.debug("nothing is compiled ahead: %s", _short(error))
            return
        with concurrent.futures.ThreadPoolExecutor(self.threads, "ejkernel-compiler") as pool:
            compiling = {pool.submit(compile_one, c): name_of(*c) for c in run.to_compile()}
            for future in concurrent.futures.as_completed(compiling):
                if (reason := future.result()) is not None:
                    name = compiling[future]
                    run.failures[name] = reason
                    run.times.pop(name, None)
                    self._log(run, name)
                self._say(run, 0)

    def _say(self, run: "_Run", done: int) -> None:
        if self.report is None:
            _show_progress(run, done)
        else:
            self.report(done, len(run.candidates), min(run.times.values(), default=None))

    def _measure_one(self, run: "_Run", trial: Trial, candidate: Candidate) -> None:
        name = name_of(*candidate)
        if name in run.failures:  # it could not be compiled
            return
        if name in run.times:  # of an earlier run: one of these is what others are compared with
            if not (trial.has_reference or run.clock.over):
                try:
                    trial.compare(*candidate)  # the oracle has accepted it in that run
                except benchmark.OverBudget:
                    return
                except Exception as error:  # noqa: BLE001 - as below; it is out, with the reason
                    run.failures[name] = _short(error)
                    del run.times[name]
            return
        # compiling ahead may take the whole budget: one time must come of it, or it was in vain
        is_due = not run.times and trial.is_compiled(*candidate)
        earlier = run.tried.get(name)
        if earlier not in (None, CUT_SHORT, _ENDED):
            run.failures[name] = earlier
        elif run.stop.is_set() or (run.clock.over and not is_due):
            run.failures[name] = earlier or CUT_SHORT
        else:
            if run.times:  # told before it starts: it may take the process with it
                ending = {name: _ENDED_TWICE if earlier == _ENDED else _ENDED}
                run.save(run.best(complete=False, more=ending))
            least = min(run.times.values(), default=None)
            try:
                run.times[name] = self._time(trial, *candidate, run.clock, least)
            except benchmark.OverBudget:
                run.failures[name] = CUT_SHORT
            except Exception as error:  # noqa: BLE001 - a candidate may fail in any way
                run.failures[name] = _short(error)
            else:
                run.save(run.best(complete=False))
            self._log(run, name)

    def _log(self, run: "_Run", name: str) -> None:
        if _settings.current().log_autotune:
            logger.warning("  %s: %s", name, run.times.get(name, run.failures.get(name)))

    def _time(
        self, trial: Trial, implementation: Implementation, config: Any, clock: Any, best: Any
    ) -> float:
        trial.check_memory(implementation, config)
        trial.check(implementation, config)
        run = trial.run(implementation, config)
        self.measured += 1
        timing = benchmark.measure(
            run,
            num_warmup=self.num_warmup,
            num_iters=self.num_iters,
            budget_s=clock.left / 2,
            give_up_ms=None if best is None else 3 * best,
        )
        return timing.median

    def _measure_again(self, run: "_Run", trial: Trial) -> list[Candidate]:
        """Replaces the times of the best candidates by those of rounds in turns; who they are."""
        timed = sorted(run.timed(), key=run.time)
        close = [c for c in timed if run.time(c) <= run.time(timed[0]) * (1 + _CLOSE)]
        close = close[:_FINALISTS]
        if len(close) < 2:
            return []
        sustained = 3e-3 * (_SUSTAINED_MS if jax.default_backend() != "cpu" else 0.0)
        round_s = sum(max(4e-3 * run.time(c), sustained) for c in close)
        rounds: list[dict[str, float]] = []
        for turn in range(_ROUNDS):
            if round_s > run.clock.left:
                break
            # to and fro: a hot neighbour slows whoever follows
            order = close[::-1] if turn % 2 else close
            try:
                rounds.append(self._round(run, trial, order))
            except benchmark.OverBudget:  # only whole rounds compare all finalists
                break
        measured = [c for c in close if rounds and name_of(*c) in run.times]
        run.times |= {
            name: statistics.median(seen[name] for seen in rounds)
            for name in (name_of(*c) for c in measured)
        }
        return measured

    def _round(self, run: "_Run", trial: Trial, order: Sequence[Candidate]) -> dict[str, float]:
        """One more time of each candidate; one that fails is out."""
        seen: dict[str, float] = {}
        for candidate in order:
            name = name_of(*candidate)
            if name not in run.times:
                continue
            benchmark.look()
            try:
                seen[name] = self._time_again(trial, *candidate)
            except benchmark.OverBudget:
                raise
            except Exception as error:  # noqa: BLE001 - tuning never stops a call
                run.failures[name] = f"when measured again: {_short(error)}"
                del run.times[name]
        return seen

    def _time_again(self, trial: Trial, implementation: Implementation, config: Any) -> float:
        together_ms = None if jax.default_backend() == "cpu" else _SUSTAINED_MS
        run = trial.run(implementation, config)
        return benchmark.measure(run, num_iters=2, together_ms=together_ms).median


@dataclasses.dataclass(eq=False)
class _Run:
    """What a tuning run has found so far."""

    inv: Invocation
    candidates: list[Candidate]
    rivals: Mapping[str, int]
    budget_s: float
    save: Callable[[Stored], None]
    times: dict[str, float] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    tried: dict[str, str] = dataclasses.field(default_factory=dict)  # failures of an earlier run
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    clock: benchmark.Stopwatch = dataclasses.field(init=False)
    in_thread: Callable[[], contextlib.AbstractContextManager[None]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.clock = benchmark.Stopwatch(self.budget_s)
        self.in_thread = _callers_contexts(self.clock)

    def to_compile(self) -> list[Candidate]:
        """Candidates to be measured, and of those that an earlier run measured the first."""
        known = {name_of(*c) for c in self.timed()[:1]}
        # one that ended a process may do so again: only `_measure_one` keeps a record of that
        new = lambda name: name not in self.times and self.tried.get(name) in (None, CUT_SHORT)
        named = {name_of(*c): c for c in self.candidates}
        return [c for name, c in named.items() if name in known or new(name)]

    def time(self, candidate: Candidate) -> float:
        return self.times[name_of(*candidate)]

    def timed(self) -> list[Candidate]:
        return [c for c in self.candidates if name_of(*c) in self.times]

    def best(
        self,
        *,
        complete: bool,
        among: Sequence[Candidate] = (),
        more: Mapping[str, str] | None = None,
    ) -> Stored:
        """The best of all, or of those whose times compare, in the fixed order."""
        timed = [c for c in self.timed() if not among or c in among]
        least = min(map(self.time, timed))
        winner, config = next(c for c in timed if self.time(c) <= least * (1 + _NOISE))
        failures = {**self.failures, **(more or {})}
        return Stored(
            winner.name, winner.version, config, dict(self.times), failures, complete, self.rivals
        )


def _callers_contexts(
    clock: benchmark.Stopwatch,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What threads of a run enter: a fresh one has no trace and no mesh of the caller's.

    What the caller computes in and on, and where results go, must be the same.
    """
    precision = jax.config.jax_default_matmul_precision
    x64, device = jax.config.jax_enable_x64, jax.config.jax_default_device
    settings = _settings.current()

    @contextlib.contextmanager
    def in_thread() -> Iterator[None]:
        with (
            jax.default_matmul_precision(precision),
            jax.enable_x64(x64),
            jax.default_device(device),
            _settings.using(settings),
            policies.policy_override(autotune=False),
            clock.counting(),
        ):
            yield

    return in_thread


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


def _show_progress(run: _Run, done: int) -> None:
    """One line that is written over, on a terminal only."""
    is_terminal = getattr(sys.stderr, "isatty", None)  # a program may have no stderr, or its own
    with contextlib.suppress(OSError, ValueError):  # closed meanwhile
        if is_terminal is not None and is_terminal():
            sys.stderr.write(_progress_line(run, done))
            sys.stderr.flush()


def _progress_line(run: _Run, done: int) -> str:
    bar = "#" * done + "." * (len(run.candidates) - done)
    best = f"best {min(run.times.values()):.3g} ms" if run.times else ""
    end = "\n" if done == len(run.candidates) else ""
    what = f"{run.inv.kernel.name} ({run.inv.direction})"
    return f"\rtuning {what} [{bar}] {best:<16}{end}"
