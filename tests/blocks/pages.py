"""A small TPU kernel that fetches pages itself, for tests of `grid.stream`."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu._blocks import grid


def sum_of_pages(table, pages):
    """For each row of a table, [count, page ids…], the sum of its pages, [rows, w, d]."""
    rows, width = table.shape
    _, w, d = pages.shape
    operands = grid.Operands()
    operands.add_whole("pages", pages)

    def body(refs):
        start = pl.program_id(0) * width
        refs.out[...] = jnp.zeros_like(refs.out)

        def copies(j, slot):
            page = refs.pages.at[refs.table[start + 1 + j]]
            return [pltpu.make_async_copy(page, refs.buffer.at[slot], refs.arrived.at[slot])]

        def visit(j, slot):
            refs.out[...] += refs.buffer[slot]

        grid.stream(refs.table[start], copies, visit)

    spec = pl.BlockSpec((None, w, d), lambda i, table: (i, 0, 0))
    return operands.run(
        "sum_of_pages_kernel",
        body,
        table,
        {"out": (jax.ShapeDtypeStruct((rows, w, d), pages.dtype), spec)},
        {
            "buffer": pltpu.VMEM((2, w, d), pages.dtype),
            "arrived": pltpu.SemaphoreType.DMA((2,)),
        },
        grid=(rows,),
        sequential=0,
    )[0]
