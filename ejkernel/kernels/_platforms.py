"""What kernels are written in, what they run on, and where the package keeps them."""

import dataclasses
import enum
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from typing import Any

from ejkernel import _device, _settings


class Platform(enum.StrEnum):
    """What a kernel is written in."""

    TRITON = "triton"
    PALLAS = "pallas"
    CUDA = "cuda"
    CUDNN = "cudnn"
    XLA = "xla"


class Backend(enum.StrEnum):
    """What a kernel runs on."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"


@dataclasses.dataclass(frozen=True)
class Folder:
    """Where kernels of a platform live, what they run on, and what importing them takes."""

    package: str
    backend: Backend
    needs: str | None = None  # a module
    install: str = ""

    def usable(self, op: str) -> bool:
        """Whether there are kernels of an op, and what they need is installed."""
        needed = (*([self.needs] if self.needs else ()), self.package, f"{self.package}.{op}")
        return all(installed(module) for module in needed)


_FOLDERS = {
    Platform.TRITON: (
        Folder(
            "ejkernel.kernels._triton",
            Backend.GPU,
            "triton",
            "Triton is not installed: pip install 'ejkernel[gpu]'",
        ),
    ),
    Platform.PALLAS: (
        Folder("ejkernel.kernels._pallas.tpu", Backend.TPU),
        Folder("ejkernel.kernels._pallas.gpu", Backend.GPU),
    ),
    Platform.CUDA: (Folder("ejkernel.kernels._cuda", Backend.GPU),),
    Platform.CUDNN: (Folder("ejkernel.kernels._cudnn", Backend.GPU),),
    Platform.XLA: (Folder("ejkernel.kernels._xla", Backend.ANY),),
}


# run on a CPU when told to
_INTERPRETED = frozenset({Platform.TRITON, Platform.PALLAS, Platform.CUDA})


def why_not_on(platform: Platform, backend: Backend, target: _device.Target) -> str | None:
    """Why kernels of a platform and backend do not run on a device; None when they do."""
    on_cpu = platform in _INTERPRETED and target.kind == "cpu"
    if backend in (Backend.ANY, target.kind) or (on_cpu and _settings.current().interpret):
        return None
    reason = f"needs a {backend.upper()}; this call is for {target.kind}"
    if on_cpu:
        reason += " (EJKERNEL_INTERPRET=1 runs it there, in an interpreter)"
    return reason


def folders_of(op: str) -> Iterable[tuple[Platform, Folder]]:
    """Where kernels of an op may be; none where the op is not of this package."""
    if op not in packaged_ops():
        return ()
    return ((platform, folder) for platform, all_of in _FOLDERS.items() for folder in all_of)


def member(kind: type[enum.StrEnum], value: Any) -> Any:
    try:
        return kind(str(value).lower())
    except ValueError:
        allowed = ", ".join(repr(str(m)) for m in kind)
        raise ValueError(f"{kind.__name__} must be one of {allowed}; got {value!r}.") from None


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def packaged_ops() -> frozenset[str]:
    package = importlib.import_module("ejkernel.kernels._specs")
    found: Iterable[pkgutil.ModuleInfo] = pkgutil.iter_modules(package.__path__)
    return frozenset(m.name for m in found if not m.name.startswith("_"))
