"""JSON that is equal in every process: configs, dtypes, enums, dataclasses and arrays."""

import dataclasses
import enum
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np


def to_builtins(value: Any) -> Any:
    """Plain lists, dicts, numbers and strings that stand for a value."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return to_builtins(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_builtins(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_builtins(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((to_builtins(v) for v in value), key=stable_json)
    if isinstance(value, list | tuple):
        return [to_builtins(v) for v in value]
    if isinstance(value, np.generic):
        return to_builtins(value.item())
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    if isinstance(value, jax.Array | np.ndarray):
        array = np.asarray(value)
        return {"shape": list(array.shape), "dtype": array.dtype.name, "data": array.tolist()}
    if isinstance(value, jax.ShapeDtypeStruct):
        return {"shape": list(value.shape), "dtype": np.dtype(value.dtype).name}
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"`to_json`: cannot serialize a {type(value).__name__}: {value!r}.")


def describe(value: Any) -> Any:
    """Like `to_builtins`, with the text of what has no JSON; object addresses are left out."""
    if isinstance(value, dict):
        return {str(k): describe(v) for k, v in value.items()}
    try:
        return to_builtins(value)
    except TypeError:
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        return f"{type(value).__module__}.{type(value).__qualname__}: {text}"


_PLAIN = (bool, int, float, str)


def stable_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(to_builtins(value), sort_keys=True, separators=(",", ":"))


def to_json(value: Any) -> str:
    """JSON text of a config or other value."""
    return stable_json(value)


def from_json(text: str, cls: type) -> Any:
    """The value of type `cls` that `to_json` wrote, checked against the types of its fields."""
    return msgspec.json.decode(text, type=cls, dec_hook=_decode)


def from_builtins(plain: Any, cls: type) -> Any:
    """The value of type `cls` that `to_builtins` gave; unknown fields are refused."""
    if dataclasses.is_dataclass(cls) and isinstance(plain, dict):
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(plain) - known):
            raise ValueError(f"`{cls.__name__}` has no {unknown}")
    return msgspec.convert(plain, cls, dec_hook=_decode)


def _decode(cls: type, plain: Any) -> Any:
    """Types that JSON does not have: dtypes by name, arrays by shape, dtype and data."""
    if issubclass(cls, np.dtype):
        return jnp.dtype(plain)
    if issubclass(cls, np.ndarray | jax.Array):
        data = np.asarray(plain["data"], jnp.dtype(plain["dtype"])).reshape(plain["shape"])
        return jnp.asarray(data) if issubclass(cls, jax.Array) else data
    raise NotImplementedError(f"`from_json`: cannot read a {cls.__name__}")
