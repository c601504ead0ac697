"""What the configuration of every Triton entry needs: checks, launch options, shared memory."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ejkernel import _device, _settings
from ejkernel._device import Target
from ejkernel.kernels._shared import precision

_UNKNOWN_SHARED = 99 << 10  # bytes to a program that any NVIDIA GPU since 2020 has


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Warps to a program, depth of the pipeline, and a limit of registers."""

    num_warps: int = 4
    num_stages: int = 2
    max_registers: int = 0  # of a thread; 0 leaves it to the compiler

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"`Config`: num_warps={self.num_warps!r} must be 1, 2, 4, 8 or 16.")
        if not isinstance(self.num_stages, int) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"`Config`: num_stages={self.num_stages!r} must be in [1, 8].")
        if self.max_registers not in range(256):
            raise ValueError(f"`Config`: max_registers={self.max_registers!r} must be in [0, 255].")

    def launch(self) -> dict[str, Any]:
        """Options of `triton_call`."""
        options = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "options": options}


Config = TypeVar("Config", bound=LaunchConfig)


def check_blocks(cfg: LaunchConfig, *names: str) -> None:
    """Refuses sizes that tiles of a product cannot have."""
    for name in names:
        value = getattr(cfg, name)
        if not isinstance(value, int) or value < 16 or value & (value - 1):
            raise ValueError(f"`Config`: {name}={value!r} must be a power of two, at least 16.")


def is_amd(target: Target) -> bool:
    return target.capability is not None and target.capability.startswith("gfx")


def shared_limit(target: Target) -> int:
    """Bytes of shared memory that a program may use on a device."""
    asked = _settings.current().triton_smem_limit
    if asked is not None:
        return asked
    return _device.shared_memory(target.capability) or _UNKNOWN_SHARED


def fitting(
    guesses: Sequence[Config], shared_bytes: Callable[[Config], int], target: Target
) -> Sequence[Config]:
    """The guesses that fit into shared memory; if none does, the last one, the smallest."""
    limit = shared_limit(target)
    return [cfg for cfg in guesses if shared_bytes(cfg) <= limit] or guesses[-1:]


def misfit(cfg: Any, needed: int, target: Target) -> str | None:
    """Why a config takes too much shared memory; None if it does not."""
    limit = shared_limit(target)
    if needed <= limit:
        return None
    return f"{cfg} takes about {needed} bytes of shared memory, of {limit}"


def from_params(guess: Config, settings: dict[str, Any], tile: Sequence[str]) -> Config:
    """The guess with other settings; a limit of registers is for the tile it was measured with."""
    cfg = dataclasses.replace(guess, **settings)
    if all(getattr(cfg, name) == getattr(guess, name) for name in (*tile, "num_warps")):
        return cfg
    return dataclasses.replace(cfg, max_registers=0)


def dot_precision(dtype: Any) -> str:
    """What a product asks Triton for, which has nothing below TensorFloat-32."""
    if jnp.dtype(dtype) != jnp.float32:
        return "ieee"  # without effect on narrower inputs
    exact = precision.dot_precision(dtype) == jax.lax.Precision.HIGHEST
    return "ieee" if exact else "tf32"
