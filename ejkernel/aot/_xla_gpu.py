"""Whole programs compiled by XLA for an H200 that is not here, with JAX's plugin for CUDA."""

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

TARGET = "cuda:sm_90"
# What XLA asks a GPU when it has one, of an H200.
_DEVICE = """
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  clock_rate_ghz: 1.98 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  device_memory_size: 151397597184
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 8 }
"""


def why_not(target: Any, what: str) -> str | None:
    """Why programs are not compiled for a target here; None when they are."""
    if str(target) != TARGET:
        return f"{what} compiled for {TARGET} alone, where no GPU is"
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return f"{what} compiled by JAX's plugin for CUDA: pip install 'jax[cuda13]'"
    return None


def devices(count: int) -> list[Any]:
    """H200s of one machine, to compile for."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda", topology_name="gpu", topology=f"1x1x{count}", target_config=_DEVICE
    ).devices


def compiled(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """A program for an H200."""
    place = SingleDeviceSharding(devices(1)[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), inputs)
    return jax.jit(fn).trace(*placed).lower(lowering_platforms=("cuda",)).compile()


def numbers(program: Any) -> dict[str, Any]:
    """What a report says of a whole program."""
    memory = program.memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "launches": launches(program.as_text()),
    }


@dataclasses.dataclass
class _Work:
    """What a computation of a program starts on the device."""

    own: int = 0
    called: list[tuple[str, int | None]] = dataclasses.field(default_factory=list)  # with times


_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = .*?[\])}] ([a-z][a-z\-]*)\(")
_BODY = re.compile(r"body=%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:to_apply|calls)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# names for memory, and ends of what another operation started
_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("copy-done", "async-done", "async-update", "partition-id", "replica-id"),
    }
)
_ALLOCATION = 'custom_call_target="AllocateBuffer"'


def launches(text: str) -> int | None:
    """How many kernels and copies an optimised program starts; None if a loop's length is unknown.

    Of the branches of a condition, the one with the most counts.
    """
    found, entry, current = {}, "", _Work()
    for line in text.splitlines():
        if made := _COMPUTATION.match(line):
            current = found[made[2]] = _Work()
            entry = made[2] if made[1] else entry
        elif made := _OPERATION.match(line):
            _count(made[1], line, current)
    return _total(found, entry)


def _count(operation: str, line: str, work: _Work) -> None:
    if operation == "while":
        trips, body = _TRIPS.search(line), _BODY.search(line)
        if body is not None:
            work.called.append((body[1], int(trips[1]) if trips else None))
    elif operation == "conditional":
        branches = _BRANCHES.search(line)
        names = branches[1] if branches else ""
        work.called.append((names, 1))
    elif operation == "call" and (made := _CALLED.search(line)):
        work.called.append((made[1], 1))
    elif operation not in _FREE and _ALLOCATION not in line:
        work.own += 1


def _total(found: dict[str, _Work], names: str) -> int | None:
    """Of a computation, or of the largest of several that are separated by commas."""
    each = []
    for name in (part.strip().removeprefix("%") for part in names.split(",")):
        work = found[name]
        total = work.own
        for called, times in work.called:
            inner = _total(found, called)
            if inner is None or times is None:
                return None
            total += times * inner
        each.append(total)
    return max(each)
