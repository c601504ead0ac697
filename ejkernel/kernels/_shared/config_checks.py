"""Checks that configurations of several backends share."""

from typing import Any


def positive(cfg: Any, *names: str) -> None:
    """Refuses fields of a config that are not whole numbers from 1."""
    for name in names:
        value = getattr(cfg, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`Config`: {name}={value!r} must be a positive int.")
