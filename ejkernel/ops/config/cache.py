"""Configurations remembered in this process, and the overlay of a `with` block."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from ejkernel import _contexts
from ejkernel.ops.utils import serialize

CUT_SHORT = "not measured: the budget was used up"  # among the failures of a choice


@dataclasses.dataclass(frozen=True)
class Stored:
    """A measured choice: whose configuration it is, and what was seen."""

    implementation: str
    version: int
    config: Any
    times_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    complete: bool = True  # False: tuning was cut short and may go on
    # version by name of all that could serve the call then: with others, the choice is outdated
    rivals: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # the row that this was read from, in words, where that is not a record of this very call
    row: str = dataclasses.field(default="", compare=False)


class ConfigCache:
    """A mapping from keys to configurations, shared by all calls of a chain."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}
        self.generation = 0  # a change of what is known makes eager programs choose again

    def put(self, key: Any, cfg: Any) -> None:
        self._values[key] = cfg
        self.generation += 1

    def get(self, key: Any) -> Any | None:
        return self._values.get(key)

    def items(self) -> list[tuple[Any, Any]]:
        return list(self._values.items())

    def clear(self) -> None:
        self._values.clear()
        self.generation += 1

    def __contains__(self, key: Any) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)


class _Overlay:
    """Configurations frozen when a block is entered; equal by content, for jit's key."""

    def __init__(self, values: dict[Any, Any]):
        self.values = values
        text = serialize.stable_json({str(k): _typed(v) for k, v in values.items()})
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Overlay) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def _typed(value: Any) -> list[Any]:
    """A configuration with the names of its types: equal fields do not make equal configs."""
    kinds = [value, value.config] if isinstance(value, Stored) else [value]
    names = [f"{type(x).__module__}.{type(x).__qualname__}" for x in kinds]
    return [*names, serialize.describe(value)]


def overlaid(key: Any) -> Any | None:
    """The configuration that the innermost overlay has for a key."""
    overlay = _contexts.overlay.value
    return None if overlay is None else overlay.values.get(key)


@contextlib.contextmanager
def overlay_cache(cache: ConfigCache | Mapping[Any, Any]) -> Iterator[None]:
    """Puts configurations before all remembered ones inside a `with` block.

    The content is taken on entry. Functions jitted outside are traced again inside, and keep each
    their own configuration. Inner overlays hide outer ones key by key.
    """
    outer = _contexts.overlay.value.values if _contexts.overlay.value is not None else {}
    with _contexts.overlay(_Overlay({**outer, **dict(cache.items())})):
        yield
