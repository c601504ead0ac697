"""`tpu_call`: a Pallas TPU kernel as a JAX function, compiled on a TPU and interpreted on a CPU."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _contexts, _settings
from ejkernel.xla_utils import manual


@contextlib.contextmanager
def compile_for_tpu() -> Iterator[None]:
    """Kernels traced inside are compiled, whatever the default device is."""
    with _contexts.compile_for_tpu(True):
        yield


@contextlib.contextmanager
def detect_races() -> Iterator[None]:
    """Kernels interpreted inside look for reads and writes that are not ordered."""
    with _contexts.detect_races(True):
        yield


def interpreted() -> bool:
    """Whether a kernel traced here runs in the interpreter."""
    return jax.default_backend() == "cpu" and not _contexts.compile_for_tpu.value


def races_found() -> bool:
    """Whether the last interpreted kernel under `detect_races` had a race."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    state: Any = interpret_pallas_call.races
    if state is None:
        raise RuntimeError("No kernel was interpreted under `detect_races`.")
    return bool(state.races_found)


def in_hbm(array: jax.Array) -> jax.Array:
    """The array for a kernel that copies parts of it, kept in HBM.

    The compiler may place an array that is small enough in VMEM, and what the kernel copies from
    there goes through registers instead of in the background.
    """
    return array if interpreted() else _in_hbm(array)


@jax.custom_batching.custom_vmap
def _in_hbm(array: jax.Array) -> jax.Array:
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.with_memory_space_constraint(array, pltpu.HBM)


@_in_hbm.def_vmap  # the constraint itself has no such rule
def _(size: int, batched: Sequence[bool], array: jax.Array) -> tuple[jax.Array, bool]:
    return _in_hbm(array), batched[0]


def tpu_call(
    kernel: Callable[..., None],
    *,
    grid_spec: Any,
    out_shape: Sequence[Any],
    name: str,
    sequential: int,
    vmem_limit: int | None = None,
    checked: bool = True,
    aliases: dict[int, int] | None = None,
) -> Callable[..., list[jax.Array]]:
    """A function of the kernel's arrays.

    On a CPU the kernel is interpreted: with memory filled with nan and reads out of bounds raised,
    or, under the setting `interpret`, so that every transformation works. Works inside `shard_map`:
    results differ over the mesh axes that any input differs over.

    Args:
      kernel: The body, called with a ref to each array, result and scratch buffer.
      grid_spec: The grid, block specs and scratch buffers, a `pltpu.PrefetchScalarGridSpec`.
      out_shape: Shapes and dtypes of the results.
      name: The kernel's name in a program.
      sequential: How many of the last axes of the grid must run in order.
      vmem_limit: Bytes of VMEM that the kernel may use. Default: the compiler's.
      checked: Whether a compiled kernel checks the addresses of its copies.
      aliases: Results that share the memory of an array, by the array's number.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    parallel = len(grid_spec.grid) - sequential
    params = pltpu.CompilerParams(
        dimension_semantics=("parallel",) * parallel + ("arbitrary",) * sequential,
        vmem_limit_bytes=vmem_limit,
        disable_bounds_checks=not checked,
    )

    def call(*arrays: Any) -> list[jax.Array]:
        given = manual.vary_alike([jnp.asarray(x) for x in arrays])
        return pl.pallas_call(
            kernel,
            out_shape=[_differing(o, given) for o in out_shape],
            grid_spec=grid_spec,
            compiler_params=params,
            input_output_aliases=aliases or {},
            interpret=_interpreter(given),
            name=name,
        )(*given)

    return call


def _interpreter(inputs: Sequence[jax.Array]) -> Any:
    """What runs a kernel: a compiler, JAX's plain interpreter, or the one that watches memory.

    The last has effects, which `vmap` and `checkpoint` do not take: it serves kernels called by
    themselves, and calls inside `shard_map`, which the plain one does not take. Gradients of a call
    inside `shard_map` need `check_vma=False` on a CPU: the plain one slices arrays that differ over
    a mesh with indices that do not, and effects do not reach inside a differentiated call.
    """
    from jax.experimental.pallas import tpu as pltpu

    if not interpreted():
        return False
    if _settings.current().interpret and not manual.varying_axes(inputs[0]):
        return True
    return pltpu.InterpretParams(
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
        detect_races=_contexts.detect_races.value,
    )


def _differing(out: Any, inputs: Sequence[jax.Array]) -> jax.ShapeDtypeStruct:
    """A result's type: it differs over the manual mesh axes of the inputs."""
    if not manual.varying_axes(inputs[0]):
        return jax.ShapeDtypeStruct(out.shape, out.dtype)
    kind = jax.typeof(inputs[0]).manual_axis_type
    return jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=kind)
