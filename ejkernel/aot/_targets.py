"""Devices that programs are compiled for without having them."""

import dataclasses
import importlib.util
import re

from ejkernel.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU as libtpu and JAX name it, and what one device of it multiplies."""

    name: str  # libtpu's
    model: str  # JAX's `device_kind`
    topology: str  # the smallest slice
    flop_per_cycle: int | None  # bfloat16, of one JAX device
    clock_hz: float | None


# One JAX device is a chip, except on v4 and 7x, where libtpu's slices have a device a core.
# MXUs of 128 x 128, four a core, to v5p; v6e from the vendor's peak; 7x has no public clock.
_CORE = 4 * 2 * 128 * 128
CHIPS = {
    "v4": Chip("v4", "TPU v4", "2x2x1", _CORE, 1.05e9),
    "v5e": Chip("v5e", "TPU v5 lite", "2x2", _CORE, 1.5e9),
    "v5p": Chip("v5p", "TPU v5", "2x2x1", 2 * _CORE, 1.75e9),
    "v6e": Chip("v6e", "TPU v6 lite", "2x2", 4 * _CORE, 1.75e9),
    "7x": Chip("tpu7x", "TPU7x", "2x2x1", None, None),
}
_GPUS = {
    "cuda:sm_80": "NVIDIA A100",
    "cuda:sm_90": "NVIDIA H200",
    "cuda:sm_100": "NVIDIA B200",
    "hip:gfx942": "AMD Instinct MI300X",
}
_EXAMPLES = (*(f"tpu:{name}" for name in CHIPS), "tpu:v5e:16x16", *_GPUS)


@dataclasses.dataclass(frozen=True)
class Target:
    """What to compile for; `str()` of it is how it is written."""

    kind: str  # "tpu", "cuda" or "hip"
    arch: str  # "v5e", "sm_90", "gfx942"
    slice: str | None = None  # of TPUs, such as "16x16"; None: one device

    def __str__(self) -> str:
        return ":".join(filter(None, (self.kind, self.arch, self.slice)))

    @property
    def chip(self) -> Chip:
        return CHIPS[self.arch]

    @property
    def model(self) -> str:
        """What JAX calls the device."""
        if self.kind == "tpu":
            return self.chip.model
        return _GPUS.get(str(self), f"{self.kind} {self.arch}")

    @property
    def capability(self) -> str | None:
        """As a device of JAX tells it."""
        if self.kind == "cuda":
            number = self.arch.removeprefix("sm_")
            return f"{number[:-1]}.{number[-1]}"
        return self.arch if self.kind == "hip" else None


def parse(text: str) -> Target:
    """A target from text such as "tpu:v5e", "tpu:v5e:16x16", "cuda:sm_90" or "hip:gfx942"."""
    kind, _, rest = text.strip().partition(":")
    arch, _, size = rest.partition(":")
    if kind == "tpu" and arch in CHIPS:
        axes = CHIPS[arch].topology.count("x") + 1
        if not size:
            return Target(kind, arch)
        if re.fullmatch("x".join([r"[1-9]\d*"] * axes), size):
            return Target(kind, arch, size)
        raise ValueError(
            f"target {text!r} must have a slice of {axes} sizes, such as "
            f"'tpu:{arch}:{CHIPS[arch].topology}'."
        )
    if kind == "cuda" and re.fullmatch(r"sm_\d{2,3}", rest):
        return Target(kind, rest)
    if kind == "hip" and re.fullmatch(r"gfx[0-9a-f]{3,4}", rest):
        return Target(kind, rest)
    raise ValueError(f"target {text!r} is not known; there are {', '.join(_EXAMPLES)}.")


def require(target: Target) -> None:
    """Raises unless the compiler of a target is installed here."""
    module = "libtpu" if target.kind == "tpu" else "triton"
    if importlib.util.find_spec(module) is None:
        name = "libtpu" if target.kind == "tpu" else "Triton"
        raise UnsupportedError(f"`{target}` needs {name}, which is not here: pip install {module}")
