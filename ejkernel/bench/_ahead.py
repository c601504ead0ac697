"""Compiles the programs of all rows in threads, before the first row is measured."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ejkernel import _contexts, _device
from ejkernel.bench import _apart, _check, _peers, _programs
from ejkernel.bench._programs import Call, Ours, Runnable
from ejkernel.bench._workloads import AUTO, BOTH, EAGER, Peer, Workload
from ejkernel.ops.execution import benchmark

logger = logging.getLogger("ejkernel")

_SAY_S = 2.0
# After so long without an end of any program nothing is said, so that --timeout ends the process.
_STUCK_S = 120.0
_SHARE = 0.5  # of the time that is left; what is not compiled by then is compiled in its row

Key = tuple[Workload, str, str, str]  # workload, mode, program and kind
Rows = Sequence[tuple[Workload, Sequence[str]]]
Job = Callable[[], None]


@dataclasses.dataclass(eq=False)
class Ahead:
    """What was compiled before its row.

    Nothing is measured meanwhile: a thread that traces holds Python's lock, which delays calls.
    """

    _ready: dict[Key, Runnable] = dataclasses.field(default_factory=dict)

    def take(self, key: Key, made: Runnable) -> Runnable:
        """A program with what was compiled of it, if its inputs are those that were expected."""
        ready = self._ready.pop(key, None)
        if ready is not None and _shapes(ready.inputs) == _shapes(made.inputs):
            made.compiled = ready.compiled
        return made

    def compile(self, run: Any, rows: Rows) -> None:
        """Compiles for a run of `_runner`, and compares small calls with the oracle.

        What fails here is left out: it fails again in its row, which gives the reason.
        """
        clock = benchmark.Stopwatch(run.budget.left * _SHARE)
        threads = run.options.threads
        if not threads or clock.over or _apart.AHEAD in run.options.given_up:
            return
        run.progress.begin(*_apart.AHEAD)
        there = _carried()
        with concurrent.futures.ThreadPoolExecutor(threads, "ejkernel-ahead") as pool:
            try:
                found: list[concurrent.futures.Future[None]] = []
                for job in self._jobs(run, rows, clock):
                    own = contextvars.copy_context()
                    found.append(pool.submit(own.run, _work, there, job))
                _wait(run, found, clock)
            except BaseException:  # an interrupt, too, begins nothing new
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        reasons = [future.exception() for future in found if not future.cancelled()]
        failed = [reason for reason in reasons if reason is not None]
        for reason in failed:
            logger.info("not compiled before its row", exc_info=reason)
        run.progress.ahead(len(self._ready), len(failed))

    def _jobs(self, run: Any, rows: Rows, clock: benchmark.Stopwatch) -> Iterator[Job]:
        """What threads have to do, in the order of the rows."""
        for workload, modes in rows:
            # An eager call is compared with what `jit` costs, and arrays on several devices have
            # places that their shapes do not tell.
            modes = [mode for mode in modes if run.given_up(workload, mode) is None]
            if not modes or workload.quantity == EAGER or workload.devices > 1:
                continue
            if clock.over:
                return
            run.progress.step(f"{workload.op}, {workload.name}: programs")
            try:
                jobs = self._jobs_of(run, Call.of_shapes(workload), modes)
            except Exception as error:  # noqa: BLE001 - its row finds out why, and says so
                logger.info("%s, %s: %s", workload.op, workload.name, error)
            else:
                yield from jobs

    def _jobs_of(self, run: Any, call: Call, modes: Sequence[str]) -> list[Job]:
        """The comparison with the oracle, which takes longest, and the programs of some rows."""
        compared: dict[str, tuple[Any, str, dict[str, Any]]] = {}
        jobs: list[Job] = [functools.partial(_compare, call, compared)]
        for mode in modes:
            ours = []
            for entry, reason in _programs.entries(call, mode, run.options.entries):
                if reason is None and run.given_up(call.workload, mode, entry.name) is None:
                    ours.append(_choose(call, _programs.of_entry, entry, mode))
                    if entry.name not in compared:
                        compared[entry.name] = (entry, *_choose(call, _programs.checked, entry))
            if not ours:  # and peers have nothing to agree with
                continue
            programs = [(one.name, one.fn, None) for one in ours]
            if run.options.entries is None:
                auto = _choose(call, _programs.of_auto, mode)
                if _programs.stand_in(auto, ours) is None:
                    programs.append((AUTO, auto.fn, None))
            found = _peers.of(call.workload, run.kind, run.options.peers)
            programs += [(p.name, p.run, p) for p in found if _takes_part(p, call, mode)]
            for name, fn, peer in programs:
                if run.given_up(call.workload, mode, name) is None:
                    for kind in _programs.kinds(call, mode, peer):
                        key = (call.workload, mode, name, kind)
                        jobs.append(functools.partial(self._compile, key, call, ours[0], fn, peer))
        return jobs

    def _compile(self, key: Key, call: Call, first: Ours, fn: Any, peer: Peer | None) -> None:
        _, mode, _, kind = key
        if mode == BOTH:
            call.with_cotangent(first.fn)  # as in the row, where ours comes first
        made = _programs.program(call.prepared(peer), fn, mode, kind)
        made.compile()
        self._ready[key] = made


def _compare(call: Call, entries: dict[str, tuple[Any, str, dict[str, Any]]]) -> None:
    """Asks the oracle, for the memory of `_check`; one entry after the other uses its answer."""
    failed = []
    for entry, mode, chosen in entries.values():
        try:
            _check.against_oracle(call, entry, mode, _device.find(), chosen)
        except Exception as error:  # noqa: BLE001 - the other entries are compared
            failed.append(error)
    if failed:
        raise ExceptionGroup("not compared with the oracle before its row", failed)


def _choose(call: Call, ask: Callable[..., Any], *more: Any) -> Any:
    """Configurations are chosen while a call is traced: some ops compute with its arrays."""
    return call.while_traced(lambda traced: ask(traced, *more))


def _takes_part(peer: Peer, call: Call, mode: str) -> bool:
    """Whether a peer is compiled here: not one of another framework, or that reads numbers."""
    if peer.run is None or mode not in peer.modes:
        return False
    try:
        return call.while_traced(lambda traced: peer.why_not(traced.values)) is None
    except Exception as error:  # noqa: BLE001 - of any library; its row asks again
        logger.info("%s: %s", peer.name, error)
        return False


def _wait(run: Any, found: Sequence[Any], clock: benchmark.Stopwatch) -> None:
    """Until all threads have ended; says so meanwhile, for who waits for a sign of life."""
    left, stuck = set(found), benchmark.Stopwatch(_STUCK_S)
    while left:
        done, left = concurrent.futures.wait(left, _SAY_S, concurrent.futures.FIRST_COMPLETED)
        if done:
            stuck = benchmark.Stopwatch(_STUCK_S)
        if not stuck.over:
            run.progress.step(f"compiling: {len(found) - len(left)} of {len(found)} are ready")
        if clock.over:
            for future in left:
                future.cancel()


def _carried() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes contexts that give another thread what is set in this one alone."""
    names = ("settings", "policy", "overlay", "compile_for_tpu", "detect_races")
    own = [(context, context.value) for context in (getattr(_contexts, name) for name in names)]
    own += [
        (jax.default_matmul_precision, jax.config.jax_default_matmul_precision),
        (jax.enable_x64, jax.config.jax_enable_x64),
        (jax.default_device, jax.config.jax_default_device),
    ]

    @contextlib.contextmanager
    def there() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context, value in own:
                stack.enter_context(context(value))
            yield

    return there


def _work(there: Callable[[], contextlib.AbstractContextManager[None]], job: Job) -> None:
    with there():
        job()


def _shapes(inputs: Any) -> Any:
    """Structure, shapes and dtypes as JAX sees them; arrays of NumPy may have wider ones."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda *some: some, *inputs))
    return tree, [(x.shape, x.dtype) for x in leaves]
