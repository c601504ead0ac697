"""Configurations remembered in this process."""

from typing import Any


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

    def clear(self) -> None:
        self._values.clear()
        self.generation += 1

    def __contains__(self, key: Any) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
