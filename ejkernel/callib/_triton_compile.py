"""Triton's compiler: kernels for a named target, kept on disk, counted.

The folder is Triton's own cache, keyed by source, signature, constants, options, target and
Triton's version, so that a second process compiles nothing.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel import _device, _folders, _settings
from ejkernel.callib import _triton_arguments as arguments
from ejkernel.callib import _triton_bundles, _triton_source
from ejkernel.errors import CompilationError

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
    """A tree for each parameter of a kernel; its leaves are dtypes, ints, `Exact` and None."""

    parameters: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A kernel's machine code and what it needs."""

    name: str
    code: str  # PTX, or the path of an HSACO file
    ttir: str
    num_warps: int  # which a kernel with warps of several kinds has more of than it was given
    shared_bytes: int
    scratch: tuple[int, int]  # bytes and alignment of global memory for itself
    asm: Mapping[str, Any]


def has_type(dtype: Any) -> bool:
    """Whether Triton knows arrays of a dtype."""
    try:
        return jnp.dtype(dtype).name in _TYPES
    except TypeError:  # one of JAX's own, as of keys
        return False


def pointer_type(dtype: Any) -> str:
    """The name that Triton has for an array of a dtype."""
    return f"*{_TYPES[jnp.dtype(dtype).name]}"


def int_type(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@functools.cache
def _source_type() -> Any:
    """Triton's source, under a key that tells types and values read through modules apart."""
    from triton.compiler import ASTSource

    class Source(ASTSource):
        def hash(self) -> str:
            plain = bool | int | float | str | tuple
            exact = [
                (place, type(v).__qualname__, repr(v) if isinstance(v, plain) else "")
                for place, v in sorted(self.constants.items())
            ]
            text = f"{super().hash()}-{exact}-{_triton_source.constants(self.fn)}"
            return hashlib.sha256(text.encode()).hexdigest()

    return Source


def _source(kernel: Any, signature: Signature) -> Any:
    """Triton's source; values and attributes of members are keyed by their indices."""
    constants, attributes = {}, {}

    def name(tree: Any, path: arguments.Path, place: tuple[int, ...]) -> Any:
        if isinstance(tree, arguments.Bundle):
            members = zip(tree.kind._fields, tree.members, strict=True)
            return tree.kind(
                *(name(x, (*path, field), (*place, i)) for i, (field, x) in enumerate(members))
            )
        if isinstance(tree, arguments.Exact):
            constants[place] = tree.value
        elif tree is None or arguments.folded(kernel, path, tree):
            constants[place] = tree
        elif isinstance(tree, int):
            if tree % 16 == 0 and not arguments.unspecialised(kernel, path):
                attributes[place] = _ALIGNED
            return int_type(tree)
        else:
            attributes[place] = _ALIGNED
            return pointer_type(tree)
        return "constexpr"

    pairs = zip(kernel.arg_names, signature.parameters, strict=True)
    types = {n: name(tree, (n,), (i,)) for i, (n, tree) in enumerate(pairs)}
    return _source_type()(fn=kernel, signature=types, constexprs=constants, attrs=attributes)


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
def _movable_manager() -> Any:
    """Triton's cache on disk, whose folder may be moved or carried to another machine."""
    from triton.runtime.cache import FileCacheManager

    class Movable(FileCacheManager):
        def get_group(self, filename: str) -> dict[str, str] | None:
            """The files of a kernel where the folder is now; Triton notes where they were made."""
            folder = pathlib.Path(self.cache_dir)
            group = folder / f"__grp__{filename}"
            if not group.exists():
                return None
            names = json.loads(group.read_text())["child_paths"]
            return {name: str(folder / name) for name in names if (folder / name).exists()}

    return Movable


@contextlib.contextmanager
def _cache(folder: pathlib.Path, anew: bool) -> Iterator[None]:
    """Directs Triton's cache, even where somebody switched it off, and counts its hits."""
    from triton import knobs

    def count(*, cache_hit: bool, **_: Any) -> None:
        counts["found" if cache_hit else "compiled"] += 1

    with contextlib.suppress(OSError):
        _folders.make_private(folder)
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(folder)
        if knobs.cache.manager_class is None:
            knobs.cache.manager_class = _movable_manager()
        knobs.compilation.listener = count
        knobs.compilation.store_binary_only = False  # a launch needs the others
        if anew:
            knobs.compilation.always_compile = True
        yield


# what reading raises when a file was cut short, emptied, removed or written by another
_UNREADABLE = (json.JSONDecodeError, UnicodeDecodeError, LookupError, FileNotFoundError)


def _compiled(source: Any, target: Any, options: dict[str, Any]) -> Any:
    """Triton's result, from disk or made now; what cannot be kept is kept by this process."""
    folder = cache_folder()
    try:
        return _kept_in(folder, source, target, options)
    except OSError:
        if (problem := _folders.problem(folder)) is None:  # of the compiler's own
            raise
    own = _folders.of_this_process(folder, "Compiled Triton kernels", problem)
    return _kept_in(own, source, target, options)


def _kept_in(folder: pathlib.Path, source: Any, target: Any, options: dict[str, Any]) -> Any:
    """Triton's result with its files in a folder; what cannot be read there is compiled again."""
    import triton

    with _cache(folder, anew=False), contextlib.suppress(*_UNREADABLE):
        result = triton.compile(source, target=target, options=options)
        if result.asm.get("ttir") and result.asm.get(
            "ptx" if target.backend == "cuda" else "hsaco"
        ):
            return result
    with _cache(folder, anew=True):
        return triton.compile(source, target=target, options=options)


@functools.lru_cache(maxsize=1024)
def compile_kernel(
    kernel: Any,
    signature: Signature,
    options: tuple[tuple[str, Any], ...],
    target: GpuTarget,
) -> Compiled:
    """A kernel's code for a target, from this process, from disk, or compiled now."""
    from triton.backends.compiler import GPUTarget

    # fused multiply-add is part of the numbers we promise: not left to a changing default
    chosen = {"enable_fp_fusion": True, "debug": bool(kernel.debug)} | dict(options)
    _check_options(kernel, chosen, target)
    made = GPUTarget(target.backend, target.arch, 32 if target.backend == "cuda" else 64)
    source = _source(kernel, signature)
    how = f"{arguments.constants(kernel.arg_names, signature.parameters)} and {dict(options)}"
    with LOCK:
        try:
            with _triton_bundles.whole():
                result = _compiled(source, made, chosen)
        except Exception as error:
            raise CompilationError(
                f"Triton kernel `{kernel.__name__}` does not compile for {target} with {how}: "
                f"{error}"
            ) from error
        metadata = result.metadata
        limit = _device.shared_memory(target.capability)
        if limit is not None and metadata.shared > limit:
            raise CompilationError(
                f"Triton kernel `{kernel.__name__}` takes {metadata.shared} bytes of shared memory "
                f"of the {limit} that {target} has, with {how}: choose smaller blocks or fewer "
                "stages."
            )
        code = result.asm["ptx"] if target.backend == "cuda" else _hsaco_path(result)
    return Compiled(
        name=metadata.name,
        code=code,
        ttir=str(result.asm["ttir"]),
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        scratch=(
            getattr(metadata, "global_scratch_size", 0) or 0,
            getattr(metadata, "global_scratch_align", 1) or 1,
        ),
        asm=result.asm,
    )


def _hsaco_path(result: Any) -> str:
    return next(str(path) for name, path in result.metadata_group.items() if "hsaco" in name)


@functools.cache
def known_options(backend: str) -> frozenset[str]:
    """The options of Triton's compiler for "cuda" or "hip"."""
    if backend == "cuda":
        from triton.backends.nvidia.compiler import CUDAOptions as Options
    else:
        from triton.backends.amd.compiler import HIPOptions as Options
    return frozenset(f.name for f in dataclasses.fields(Options))


def _check_options(kernel: Any, options: Mapping[str, Any], target: GpuTarget) -> None:
    """Triton passes over options that it does not know."""
    known = known_options(target.backend)
    if unknown := sorted(options.keys() - known):
        raise ValueError(
            f"Triton kernel `{kernel.__name__}`: `options` has {unknown}, which Triton's compiler "
            f"for {target} does not know; it knows {sorted(known)}."
        )
