"""Measures candidates of a call: right before fast, within a budget, never fatal."""

import concurrent.futures
import dataclasses
import logging
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _settings
from ejkernel.ops.config import policy as policies
from ejkernel.ops.config.cache import Stored
from ejkernel.ops.core.kernel import FORWARD, Implementation, Invocation
from ejkernel.ops.core.types import CallArgs
from ejkernel.ops.execution import benchmark
from ejkernel.ops.utils import serialize

logger = logging.getLogger("ejkernel")

_CPU_CANDIDATES = 4
# Candidates closer than this are equal; the fixed order decides.
_NOISE = 0.01
# The best and those within a tenth of it are measured again, in turns: a device's clock wanders.
# A GPU runs long enough to lower its clock as it will in use: the more work, the more it does.
_CLOSE, _FINALISTS, _ROUNDS, _SUSTAINED_MS = 0.1, 4, 3, 25.0
_SAMPLED_ROWS = 64

Candidate = tuple[Implementation, Any]


class Rejected(Exception):
    """A candidate that must not win, and why."""


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
    """

    def __init__(
        self, *, num_warmup: int = 1, num_iters: int = 10, max_candidates: int | None = None
    ):
        self.num_warmup, self.num_iters = num_warmup, num_iters
        self.max_candidates = max_candidates
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
        precision = jax.config.jax_default_matmul_precision
        x64, settings = jax.config.jax_enable_x64, _settings.current()

        def work() -> Result:
            # a fresh thread has no trace and no mesh of the caller's; what the caller computes in
            # and where results go must be the same
            with (
                jax.default_matmul_precision(precision),
                jax.enable_x64(x64),
                _settings.using(settings),
            ):
                return self._measure(inv, candidates, budget_s, known, save, rivals)

        with concurrent.futures.ThreadPoolExecutor(1, "ejkernel-tuner") as pool:
            return pool.submit(work).result()

    def _measure(
        self,
        inv: Invocation,
        candidates: list[Candidate],
        budget_s: float,
        known: Stored | None,
        save: Callable[[Stored], None],
        rivals: Mapping[str, int],
    ) -> Result:
        settings = _settings.current()
        logger.warning(
            "tuning %s (%s): %d candidates, at most %.0f s; EJKERNEL_AUTOTUNE_POLICY=heuristics "
            "turns this off",
            inv.kernel.name,
            inv.direction,
            len(candidates),
            budget_s,
        )
        times = dict(known.times_ms) if known is not None else {}
        failures: dict[str, str] = {}
        clock = benchmark.Stopwatch(budget_s)
        with policies.policy_override(autotune=False):
            try:
                trial = _Trial(inv)
            except Exception as error:  # noqa: BLE001 - tuning never stops a call
                return Result(None, {}, f"no inputs to measure on: {_short(error)}")
            for done, (implementation, config) in enumerate(candidates):
                _show_progress(inv, done, len(candidates), times)
                name = name_of(implementation, config)
                if name in times:
                    trial.expect(implementation, config)
                    continue
                if clock.over and done:
                    failures[name] = "not measured: the budget was used up"
                    continue
                best = min(times.values(), default=None)
                try:
                    times[name] = self._time(trial, implementation, config, clock, best)
                except Exception as error:  # noqa: BLE001 - a candidate may fail in any way
                    failures[name] = _short(error)
                if settings.log_autotune:
                    logger.warning("  %s: %s", name, times.get(name, failures.get(name)))
                if name in times:
                    save(self._best(candidates, times, failures, rivals, complete=False))
            self._measure_again(trial, candidates, times, max(clock.left, budget_s / 10))
            _show_progress(inv, len(candidates), len(candidates), times)
        if not any(name_of(*candidate) in times for candidate in candidates):
            return Result(None, failures, f"all {len(candidates)} candidates failed")
        return Result(self._best(candidates, times, failures, rivals, complete=True), failures)

    def _time(
        self, trial: "_Trial", implementation: Implementation, config: Any, clock: Any, best: Any
    ) -> float:
        trial.check_memory(implementation, config)
        trial.check(implementation, config)
        run = trial.run(implementation, config)
        self.measured += 1
        timing = benchmark.measure(
            run,
            num_warmup=self.num_warmup,
            num_iters=self.num_iters,
            budget_s=max(clock.left / 2, 0.05),
            give_up_ms=None if best is None else 3 * best,
        )
        return timing.median

    def _measure_again(
        self,
        trial: "_Trial",
        candidates: list[Candidate],
        times: dict[str, float],
        budget_s: float,
    ) -> None:
        """Replaces the times of the best candidates by those of rounds in turns."""
        timed = sorted(
            (c for c in candidates if name_of(*c) in times), key=lambda c: times[name_of(*c)]
        )
        close = [
            c for c in timed if times[name_of(*c)] <= times[name_of(*timed[0])] * (1 + _CLOSE)
        ][:_FINALISTS]
        if len(close) < 2:
            return
        sustained = 3e-3 * (_SUSTAINED_MS if jax.default_backend() != "cpu" else 0.0)
        round_s = sum(max(4e-3 * times[name_of(*c)], sustained) for c in close)
        clock = benchmark.Stopwatch(budget_s)
        rounds: list[dict[str, float]] = []
        while len(rounds) < _ROUNDS and round_s <= clock.left:
            turn = (
                close[::-1] if len(rounds) % 2 else close
            )  # a hot neighbour slows whoever follows
            try:
                rounds.append({name_of(*c): self._time_again(trial, *c) for c in turn})
            except Exception as error:  # noqa: BLE001 - tuning never stops a call
                logger.debug("measuring again: %s", _short(error))
                return
        if rounds:
            times |= {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}

    def _time_again(self, trial: "_Trial", implementation: Implementation, config: Any) -> float:
        together_ms = None if jax.default_backend() == "cpu" else _SUSTAINED_MS
        run = trial.run(implementation, config)
        return benchmark.measure(run, num_iters=2, together_ms=together_ms).median

    def _best(
        self,
        candidates: list[Candidate],
        times: dict[str, float],
        failures: dict[str, str],
        rivals: Mapping[str, int],
        complete: bool,
    ) -> Stored:
        timed = [c for c in candidates if name_of(*c) in times]
        least = min(times[name_of(*c)] for c in timed)
        winner = next(c for c in timed if times[name_of(*c)] <= least * (1 + _NOISE))
        return Stored(
            winner[0].name,
            winner[0].version,
            winner[1],
            dict(times),
            dict(failures),
            complete,
            rivals,
        )


class _Trial:
    """The inputs of a measurement, and the numbers that a candidate must give."""

    def __init__(self, inv: Invocation):
        self.inv = inv
        self._free = free_memory()
        self.args = inv.kernel.example_inputs(inv)
        if isinstance(self.args, tuple | list):  # plain positional arguments of a user's kernel
            self.args = CallArgs.of(tuple(self.args), inv.kwargs)
        self._check(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.args)), "arrays")
        self._finite_inputs = all(
            bool(jnp.isfinite(x).all())
            for x in jax.tree.leaves(self.args)
            if jnp.issubdtype(x.dtype, jnp.floating)
        )
        self._programs: dict[str, Callable[[], Any]] = {}
        self._residuals: Any = None
        self._expected: Any = None

    def run(self, implementation: Implementation, config: Any) -> Callable[[], Any]:
        """A compiled call of a candidate at full size."""
        name = name_of(implementation, config)
        if name not in self._programs:
            self._programs[name] = self._build(implementation, config)
        return self._programs[name]

    def _build(self, implementation: Implementation, config: Any) -> Callable[[], Any]:
        if self.inv.direction == FORWARD:
            program = jax.jit(lambda args: implementation.forward(args, config)[0])
            return lambda: program(self.args)
        outputs, residuals, cotangents = self._saved()
        program = jax.jit(
            lambda args, outputs, residuals, cotangents: implementation.backward(
                args, config, outputs, residuals, cotangents, self.inv.wanted
            )
        )
        return lambda: program(self.args, outputs, residuals, cotangents)

    def check(self, implementation: Implementation, config: Any) -> None:
        """Raises unless a candidate agrees with the oracle on a small twin, and with the others."""
        reason = self.inv.kernel.check_candidate(self.inv, implementation, config)
        if reason is not None:
            raise Rejected(reason)
        outputs = jax.tree.leaves(self.run(implementation, config)())
        rows, epsilons = [_sample(x) for x in outputs], [_epsilon(x.dtype) for x in outputs]
        if self._finite_inputs and any(np.isnan(x).any() for x in rows):
            raise Rejected("gives nan on finite inputs")
        if self._expected is None:
            self._expected = rows
            return
        for expected, row, epsilon in zip(self._expected, rows, epsilons, strict=True):
            finite = np.isfinite(expected)
            allowed = 64 * epsilon * np.abs(expected[finite]).max(initial=0.0)
            same = np.array_equal(row[~finite], expected[~finite], equal_nan=True)
            error = np.abs(row[finite] - expected[finite]).max(initial=0.0)
            if not same or not error <= allowed:
                raise Rejected("disagrees with the other candidates at full size")

    def check_memory(self, implementation: Implementation, config: Any) -> None:
        """Raises, before anything is compiled, for a config that would fill the device."""
        needed = implementation.memory(self.args, self.inv.direction, config)
        if needed is not None:
            self._check(needed, "temporaries")

    def _check(self, needed: int, what: str) -> None:
        if self._free is not None and needed > self._free / 2:
            raise Rejected(
                f"skipped: its {what} take {needed >> 20} MiB of {self._free >> 20} MiB free"
            )

    def expect(self, implementation: Implementation, config: Any) -> None:
        """Takes a candidate that was measured before as the one the others are compared with."""
        if self._expected is None:
            try:
                self.check(implementation, config)
            except Exception as error:  # noqa: BLE001 - then another one will be the first
                logger.debug("%s: %s", name_of(implementation, config), error)

    def _saved(self) -> tuple[Any, Any, Any]:
        """Outputs and residuals of a forward, and cotangents, for timing a backward."""
        if self._residuals is None:
            inv = dataclasses.replace(self.inv, direction=FORWARD, wanted=frozenset())
            implementation = next(
                i for i in inv.kernel.implementations(inv) if i.why_not(inv.call, FORWARD) is None
            )
            config = implementation.heuristic(inv.call, FORWARD)
            outputs, residuals = jax.jit(lambda args: implementation.forward(args, config))(
                self.args
            )
            leaves = jax.tree.leaves(outputs)
            keys = jax.random.split(jax.random.key(1), max(len(leaves), 1))
            cotangents = tuple(
                jax.random.normal(k, o.shape, np.float32).astype(o.dtype)
                for k, o in zip(keys, leaves, strict=False)
            )
            self._residuals = (tuple(leaves), residuals, cotangents)
        return self._residuals


def _sample(x: Any) -> np.ndarray:
    """Up to 64 rows of an array, in float64 for the comparison."""
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    index = np.linspace(0, max(len(rows) - 1, 0), min(len(rows), _SAMPLED_ROWS)).astype(int)
    return np.asarray(rows[index]).astype(np.float64)


def _epsilon(dtype: Any) -> float:
    # 64 roundings of float32; of a half-width type, one in the last bit
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    return float(jnp.finfo(dtype).eps) * (1.0 if jnp.dtype(dtype).itemsize >= 4 else 1 / 32)


def free_memory() -> int | None:
    """Bytes free on the default device, if it tells."""
    stats = jax.devices()[0].memory_stats() if jax.devices()[0].platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    if jax.devices()[0].platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def name_of(implementation: Implementation, config: Any) -> str:
    """A candidate's name in records and logs."""
    return f"{implementation.name} {serialize.stable_json(serialize.describe(config))}"


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


def _show_progress(inv: Invocation, done: int, total: int, times: dict[str, float]) -> None:
    """One line that is written over, on a terminal only."""
    if not sys.stderr.isatty():
        return
    bar = "#" * done + "." * (total - done)
    best = f"best {min(times.values()):.3g} ms" if times else ""
    end = "\n" if done == total else ""
    sys.stderr.write(f"\rtuning {inv.kernel.name} ({inv.direction}) [{bar}] {best:<16}{end}")
    sys.stderr.flush()
