"""CUDA sources built into libraries that XLA calls: by nvcc for a GPU, as plain C++ for a CPU."""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence

import jax

from ejkernel import _folders, _settings
from ejkernel.errors import CompilationError

HEADERS = pathlib.Path(__file__).parent / "cuda"
HOST = "host"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one kernel of a source takes of a GPU."""

    name: str
    registers: int
    spill_bytes: int


@functools.cache
def nvcc() -> pathlib.Path | None:
    """CUDA's compiler: on the path, where it is usually installed, or from NVIDIA's wheels."""
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None and (wheels := importlib.util.find_spec("nvidia")) is not None:
        folders = [pathlib.Path(p) for p in wheels.submodule_search_locations or ()]
        found = next((p for f in folders for p in sorted(f.glob("*/bin/nvcc"))), None)
    return None if found is None else pathlib.Path(found)


@functools.cache
def host_compiler() -> pathlib.Path | None:
    """A C++ compiler, for CUDA sources that run on a CPU."""
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return None if found is None else pathlib.Path(found)


def why_not(arch: str) -> str | None:
    """Why nothing is built for "sm_90", or for "host", on this machine; None when it is."""
    if arch == HOST:
        if host_compiler() is None:
            return "needs a C++ compiler to run on a CPU: no c++, g++ or clang++ is on the path"
        return None
    if nvcc() is None:
        return "needs CUDA's compiler: no nvcc is on the path or in /usr/local/cuda/bin"
    return None


def _files(source: pathlib.Path) -> Iterator[pathlib.Path]:
    """A source, and what it includes of its own folder and of ours."""
    todo, seen = [source], {source}
    while todo:
        path = todo.pop()
        yield path
        for name in _INCLUDE.findall(path.read_text()):
            places = (path.parent / name, HEADERS / name)
            found = next((p for p in places if p.is_file() and p not in seen), None)
            if found is not None:
                seen.add(found)
                todo.append(found)


def _flags(arch: str) -> list[str]:
    """What both compilers are told; XLA's headers are not ours to be warned of."""
    shared = ["-std=c++17", f"-I{HEADERS}", "-isystem", jax.ffi.include_dir()]
    if arch == HOST:
        # one rounding an operation, as the order of operations is what tests are about
        own = ["-DEJKERNEL_ON_HOST", "-O1", "-w", "-ffp-contract=off", "-fPIC", "-x", "c++"]
        return [*own, *shared]
    return ["-O3", "-w", *shared, f"-gencode=arch=compute_{_real(arch)},code=sm_{_real(arch)}"]


def _real(arch: str) -> str:
    """The number of an architecture; from Hopper on, with the letter of its own instructions."""
    number = arch.removeprefix("sm_")
    return f"{number}a" if int(number) >= 90 else number


@functools.cache
def _version(compiler: pathlib.Path) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


def _compiler(arch: str) -> pathlib.Path:
    found = host_compiler() if arch == HOST else nvcc()
    if found is None:
        raise CompilationError(f"A CUDA source {why_not(arch)}.")
    return found


def digest(source: pathlib.Path, arch: str) -> str:
    """Changes with the source, what it includes, the compiler, its flags, and XLA's headers."""
    parts = [_version(_compiler(arch)), importlib.metadata.version("jaxlib"), *_flags(arch)]
    parts += [path.read_text() for path in sorted(_files(source))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _run(source: pathlib.Path, arch: str, more: Sequence[str | os.PathLike[str]]) -> str:
    """Compiles a source; the compiler's words, or an error with its first lines."""
    command = [_compiler(arch), *_flags(arch), *more, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = f"{done.stdout}{done.stderr}"
    if done.returncode:
        errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()
        raise CompilationError(
            f"{source.name} does not compile for {arch} with {_compiler(arch).name}: "
            + "\n".join(errors[:5])
        )
    return said


def _folder() -> pathlib.Path:
    """Where libraries are kept: nobody else may write there, since they are loaded."""
    import platformdirs

    own = _settings.current().cache_dir or platformdirs.user_cache_dir("ejkernel")
    folder = pathlib.Path(own).expanduser() / "cuda"
    try:
        _folders.make_private(folder)
        status = folder.stat()
    except OSError as error:
        problem = error.strerror or str(error)
    else:
        problem = _folders.problem(folder)
        if problem is None and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            problem = "others may write there"
    if problem is None:
        return folder
    return _folders.of_this_process(folder, "Compiled CUDA libraries", problem)


def build(source: pathlib.Path, arch: str) -> pathlib.Path:
    """The library of a source for "sm_90" or "host", from disk or built now."""
    folder = _folder()
    path = folder / f"{source.stem}-{arch}-{digest(source, arch)}.so"
    if not path.exists():
        handle, temporary = tempfile.mkstemp(suffix=".so", prefix=f".{source.stem}-", dir=folder)
        os.close(handle)
        try:
            pic = () if arch == HOST else ("-Xcompiler", "-fPIC")
            _run(source, arch, ["-shared", *pic, "-o", temporary])
            os.replace(temporary, path)  # two processes may build at once: both have the same
        finally:
            pathlib.Path(temporary).unlink(missing_ok=True)
    return path


@functools.cache
def _loaded(path: pathlib.Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


_names: set[str] = set()  # that XLA knows


def _registered(path: pathlib.Path, function: str, platform: str) -> str:
    """A name says what the library was built from, and XLA takes each only once.

    The same library in another folder is another one to XLA.
    """
    if (name := f"ejkernel_{path.stem}_{function}") in _names:
        return name
    library = _loaded(path)
    if not hasattr(library, function):
        raise CompilationError(
            f"{path.name.partition('-')[0]}.cu defines no handler {function!r}; "
            f"EJKERNEL_HANDLER({function}, …) defines one."
        )
    handler = jax.ffi.pycapsule(getattr(library, function))
    jax.ffi.register_ffi_target(name, handler, platform=platform)
    _names.add(name)
    return name


def register(source: pathlib.Path, function: str, arch: str) -> str:
    """The name by which XLA calls a handler of a source; built and loaded when first asked for."""
    with _lock:
        path = build(source, arch)
        return _registered(path, function, "cpu" if arch == HOST else "CUDA")


@contextlib.contextmanager
def reversed_threads(source: str | os.PathLike[str]) -> Iterator[None]:
    """Calls of a `.cu` file on a CPU run the threads of a block from the last to the first.

    A kernel that lacks a barrier then gives other numbers.
    """
    with _lock:
        library = _loaded(build(pathlib.Path(source).resolve(), HOST))
    library.ejkernel_reverse_threads(True)
    try:
        yield
    finally:
        library.ejkernel_reverse_threads(False)


_USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL
)


def usage(source: pathlib.Path, arch: str) -> list[Usage]:
    """What ptxas says of each kernel of a source: the most that any of its instances takes."""
    return list(_usage(source, arch, digest(source, arch)))


@functools.lru_cache(maxsize=64)
def _usage(source: pathlib.Path, arch: str, version: str) -> tuple[Usage, ...]:
    del version  # a part of the key
    with tempfile.TemporaryDirectory() as folder:
        said = _run(source, arch, ["-cubin", "-Xptxas", "-v", "-o", f"{folder}/out.cubin"])
    found: dict[str, Usage] = {}
    for symbol, stack, registers in _USAGE.findall(said):
        name = _readable(symbol)
        most = found.get(name, Usage(name, 0, 0))
        registers, spills = max(int(registers), most.registers), max(int(stack), most.spill_bytes)
        found[name] = Usage(name, registers, spills)
    return tuple(found[name] for name in sorted(found))


def _readable(symbol: str) -> str:
    """The name of a kernel in its source, from the symbol that a C++ compiler makes of it."""
    filt = shutil.which("c++filt") or shutil.which("cu++filt")
    if filt is None:
        return symbol
    done = subprocess.run([filt, symbol], capture_output=True, text=True, check=False)
    text = done.stdout.strip().replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", text)[0] or symbol
