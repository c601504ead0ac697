"""Triton's compiler: kernels for a named target, kept on disk, counted.

The folder is Triton's own cache, keyed by source, signature, constants, options, target and
Triton's version, so that a second process compiles nothing.
"""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel import _device, _folders, _settings
from ejkernel.errors import CompilationError, EjkernelWarning

_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2fnuz": "fp8e5b16",
    "bool": "i1",
    **{f"int{n}": f"i{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"u{n}" for n in (8, 16, 32, 64)},
}
_ALIGNED = [["tt.divisibility", 16]]
LOCK = threading.RLock()
counts = {"compiled": 0, "found": 0}


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """What a kernel is compiled for: ("cuda", 90) or ("hip", "gfx942")."""

    backend: str
    arch: int | str

    @classmethod
    def parse(cls, text: str) -> "GpuTarget":
        """From "cuda:sm_90" or "hip:gfx942"."""
        backend, _, arch = text.partition(":")
        if backend == "cuda" and arch.removeprefix("sm_").isdigit():
            return cls("cuda", int(arch.removeprefix("sm_")))
        if backend == "hip" and arch.startswith("gfx"):
            return cls("hip", arch)
        raise ValueError(f"A GPU target is 'cuda:sm_90' or 'hip:gfx942', by example; got {text!r}.")

    @classmethod
    def of(cls, capability: str) -> "GpuTarget":
        """From what a device names its architecture: "9.0" or "gfx942"."""
        if capability.startswith("gfx"):
            return cls("hip", capability)
        return cls("cuda", int(capability.replace(".", "")))

    @property
    def capability(self) -> str:
        """As devices name it: "9.0" or "gfx942"."""
        return f"{self.arch // 10}.{self.arch % 10}" if isinstance(self.arch, int) else self.arch

    def __str__(self) -> str:
        return f"{self.backend}:{'sm_' if self.backend == 'cuda' else ''}{self.arch}"


@dataclasses.dataclass(frozen=True)
class Signature:
    """A kernel's parameters: a dtype of an array, an int, or None; and its compile-time values."""

    parameters: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A kernel's machine code and what it needs."""

    name: str
    code: str  # PTX, or the path of an HSACO file
    ttir: str
    shared_bytes: int
    scratch: tuple[int, int]  # bytes and alignment of global memory for itself
    asm: Mapping[str, Any]


def has_type(dtype: Any) -> bool:
    """Whether Triton knows arrays of a dtype."""
    return jnp.dtype(dtype).name in _TYPES


def pointer_type(dtype: Any) -> str:
    """The name that Triton has for an array of a dtype."""
    return f"*{_TYPES[jnp.dtype(dtype).name]}"


def int_type(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def folded(kernel: Any, index: int, value: Any) -> bool:
    """Whether an int is compiled in: 1 is, so that a stride of 1 is known to be contiguous."""
    one = isinstance(value, int) and value == 1
    return one and not kernel.params[index].do_not_specialize


def _source(kernel: Any, signature: Signature) -> Any:
    from triton.compiler import ASTSource

    constants: dict[str, Any] = dict(signature.constants)
    types, attributes = {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, signature.parameters, strict=False)):
        if value is None or folded(kernel, i, value):
            constants[name] = value
        elif isinstance(value, int):
            types[name] = int_type(value)
            if value % 16 == 0 and not kernel.params[i].do_not_specialize:
                attributes[(i,)] = _ALIGNED
        else:
            types[name] = pointer_type(value)
            attributes[(i,)] = _ALIGNED
    types |= dict.fromkeys(constants, "constexpr")
    ordered = {name: types[name] for name in kernel.arg_names}
    return ASTSource(fn=kernel, signature=ordered, constexprs=constants, attrs=attributes)


def cache_folder() -> pathlib.Path:
    """Where compiled kernels are kept: Triton's own setting, else beside our other files."""
    import platformdirs
    from triton import knobs

    theirs = knobs.cache.dir
    if theirs and theirs != knobs.cache.get_triton_dir("cache"):
        return pathlib.Path(theirs)
    own = _settings.current().cache_dir or platformdirs.user_cache_dir("ejkernel")
    return pathlib.Path(own).expanduser() / "triton"


@functools.cache
def _writable(folder: pathlib.Path) -> str:
    """A folder, or one of this process alone in its place, with one warning."""
    try:
        _folders.make_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError as error:
        warnings.warn(
            f"Compiled Triton kernels cannot be kept in {folder}: {error}. This process keeps "
            "them to itself; set EJKERNEL_CACHE_DIR to a folder that can be written.",
            EjkernelWarning,
            stacklevel=2,
        )
        return tempfile.mkdtemp(prefix="ejkernel-triton-")


@contextlib.contextmanager
def _cache() -> Iterator[None]:
    """Directs Triton's cache, even where somebody switched it off, and counts its hits."""
    from triton import knobs

    def count(*, cache_hit: bool, **_: Any) -> None:
        counts["found" if cache_hit else "compiled"] += 1

    path = _writable(cache_folder())
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = path
        knobs.compilation.listener = count
        yield


@functools.lru_cache(maxsize=1024)
def compile_kernel(
    kernel: Any,
    signature: Signature,
    options: tuple[tuple[str, Any], ...],
    target: GpuTarget,
) -> Compiled:
    """A kernel's code for a target, from this process, from disk, or compiled now."""
    import triton
    from triton.backends.compiler import GPUTarget

    # fused multiply-add is part of the numbers we promise: not left to a changing default
    chosen = {"enable_fp_fusion": True} | dict(options)
    made = GPUTarget(target.backend, target.arch, 32 if target.backend == "cuda" else 64)
    source = _source(kernel, signature)
    with LOCK, _cache():
        try:
            result = triton.compile(source, target=made, options=chosen)
        except Exception as error:
            raise CompilationError(
                f"Triton kernel `{kernel.__name__}` does not compile for {target} with "
                f"{dict(signature.constants)} and {dict(options)}: {error}"
            ) from error
        metadata = result.metadata
        limit = _device.shared_memory(target.capability)
        if limit is not None and metadata.shared > limit:
            raise CompilationError(
                f"Triton kernel `{kernel.__name__}` takes {metadata.shared} bytes of shared memory "
                f"of the {limit} that {target} has, with {dict(signature.constants)} and "
                f"{dict(options)}: choose smaller blocks or fewer stages."
            )
        code = result.asm["ptx"] if target.backend == "cuda" else _hsaco_path(result)
    return Compiled(
        name=metadata.name,
        code=code,
        ttir=str(result.asm["ttir"]),
        shared_bytes=metadata.shared,
        scratch=(
            getattr(metadata, "global_scratch_size", 0) or 0,
            getattr(metadata, "global_scratch_align", 1) or 1,
        ),
        asm=result.asm,
    )


def _hsaco_path(result: Any) -> str:
    return next(str(path) for name, path in result.metadata_group.items() if "hsaco" in name)
