"""Every `EJKERNEL_*` variable: read once, checked, overridable in a context that `jax.jit` sees."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ejkernel import _contexts
from ejkernel.errors import SettingsError

Parser = Callable[[str], Any]


def _choice(*allowed: str) -> tuple[Parser, str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(text)
        return text.lower()

    return parse, "one of " + ", ".join(allowed)


def _flag() -> tuple[Parser, str]:
    table = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return lambda text: table[text.lower()], "0 or 1"


def _number(kind: type, least: float) -> tuple[Parser, str]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value >= least or value == float("inf"):
            raise ValueError(text)
        return value

    return parse, f"a finite {'integer' if kind is int else 'number'}, at least {least}"


def _setting(default: Any, variable: str, parser: tuple[Parser, str], effect: str) -> Any:
    metadata = {"variable": variable, "parse": parser[0], "allowed": parser[1], "effect": effect}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Values of all settings; hashable, so that it can stand in a compilation key."""

    autotune_policy: str = _setting(
        "autotune",
        "EJKERNEL_AUTOTUNE_POLICY",
        _choice("autotune", "heuristics", "always"),
        "Whether a call is measured: autotune, where neither its own nor a near configuration is "
        "known; heuristics, never; always, wherever its own is not known.",
    )
    autotune_budget_s: float | None = _setting(
        None,
        "EJKERNEL_AUTOTUNE_BUDGET_S",
        _number(float, 0),
        "Seconds of tuning allowed per key, compilation included; 0 means heuristics. Default: 8 "
        "for a forward, 12 for a backward.",
    )
    log_autotune: bool = _setting(
        False, "EJKERNEL_LOG_AUTOTUNE", _flag(), "Log every candidate that is measured."
    )
    ops_stamp: str = _setting(
        "none",
        "EJKERNEL_OPS_STAMP",
        _choice("none", "hash", "json"),
        "What each call writes into the names of the lowered program.",
    )
    ops_record: bool = _setting(
        False, "EJKERNEL_OPS_RECORD", _flag(), "Record every call for a later tuning run."
    )
    triton_smem_limit: int | None = _setting(
        None,
        "EJKERNEL_TRITON_SMEM_LIMIT",
        _number(int, 1),
        "Shared memory in bytes that a Triton candidate may use; the smallest candidate stays in "
        "any case. Default: the device's limit.",
    )
    cache_dir: str | None = _setting(
        None,
        "EJKERNEL_CACHE_DIR",
        (str, "a folder"),
        "Where measured configurations and compiled kernels are kept. Default: the user's cache "
        "folder.",
    )
    typecheck: bool = _setting(
        True,
        "EJKERNEL_TYPECHECK",
        _flag(),
        "Check types and shapes of arguments on the first call of each kind.",
    )
    interpret: bool = _setting(
        False,
        "EJKERNEL_INTERPRET",
        _flag(),
        "Run device kernels in their interpreters, in calls on a CPU; `auto` then prefers them.",
    )
    platform: str | None = _setting(
        None,
        "EJKERNEL_PLATFORM",
        _choice("auto", "triton", "pallas", "cuda", "cudnn", "xla"),
        'The platform of calls that say `platform="auto"`.',
    )
    debug: bool = _setting(
        False,
        "EJKERNEL_DEBUG",
        _flag(),
        "Check the values of lengths, tables and ids, traced ones when the program runs; slow.",
    )


def read(environ: Mapping[str, str]) -> Settings:
    """Settings from a mapping of environment variables; empty values count as unset."""
    values = {}
    for field in dataclasses.fields(Settings):
        text = environ.get(field.metadata["variable"], "").strip()
        if not text:
            continue
        try:
            values[field.name] = field.metadata["parse"](text)
        except (ValueError, KeyError):
            raise SettingsError(
                f"{field.metadata['variable']}={text!r} is not allowed: "
                f"it must be {field.metadata['allowed']}."
            ) from None
    return Settings(**values)


@functools.cache
def _from_environment() -> Settings:
    return read(os.environ)


def current() -> Settings:
    """The settings in force: the innermost `override`, else the environment at first use."""
    return _contexts.settings.value or _from_environment()


@contextlib.contextmanager
def override(**values: Any) -> Iterator[Settings]:
    """Changes settings inside a `with` block; jitted functions are retraced for new values."""
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    for name, value in values.items():
        if name not in fields:
            raise SettingsError(f"{name!r} is not a setting: choose from {', '.join(fields)}.")
        metadata = fields[name].metadata
        text = str(int(value)) if isinstance(value, bool) else str(value)
        try:
            if value is None and fields[name].default is not None:
                raise ValueError(value)
            if value is not None:
                values[name] = metadata["parse"](text)
        except (ValueError, KeyError):
            raise SettingsError(
                f"{name}={value!r} is not allowed: it must be {metadata['allowed']}."
            ) from None
    settings = dataclasses.replace(current(), **values)
    with _contexts.settings(settings):
        yield settings


def using(settings: Settings) -> Any:
    """A context with exactly these settings, for a thread that works for another one."""
    return _contexts.settings(settings)
