"""A kernel with a grid, a loop whose length comes from a table, and two branches."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.callib import _pallas

SHAPES = {
    "table": jax.ShapeDtypeStruct((2,), jnp.int32),
    "x": jax.ShapeDtypeStruct((256, 384), jnp.bfloat16),
    "y": jax.ShapeDtypeStruct((384, 128), jnp.bfloat16),
}
GRID = (2, 3)


def kernel(table, x, y, out, acc):
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    def step(k, carry):
        acc[...] += jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)
        return carry

    jax.lax.fori_loop(0, table[i], step, np.int32(0))

    @pl.when(j == 2)
    def _():
        out[...] = acc[...]


def program(rows=(1, 3)):
    """A function of arrays by name; `rows` is the table, unless it is an argument."""

    def fn(arrays):
        table = arrays["table"] if rows is None else jnp.asarray(rows, jnp.int32)
        block = lambda index: pl.BlockSpec((128, 128), index)
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=GRID,
            in_specs=[block(lambda i, j, t: (i, j)), block(lambda i, j, t: (j, 0))],
            out_specs=[block(lambda i, j, t: (i, 0))],
            scratch_shapes=[pltpu.VMEM((128, 128), jnp.float32)],
        )
        out = [jax.ShapeDtypeStruct((256, 128), jnp.float32)]
        with _pallas.compile_for_tpu():
            call = _pallas.tpu_call(
                kernel, grid_spec=spec, out_shape=out, name="sample_kernel", sequential=1
            )
            return call(table, arrays["x"], arrays["y"])

    return fn
