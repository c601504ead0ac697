"""The configuration chain: override, memory, heuristics, error."""

import abc
import dataclasses
from typing import Any

from ejkernel.errors import SelectionError, UnsupportedError
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.core.kernel import BACKWARD, Implementation, Invocation


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a cache remembers of a measured choice."""

    implementation: str
    version: int
    config: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """The implementation and configuration of one call, and which tier said so."""

    implementation: Implementation
    cfg: Any
    source: str
    refused: dict[str, str]  # implementation name -> reason


class ConfigChooser(abc.ABC):
    """Decides how a call is run."""

    @abc.abstractmethod
    def choose(self, inv: Invocation) -> Choice:
        """An implementation that can serve `inv`, and a configuration of it."""

    @property
    def generation(self) -> int:
        """Changes whenever an earlier answer may no longer hold."""
        return 0


class ConfigSelectorChain(ConfigChooser):
    """Asks each tier in turn; only measured configurations are ever stored."""

    def __init__(self, cache: ConfigCache | None = None):
        self.cache = cache if cache is not None else ConfigCache()

    @property
    def generation(self) -> int:
        return self.cache.generation

    def choose(self, inv: Invocation) -> Choice:
        able, refused = _sort_out(inv)
        if inv.override is not None:
            return self._override(inv, able, refused)
        if (choice := self._remembered(inv, able, refused)) is not None:
            return choice
        said = ["override: none given", "memory: nothing stored"]
        for implementation in able:
            try:
                cfg = implementation.heuristic(inv.call, inv.direction)
            except NotImplementedError as error:
                said.append(f"heuristics of {implementation.name}: {error}")
            else:
                return Choice(implementation, cfg, "heuristics", refused)
        raise SelectionError(
            f"`{inv.kernel.name}`: no configuration for {_shapes(inv)}: {'; '.join(said)}."
        )

    def _override(
        self, inv: Invocation, able: list[Implementation], refused: dict[str, str]
    ) -> Choice:
        implementation = able[0]
        cfg = implementation.configure(inv.call, inv.direction, inv.override)
        return Choice(implementation, cfg, "override", refused)

    def _remembered(
        self, inv: Invocation, able: list[Implementation], refused: dict[str, str]
    ) -> Choice | None:
        stored = self.cache.get(inv.key)
        for implementation in able if isinstance(stored, Stored) else ():
            known = (implementation.name, implementation.version)
            if known == (stored.implementation, stored.version):
                return Choice(implementation, stored.config, "memory", refused)
        return None


def _sort_out(inv: Invocation) -> tuple[list[Implementation], dict[str, str]]:
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
    return able, refused


def refusal(inv: Invocation, refused: dict[str, str]) -> Exception:
    """The error for a call that no implementation can serve."""
    what = f"`{inv.kernel.name}` ({inv.direction}, platform={inv.platform!r})"
    if not refused:
        return UnsupportedError(f"{what}: no implementation is registered for this device.")
    errors = [UnsupportedError(f"{what}: {name}: {reason}") for name, reason in refused.items()]
    if len(errors) == 1:
        return errors[0]
    return ExceptionGroup(f"{what}: no implementation can serve {_shapes(inv)}", errors)


def _shapes(inv: Invocation) -> str:
    return ", ".join(f"{n}={a.dtype}{list(a.shape)}" for n, a in inv.call.arrays().items())
