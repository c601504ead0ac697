"""Triton kernels on the CPU, in Triton's interpreter.

The interpreter runs functions whose helpers are interpreted too, so each kernel gets a twin: a copy
whose globals hold the twins of every `@triton.jit` helper. Compiled and interpreted kernels then
live in one process. The interpreter patches `triton.language` while it runs: one lock for all.
"""

import contextlib
import dataclasses
import functools
import types
import warnings
from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np

from ejkernel.callib import _triton_arguments as arguments
from ejkernel.callib import _triton_check
from ejkernel.callib._triton_arguments import Exact
from ejkernel.callib._triton_compile import LOCK, pointer_type

_unfinished: dict[Any, Any] = {}  # twins whose globals are being filled


@functools.lru_cache(maxsize=1024)
def _twin(kernel: Any) -> Any:
    """An interpreted copy of a `@triton.jit` function and, through its globals, of its helpers."""
    from triton.runtime.interpreter import InterpretedFunction

    if kernel in _unfinished:  # a member that it reads may have its own name
        return _unfinished[kernel]
    original = kernel.fn
    scope: dict[str, Any] = {}
    copy = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__annotations__ = original.__annotations__
    copy.__module__ = original.__module__
    _unfinished[kernel] = twin = InterpretedFunction(copy)
    try:
        names = _names(original.__code__)
        for name, value in original.__globals__.items():
            scope[name] = _replaced(value, names) if name in names else value
        cells = original.__closure__ or ()
        # Triton compiles the text of the function anew, where all names are global
        for name, cell in zip(original.__code__.co_freevars, cells, strict=True):
            scope[name] = _replaced(cell.cell_contents, names)
    finally:
        del _unfinished[kernel]
    return twin


def _names(code: types.CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _replaced(
    value: Any, names: Set[str] = frozenset(), known: dict[Any, Any] | None = None
) -> Any:
    """A helper's twin; for a module of helpers, what has one of the names; else as it is."""
    from triton.runtime.jit import JITFunction

    if isinstance(value, JITFunction):
        return _twin(value)
    if not isinstance(value, types.ModuleType) or value.__name__.startswith("triton"):
        return value
    content = {name: x for name, x in vars(value).items() if name in names}
    if not any(isinstance(x, JITFunction | types.ModuleType) for x in content.values()):
        return value
    known = {} if known is None else known  # modules may know each other
    if value not in known:
        known[value] = made = types.SimpleNamespace()
        vars(made).update({name: _replaced(x, names, known) for name, x in content.items()})
    return known[value]


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
    core, builder = tl.core, interpreter.InterpreterBuilder
    places = (tl, core, tl.math, tl.standard, core.tensor, core.dtype, core.condition)
    reduction = interpreter.ReduceScanOpInterface
    places = (*places, core.tensor_descriptor_base, builder, reduction)
    kept = [(place, dict(vars(place))) for place in places]
    twins = [  # of the functions that Triton itself writes in Triton
        (module, name, _twin(value))
        for module in (tl, tl.standard)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    ]
    patch, convert = interpreter._patch_lang, interpreter._implicit_cvt
    # compile-time members of a bundle reach a kernel as plain values, as its own constants do
    unwrap = lambda value: value.value if isinstance(value, tl.constexpr) else convert(value)
    nothing = types.SimpleNamespace(restore=lambda: None)
    made, options = interpreter.interpreter_builder, interpreter.interpreter_builder.options
    numpy_dtype = interpreter._get_np_dtype
    try:
        for module, name, twin in twins:
            setattr(module, name, twin)
        patch(types.SimpleNamespace(__globals__={"tl": tl, "core": core}))
        interpreter._patch_lang = lambda fn: nothing
        interpreter._implicit_cvt = unwrap
        # Sums and products of integers would be made again in 64 bits, which takes half of the
        # time, for an assertion that the interpreter leaves out.
        made.options = dataclasses.replace(options, sanitize_overflow=False)
        interpreter._get_np_dtype = _numpy_dtypes(numpy_dtype)
        for name, method in _with_bfloat16(builder).items():
            setattr(builder, name, method)
        reduction.apply = _reduction_with_bfloat16(reduction.apply)
        yield
    finally:
        interpreter._patch_lang, interpreter._implicit_cvt = patch, convert
        interpreter._get_np_dtype, made.options = numpy_dtype, options
        for place, content in kept:
            _put_back(place, content)


def _numpy_dtypes(find: Any) -> Any:
    """Triton's function for the NumPy dtype of a type, which makes a table at each call, cached."""
    known: dict[str, Any] = {}

    def cached(kind: Any) -> Any:
        scalar = kind.scalar
        if (found := known.get(scalar.name)) is None:
            found = known[scalar.name] = find(scalar)
        return found

    return cached


def _is_bits(x: Any) -> bool:
    return x.dtype.scalar.name == "bf16"


def _wide(x: Any) -> Any:
    """A tensor of the interpreter, as float32 if it is kept as the bits of bfloat16."""
    if not _is_bits(x):
        return x
    import ml_dtypes
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(x.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)


def _narrow(x: Any) -> Any:
    """Bits of bfloat16; what a comparison gave stays."""
    import ml_dtypes
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not np.issubdtype(x.data.dtype, np.floating):
        return x
    return TensorHandle(x.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)


def _with_bfloat16(builder: Any) -> dict[str, Any]:
    """Methods of the interpreter, which computes with the bits of bfloat16, mended."""
    import triton.language as tl

    names = ("create_dot", "cast_impl", "create_fp_to_fp", "binary_op", "unary_op", "create_fma")
    dot, cast, convert, binary, unary, fma = (getattr(builder, name) for name in names)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *more: Any) -> Any:
        return dot(self, _wide(a), _wide(b), d, *more)

    def cast_impl(self: Any, x: Any, kind: Any) -> Any:
        if kind.scalar == tl.bfloat16:
            return x if _is_bits(x) else _narrow(cast(self, x, tl.float32))
        return cast(self, _wide(x), kind)

    def create_fp_to_fp(self: Any, x: Any, kind: Any, rounding: Any) -> Any:
        if _is_bits(x) or (kind.scalar == tl.bfloat16 and "RTZ" not in str(rounding)):
            return cast_impl(self, x, kind)
        return convert(self, x, kind, rounding)

    def binary_op(self: Any, x: Any, y: Any, op: Any) -> Any:
        made = binary(self, _wide(x), _wide(y), op)
        return _narrow(made) if _is_bits(x) or _is_bits(y) else made

    def unary_op(self: Any, x: Any, op: Any) -> Any:
        made = unary(self, _wide(x), op)
        return _narrow(made) if _is_bits(x) else made

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        made = fma(self, _wide(x), _wide(y), _wide(z))
        return _narrow(made) if _is_bits(z) else made

    def get_bf16(self: Any, value: float) -> Any:  # not there in Triton 3.6
        return _narrow(self.get_fp32(value))

    mended = (create_dot, cast_impl, create_fp_to_fp, binary_op, unary_op, create_fma)
    return dict(zip(names, mended, strict=True)) | {"get_bf16": get_bf16}


def _reduction_with_bfloat16(apply: Any) -> Any:
    """Reductions and scans of the interpreter, mended likewise."""
    import triton.language as tl

    def tensor(handle: Any, like: Any) -> Any:
        shape = list(like.shape)
        kind = tl.block_type(handle.dtype, shape) if shape else handle.dtype
        return tl.core.tensor(handle, kind)

    def mended(self: Any, given: Any) -> Any:
        if not isinstance(given, tuple):
            return mended(self, (given,))[0]
        bits = [_is_bits(x) for x in given]
        wide = (tensor(_wide(x.handle), x) if b else x for x, b in zip(given, bits, strict=True))
        made = zip(apply(self, tuple(wide)), bits, strict=True)
        return tuple(tensor(_narrow(x.handle), x) if b else x for x, b in made)

    return mended


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


def run(kernel: Any, parameters: Sequence[Any], grid: tuple[int, ...]) -> None:
    """Runs a kernel in place; among the leaves of its parameters, NumPy arrays are pointers."""
    from triton.runtime.errors import InterpreterError

    fixed = _triton_check.constant_parameters(kernel)
    with LOCK:  # compiling must not see the patched language, nor must the making of a twin
        twin = _twin(kernel)
        given = {
            name: arguments.named_tuples(arguments.replaced(tree, _leaf(name in fixed)))
            for name, tree in zip(kernel.arg_names, parameters, strict=True)
        }
        with _interpreted_language(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # as a device: a row of nan is one
            try:
                twin.run(grid=grid, warmup=False, **given)
            except InterpreterError as error:  # whatever a kernel raises, Triton makes one of it
                what = f"Triton kernel `{kernel.fn.__name__}`, interpreted on the CPU"
                constants = arguments.constants(kernel.arg_names, parameters)
                error.add_note(f"{what}, with {constants} and the grid {grid}.")
                raise


def _leaf(bare: bool) -> Any:
    """What the interpreter takes for a leaf; a compile-time value in a bundle is wrapped."""
    import triton.language as tl

    def leaf(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return _Tensor(value)
        if isinstance(value, Exact):
            value = _replaced(value.value)
            return value if bare else tl.constexpr(value)
        return value

    return leaf
