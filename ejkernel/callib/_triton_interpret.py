"""Triton kernels on the CPU, in Triton's interpreter.

The interpreter runs functions whose helpers are interpreted too, so each kernel gets a twin: a copy
whose globals hold the twins of every `@triton.jit` helper. Compiled and interpreted kernels then
live in one process. The interpreter patches `triton.language` while it runs: one lock for all.
"""

import contextlib
import functools
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ejkernel.callib._triton_compile import LOCK, pointer_type


@functools.lru_cache(maxsize=1024)
def _twin(kernel: Any) -> Any:
    """An interpreted copy of a `@triton.jit` function and, through its globals, of its helpers."""
    from triton.runtime.interpreter import InterpretedFunction

    original = kernel.fn
    names = _names(original.__code__)
    scope = {
        name: _replaced(value) if name in names else value
        for name, value in original.__globals__.items()
    }
    copy = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__annotations__ = original.__annotations__
    copy.__module__ = original.__module__
    return InterpretedFunction(copy)


def _names(code: types.CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _replaced(value: Any) -> Any:
    """A helper's twin; for a module of helpers, one with their twins; anything else as it is."""
    from triton.runtime.jit import JITFunction

    if isinstance(value, JITFunction):
        return _twin(value)
    if isinstance(value, types.ModuleType) and not value.__name__.startswith("triton"):
        content = vars(value)
        if any(isinstance(v, JITFunction) for v in content.values()):
            return types.SimpleNamespace(
                **{
                    name: _twin(v) if isinstance(v, JITFunction) else v
                    for name, v in content.items()
                    if not name.startswith("__")
                }
            )
    return value


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    """Patches Triton's language for the interpreter, once for a whole run, and puts all back.

    Triton patches again at each call of a helper, which is slow, and puts that back never.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    with contextlib.suppress(ImportError):  # Triton imports it later on, and wants them unpatched
        import triton.experimental.gluon  # noqa: F401
    core = tl.core
    places = (tl, core, tl.math, tl.standard, core.tensor, core.dtype, core.condition)
    kept = [(place, dict(vars(place))) for place in (*places, core.tensor_descriptor_base)]
    twins = [  # of the functions that Triton itself writes in Triton
        (module, name, _twin(value))
        for module in (tl, tl.standard)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    ]
    patch = interpreter._patch_lang
    nothing = types.SimpleNamespace(restore=lambda: None)
    try:
        for module, name, twin in twins:
            setattr(module, name, twin)
        patch(types.SimpleNamespace(__globals__={"tl": tl, "core": core}))
        interpreter._patch_lang = lambda fn: nothing
        yield
    finally:
        interpreter._patch_lang = patch
        for place, content in kept:
            _put_back(place, content)


def _put_back(place: Any, content: dict[str, Any]) -> None:
    for name in vars(place).keys() - content.keys():
        delattr(place, name)
    for name, value in content.items():
        if vars(place)[name] is not value:
            setattr(place, name, value)


class _Tensor:
    """What the interpreter needs to know of a NumPy array to take it for a tensor."""

    def __init__(self, array: np.ndarray):
        import triton.language as tl

        self.array = array
        self.dtype = tl.str_to_ty(pointer_type(array.dtype), None).element_ty

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_Tensor":
        return self

    def cpu(self) -> "_Tensor":
        return self

    def copy_(self, other: "_Tensor") -> None:
        pass  # memory is shared

    def new_empty(self, *_: Any, **__: Any) -> "_Tensor":
        return _Tensor(self.array)

    def set_(self, storage: "_Tensor", *_: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)


def poisoned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Memory that shows what a kernel forgot to write."""
    array = np.empty(shape, dtype)
    try:
        array.fill(np.nan)
    except (ValueError, OverflowError):
        array.fill(np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 1)
    return array


def run(
    kernel: Any, parameters: Sequence[Any], constants: dict[str, Any], grid: tuple[int, ...]
) -> None:
    """Runs a kernel on NumPy arrays, ints and None, in place."""
    given = [_Tensor(p) if isinstance(p, np.ndarray) else p for p in parameters]
    with LOCK:  # compiling must not see the patched language, nor must the making of a twin
        twin = _twin(kernel)
        with _interpreted_language(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # as a device: a row of nan is one
            twin.run(*given, grid=grid, warmup=False, **constants)
