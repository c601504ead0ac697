"""The configuration chain: override, overlay, memory, persistent, autotune, heuristics, error."""

import abc
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import jax

from ejkernel import _device
from ejkernel.errors import SelectionError, UnsupportedError, UnsupportedGroupError
from ejkernel.ops.config import cache as caches
from ejkernel.ops.config import persistent, table
from ejkernel.ops.config import policy as policies
from ejkernel.ops.config.cache import ConfigCache, Stored
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.kernel import BACKWARD, Implementation, Invocation

if TYPE_CHECKING:
    from ejkernel.ops.execution.tuning import Tuner


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """The implementation and configuration of one call, and which tier said so."""

    implementation: Implementation
    cfg: Any
    source: str
    refused: dict[str, str]  # implementation name -> why it cannot serve the call
    trail: tuple[str, ...] = ()  # what each earlier tier said
    times_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    row: str = ""  # which row of a table or of a near call said so; "": what is stored of this call


class ConfigChooser(abc.ABC):
    """Decides how a call is run."""

    @abc.abstractmethod
    def choose(self, inv: Invocation) -> Choice:
        """An implementation that can serve `inv`, and a configuration of it."""

    @property
    def generation(self) -> int:
        """Changes whenever an earlier answer may no longer hold."""
        return 0

    def known(self, key: str) -> Any:
        """What is remembered under a key; programs that used something else are made anew."""
        return None


class ConfigSelectorChain(ConfigChooser):
    """Asks each tier in turn; only measured configurations are ever stored.

    Args:
      cache: The memory tier.
      persistent: The disk tier; None keeps nothing on disk.
      autotune: Short for a policy that always, or never, measures.
      policy: When to measure; None follows the environment.
      tuner: Measures candidates.
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        persistent: PersistentCache | None = None,
        autotune: bool | None = None,
        policy: policies.AutotunePolicy | None = None,
        tuner: "Tuner | None" = None,
    ):
        if autotune is not None and policy is not None:
            raise ValueError("`ConfigSelectorChain`: give `autotune` or `policy`, not both.")
        mode = None
        if autotune is not None:
            mode = policies.mode_of("ConfigSelectorChain", autotune)
        self.cache = cache if cache is not None else ConfigCache()
        self.persistent = persistent
        self.policy = policy or policies.AutotunePolicy(mode=mode)
        self.failures: dict[str, dict[str, str]] = {}  # key -> candidate -> why it lost its place
        self._in_vain: dict[str, str] = {}  # key -> why tuning it gave nothing in this process
        self._tuner = tuner
        self._lock = threading.RLock()

    @property
    def generation(self) -> int:
        return self.cache.generation

    def known(self, key: str) -> Any:
        return self.cache.get(key)

    def choose(self, inv: Invocation) -> Choice:
        able, refused = sort_out(inv)
        search = _Search(inv, able, refused)
        if inv.override is not None:
            return search.configured(inv.override, "override")
        search.say("override", "none given")
        policy = policies.current(self.policy)
        choice = (
            search.stored(caches.overlaid(inv.key), "overlay")
            or search.stored(self.cache.get(inv.key), "memory")
            or self._of_this_call(search)
            or self._of_a_near_call(search, wanted=not policy.always and search.cut_short is None)
            or self._measured(search, policy)
            or search.stored_so_far()
            or self._of_a_near_call(search, wanted=policy.always)
            or search.heuristic()
        )
        if choice is not None:
            return choice
        raise SelectionError(
            f"`{inv.kernel.name}` ({inv.direction}): no configuration for {shapes(inv)}: "
            f"{'; '.join(search.trail)}."
        )

    def tune(self, inv: Invocation, *, budget_s: float | None = None) -> Choice:
        """Measures a call now, whatever the policy says, and remembers the result."""
        able, refused = sort_out(inv)
        search = _Search(inv, able, refused)
        default = policies.current(self.policy).budget(inv.direction)
        budget = default if budget_s is None else budget_s
        choice = self._tune(search, budget, again=True) or search.heuristic()
        if choice is None:
            raise SelectionError(f"`{inv.kernel.name}`: {'; '.join(search.trail)}.")
        return choice

    def _of_this_call(self, search: "_Search") -> Choice | None:
        """What a file or the shipped table has of this very call."""
        inv = search.inv
        stored = self._read(inv)
        if stored is not None and not stored.complete:
            search.say("persistent", "tuning was cut short, and goes on")
            search.cut_short = stored if search.current(stored) else None
        elif (choice := search.stored(stored, "persistent")) is not None:
            assert stored is not None
            self.cache.put(inv.key, stored)
            return choice
        return search.stored(table.exact(inv, search.able), "persistent", "shipped table")

    def _of_a_near_call(self, search: "_Search", wanted: bool) -> Choice | None:
        """What a file or the shipped table has of a near call; never stored for this one."""
        if not wanted:
            return None
        inv, own = search.inv, []
        if self.persistent is not None:
            own = self.persistent.rows(op=inv.op, device=inv.device_fingerprint)
        near = table.near(inv, search.able, own, search.current)
        return search.stored(near, "persistent", "near calls")

    def _read(self, inv: Invocation) -> Stored | None:
        if self.persistent is None:
            return None
        where = {"op": inv.op, "device": inv.device_fingerprint}
        record = self.persistent.read(inv.key, **where)
        if record is None:
            return None
        for implementation in inv.kernel.implementations(inv):
            if (implementation.name, implementation.version) != (
                record.implementation,
                record.version,
            ):
                continue
            try:
                try:
                    config = implementation.decode(inv.call, inv.direction, record.config)
                except NotImplementedError:  # no heuristic tells the type of a config
                    config = persistent.revive(record)
            except LookupError:  # of a type that is not here: nothing to run with
                return None
            except Exception as error:  # noqa: BLE001 - a config checks itself in any way it likes
                self.persistent.reject(record, str(error))
                return None
            return Stored(
                record.implementation,
                record.version,
                config,
                record.times_ms,
                record.failures,
                record.complete,
                record.rivals,
            )
        return None

    def _measured(self, search: "_Search", policy: policies.Policy) -> Choice | None:
        inv = search.inv
        if (reason := _cannot_measure(inv, policy) or self._in_vain.get(inv.key)) is not None:
            search.say("autotune", reason)
            return None
        return self._tune(search, policy.budget(inv.direction))

    def _tune(self, search: "_Search", budget_s: float, again: bool = False) -> Choice | None:
        inv = search.inv
        if budget_s <= 0:
            search.say("autotune", "a budget of 0 s measures nothing")
            return None
        with self._lock:  # one measurement at a time; another thread may have just made this one
            if not again and (choice := search.stored(self.cache.get(inv.key), "memory")):
                return choice
            earlier = self._read(inv)
            if earlier is not None and not search.current(earlier):
                earlier = None
            known = earlier if earlier is not None and not earlier.complete else None
            whole = earlier if earlier is not None and earlier.complete else None
            # a whole result is replaced by another one only, not by the beginning of one
            save = (lambda stored: None) if whole is not None else self._save_partial(inv)
            # a call that becomes one of another op is measured as that one, which its row is of
            there = inv.keyed
            able = search.able if there is inv else sort_out(there)[0]
            result = self._get_tuner().tune(there, able, budget_s, known=known, save=save)
            self.failures[inv.key] = dict(result.failures)
            if whole is not None and caches.CUT_SHORT in result.failures.values():
                if (choice := search.stored(whole, "persistent")) is not None:
                    self.cache.put(inv.key, whole)
                    return choice
            if result.stored is None:
                search.say("autotune", result.reason)
                if result.failures:  # another trace of this call would fare no better
                    self._in_vain[inv.key] = result.reason
                return None
            self.cache.put(inv.key, result.stored)
            self._save(inv, result.stored)
            return search.stored(result.stored, "autotune")

    def _get_tuner(self) -> "Tuner":
        if self._tuner is None:
            from ejkernel.ops.execution.tuning import Tuner

            self._tuner = Tuner()
        return self._tuner

    def _save_partial(self, inv: Invocation) -> Any:
        return lambda stored: self._save(inv, stored)

    def _save(self, inv: Invocation, stored: Stored) -> None:
        if self.persistent is not None:
            where = {"op": inv.op, "device": inv.device_fingerprint}
            self.persistent.put(inv.key, stored, call=inv.document, **where)


@dataclasses.dataclass(eq=False)
class _Search:
    """One walk down the chain."""

    inv: Invocation
    able: list[Implementation]
    refused: dict[str, str]
    trail: list[str] = dataclasses.field(default_factory=list)
    outdated: tuple[Implementation, Stored] | None = None
    cut_short: Stored | None = None  # what an unfinished tuning of this call has found so far

    def say(self, tier: str, text: str) -> None:
        self.trail.append(f"{tier}: {text}")

    def found(
        self,
        implementation: Implementation,
        cfg: Any,
        source: str,
        times: Any = None,
        row: str = "",
    ) -> Choice:
        return Choice(
            implementation, cfg, source, self.refused, tuple(self.trail), dict(times or {}), row
        )

    def configured(self, value: Any, tier: str) -> Choice:
        """A caller's configuration, for the best implementation that takes it."""
        problem: UnsupportedError | TypeError | None = None
        for implementation in self.able:
            try:
                cfg = implementation.configure(self.inv.call, self.inv.direction, value)
            except (UnsupportedError, TypeError) as error:  # a config may be another kernel's own
                problem = problem or error
            else:
                return self.found(implementation, cfg, tier)
        assert problem is not None
        raise problem

    def stored(self, value: Any, tier: str, name: str | None = None) -> Choice | None:
        """The choice a remembered value stands for; a value that no longer fits is a miss."""
        if value is None:
            self.say(name or tier, "nothing stored")
            return None
        if not isinstance(value, Stored):  # a bare configuration, put there by a user
            return self.configured(value, tier)
        for implementation in self.able:
            known = (implementation.name, implementation.version)
            if known != (value.implementation, value.version):
                continue
            problem = None
            if tier != "overlay":  # which holds what somebody wants
                problem = implementation.misfit(self.inv.call, self.inv.direction, value.config)
            if problem is not None:
                self.say(name or tier, problem)
                return None
            if self.current(value):
                return self.found(implementation, value.config, tier, value.times_ms, value.row)
            self.say(name or tier, f"{value.implementation} was chosen among other versions")
            self.outdated = self.outdated or (implementation, value)
            return None
        self.say(name or tier, f"{value.implementation} v{value.version} cannot serve this call")
        return None

    def stored_so_far(self) -> Choice | None:
        """The best of an unfinished tuning, where that cannot go on now."""
        return None if self.cut_short is None else self.stored(self.cut_short, "persistent")

    def current(self, value: Stored) -> bool:
        """Whether a choice was made among the implementations that are here now."""
        rivals = value.rivals
        return not rivals or all(rivals.get(i.name) == i.version for i in self.able)

    def heuristic(self) -> Choice | None:
        guess = table.guess(self.inv, self.able) if self.outdated is None else None
        if guess is not None and (choice := self.stored(guess, "heuristics", "shipped table")):
            return choice
        if self.outdated is not None:  # better than a guess, where nothing can be measured
            implementation, value = self.outdated
            return self.found(implementation, value.config, "heuristics", value.times_ms, value.row)
        for implementation in self.able:
            try:
                cfg = implementation.heuristic(self.inv.call, self.inv.direction)
            except NotImplementedError as error:
                self.say(f"heuristics of {implementation.name}", str(error))
            else:
                return self.found(implementation, cfg, "heuristics")
        return None


def _cannot_measure(inv: Invocation, policy: policies.Policy) -> str | None:
    """Why a call is not measured now."""
    if not policy.measures:
        return "off (policy heuristics)"
    if not policy.allow_in_trace:
        return "not while tracing (policy)"
    if jax.process_count() > 1:
        return "not while tracing with several processes; use autotune_recorded"
    if inv.target is not None and inv.target != _device.describe(_device.default_device()):
        return f"the call is for {inv.target.model}, which is not the default device here"
    return None


def sort_out(inv: Invocation) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations that can serve a call, and why the others cannot."""
    able, refused = [], {}
    for implementation in inv.kernel.implementations(inv):
        reason = implementation.why_not(inv.call, inv.direction)
        if reason is None and inv.direction == BACKWARD and implementation.backward is None:
            reason = "has no backward kernel"
        if reason is None:
            able.append(implementation)
        else:
            refused[implementation.name] = reason
    if not able:
        raise refusal(inv, refused)
    able.sort(key=lambda implementation: implementation.defers(inv.call))
    return able, refused


def refusal(inv: Invocation, refused: dict[str, str]) -> Exception:
    """The error for a call that no implementation can serve."""
    what = f"`{inv.kernel.name}` ({inv.direction}, platform={inv.platform!r})"
    if not refused:
        return UnsupportedError(f"{what}: no implementation is registered for this device.")
    way_out = "" if inv.platform == "auto" else '. platform="auto" takes another kernel'
    reasons = [f"{name}: {reason}" for name, reason in refused.items()]
    errors = [UnsupportedError(f"{what}: {reason}{way_out}") for reason in reasons]
    if len(errors) == 1:
        return errors[0]
    every = "; ".join(reasons)
    text = f"{what}: no implementation can serve {shapes(inv)}: {every}{way_out}"
    return UnsupportedGroupError(text, errors)


def shapes(inv: Invocation) -> str:
    """Names, dtypes and shapes of a call's arrays, for people."""
    return ", ".join(f"{n}={a.dtype}{list(a.shape)}" for n, a in inv.call.arrays().items())
