"""Keys of configurations: what a call is, in text that every process writes alike."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax

from ejkernel import _device
from ejkernel.ops.utils import serialize

SCHEMA = 1


def device_fingerprint(target: _device.Target | None = None) -> str:
    """What identifies a kind of device: its kind, model and capability."""
    target = target or _device.find()
    return "|".join(filter(None, (target.kind, target.model, target.capability)))


def sharding_fingerprint(array: Any) -> str | None:
    """How an array is split over its mesh; None when it is not."""
    if isinstance(array, jax.core.Tracer):
        return of_sharding(jax.typeof(array).sharding)
    return of_sharding(getattr(array, "sharding", None))


def of_sharding(sharding: Any) -> str | None:
    """A sharding as text; None for one device or full copies."""
    spec = getattr(sharding, "spec", None)
    if spec is None or all(part is None for part in spec):
        return None
    return f"{dict(sharding.mesh.shape)}:{tuple(spec)}"


def describe_array(array: Any) -> dict[str, Any]:
    """Shape, dtype and the sharding that an array's type carries (Explicit mesh axes)."""
    aval = jax.typeof(array) if isinstance(array, jax.Array) else array
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "sharding": of_sharding(getattr(aval, "sharding", None)),
    }


def document(
    *, op: str, direction: str, platform: str, device: str, arrays: Mapping[str, Any], **rest: Any
) -> dict[str, Any]:
    """What a call is, as plain values; whatever changes the program changes it."""
    made = {
        "schema": SCHEMA,
        "op": op,
        "direction": direction,
        "platform": platform,
        "device": device,
        "arrays": {name: describe_array(array) for name, array in arrays.items()},
        "precision": jax.config.jax_default_matmul_precision,
        **rest,
    }
    return serialize.describe(made)


def key(call: Mapping[str, Any]) -> str:
    """The hash of a document, under which a configuration is remembered."""
    return hashlib.sha256(serialize.stable_json(call).encode()).hexdigest()


def default_key_builder_with_sharding(kernel: Any, args: Any, kwargs: Any, **where: Any) -> str:
    """The key of a call, with the shardings of its arrays, as a chain computes it.

    Args:
      kernel: The kernel.
      args: Its positional arguments.
      kwargs: Its keyword arguments.
      **where: `direction`, `wanted` or `cfg`, as in `Executor.invocation`.
    """
    from ejkernel.ops.execution.executor import Executor

    return Executor().invocation(kernel, *args, **dict(kwargs), **where).key
