"""Runs Mosaic GPU kernels: compiled for a GPU, interpreted on a CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel import _contexts, _device
from ejkernel.errors import UnsupportedError
from ejkernel.kernels._pallas.gpu._blocks import mosaic
from ejkernel.xla_utils import manual, unchecked


def interpreted() -> bool:
    """Whether a kernel traced here runs in the interpreter."""
    return _device.find().kind == "cpu"


def launch(
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array],
    *,
    outputs: Sequence[tuple[tuple[int, ...], Any]] = (),
    updated: Sequence[jax.Array] = (),
    scratch: Sequence[Any] = (),
    programs: int,
    warpgroups: int,
    auto_barriers: bool = True,
) -> tuple[jax.Array, ...]:
    """Results of `kernel(*arrays, *updated, *outputs, *scratch)`, all of them refs.

    Args:
      kernel: The body; `lax.axis_index` gives "cta" and "warpgroup".
      arrays: What it reads.
      outputs: Shapes and dtypes of new arrays that it writes.
      updated: Arrays that it reads and writes; results of which come instead of `outputs`.
      scratch: Shared memory and barriers of a program.
      programs: How many programs run.
      warpgroups: How many warpgroups a program has.
      auto_barriers: Mosaic makes a warpgroup meet around its stores to shared memory.
    """
    given = manual.vary_alike([*arrays, *updated])
    arrays, updated = given[: len(arrays)], given[len(arrays) :]
    watched = {"interpret": mosaic.interpreter(detect_races=_contexts.detect_races.value)}
    run = plgpu.kernel(
        kernel,
        out_type=[manual.type_like(jax.typeof(given[0]), *shape) for shape in outputs],
        scratch_types=list(scratch),
        grid=(programs,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=mosaic.compiler_params(unsafe_no_auto_barriers=not auto_barriers),
        **(watched if interpreted() else {}),
    )
    if not updated:
        return tuple(run(*arrays))

    def in_place(*given: jax.Array) -> tuple[jax.Array, ...]:
        read, written = given[: len(arrays)], given[len(arrays) :]
        return tuple(pl.run_state(lambda refs: run(*read, *refs) and None)(tuple(written)))

    if interpreted() and (axes := sorted(manual.varying_axes(given[0]))):
        raise UnsupportedError(
            "Mosaic's interpreter does not update arrays in place that differ over mesh axes "
            f"{axes}: call `jax.shard_map` with `check_vma=False`."
        )
    return unchecked.run(in_place, *given)
