"""`cuda_call`: a handler of a CUDA source as a JAX function, on NVIDIA GPUs and on a CPU."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ejkernel.callib import _cuda_build
from ejkernel.errors import UnsupportedError
from ejkernel.xla_utils import manual

_ATTRIBUTES = {bool: np.bool_, int: np.int64, float: np.float64}  # as C++ sees them


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call has besides its arrays."""

    source: pathlib.Path
    function: str
    out: tuple[tuple[tuple[int, ...], str], ...]
    aliases: tuple[tuple[int, int], ...]  # (input, output)
    attributes: tuple[tuple[str, Any], ...]


def cuda_call(
    source: str | os.PathLike[str],
    function: str,
    *,
    inputs: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int] | None = None,
    **attributes: bool | int | float | str,
) -> tuple[jax.Array, ...]:
    """Runs a handler of a `.cu` file on JAX arrays; differentiation is the caller's.

    The file is built with nvcc when a program that calls it is first compiled on a GPU, and kept
    in the user's cache folder. On a CPU it is built as C++ and the threads of a block take turns,
    for tests: the file then has to keep to what `ejkernel.cuh` offers. Under `jax.vmap` the calls
    run one after the other.

    Args:
      source: The file. It includes "ejkernel.cuh", or XLA's own headers if it is for GPUs alone.
      function: The symbol of an XLA FFI handler, as `EJKERNEL_HANDLER` defines one.
      inputs: Arrays, in the handler's order; None is passed as an array without elements.
      outputs: Shapes and dtypes of the results, which start as whatever memory holds.
      aliases: For an output the input whose memory it shares and starts as, by their places.
      **attributes: Values that are known when the program is compiled: int64_t, double, bool or
        std::string_view to the handler.

    Returns:
      The outputs, in order.

    Raises:
      FileNotFoundError: if there is no such file.
      TypeError: for an attribute of another type.
      CompilationError: if the file does not compile, or has no such handler.
    """
    path = pathlib.Path(source).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"`cuda_call`: there is no source {path}.")
    for name, value in attributes.items():
        if not isinstance(value, bool | int | float | str):
            raise TypeError(
                f"`cuda_call`: {name} must be a bool, int, float or str; got {value!r}. Pass "
                "arrays through `inputs`."
            )
    pairs = tuple((given, out) for out, given in sorted((aliases or {}).items()))
    for given, out in pairs:
        if not (0 <= given < len(inputs) and 0 <= out < len(outputs)):
            raise ValueError(
                f"`cuda_call`: `aliases` gives output {out} the memory of input {given}; there are "
                f"{len(outputs)} outputs and {len(inputs)} inputs."
            )
    arrays = [jnp.zeros(0, jnp.uint8) if x is None else jnp.asarray(x) for x in inputs]
    call = Call(
        source=path,
        function=function,
        out=tuple((tuple(o.shape), jnp.dtype(o.dtype).name) for o in outputs),
        aliases=pairs,
        attributes=tuple(sorted(attributes.items())),
    )
    return tuple(cuda_call_p.bind(*manual.vary_alike(arrays), call=call))


cuda_call_p = Primitive("ejkernel_cuda_call")
cuda_call_p.multiple_results = True


@functools.lru_cache(maxsize=1024)
def _compiled_call(call: Call) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: cuda_call_p.bind(*arrays, call=call))


@cuda_call_p.def_impl
def _eager(*arrays: Any, call: Call) -> Any:
    with jax.disable_jit(False):  # else the call would come back here
        return _compiled_call(call)(*arrays)


@cuda_call_p.def_abstract_eval
def _abstract(*avals: Any, call: Call) -> list[Any]:
    if not avals:
        return [jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in call.out]
    return [manual.type_like(avals[0], shape, jnp.dtype(dtype)) for shape, dtype in call.out]


def _batch(arrays: Sequence[Any], dims: Sequence[Any], *, call: Call) -> Any:
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(arrays, dims, strict=True)]
    has_axis = [d is not None for d in dims]

    def one(given: Sequence[Any]) -> Any:
        rest = iter(given)
        operands = [next(rest) if has else x for x, has in zip(moved, has_axis, strict=True)]
        return cuda_call_p.bind(*operands, call=call)

    outs = jax.lax.map(one, [x for x, has in zip(moved, has_axis, strict=True) if has])
    return outs, [0] * len(outs)


batching.primitive_batchers[cuda_call_p] = _batch


def calls(jaxpr: Any) -> Iterator[Call]:
    """The calls of a traced program, those of inner programs too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is cuda_call_p:
            yield eqn.params["call"]
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from calls(inner)


def _lower(arch: Callable[[], str], ctx: Any, *operands: Any, call: Call) -> Any:
    name = _cuda_build.register(call.source, call.function, arch())
    attributes = {
        key: value if isinstance(value, str) else _ATTRIBUTES[type(value)](value)
        for key, value in call.attributes
    }
    rule = jax.ffi.ffi_lowering(name, operand_output_aliases=dict(call.aliases))
    return rule(ctx, *operands, **attributes)


@functools.cache
def _device_arch() -> str:
    """The architecture of the first GPU here, such as "sm_90"."""
    try:
        device: Any = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        raise UnsupportedError(
            "A CUDA source is compiled for the GPU that is here, and JAX finds none."
        ) from None
    return f"sm_{device.compute_capability.replace('.', '')}"


mlir.register_lowering(
    cuda_call_p, functools.partial(_lower, lambda: _cuda_build.HOST), platform="cpu"
)
mlir.register_lowering(cuda_call_p, functools.partial(_lower, _device_arch), platform="cuda")
