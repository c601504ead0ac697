"""Runs a kernel's PTX over a grid."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from tools.ptx import block, faults, floats, integers, memory, moves, products, text, tiles

INSTRUCTIONS = (integers, floats, moves, products, tiles)  # importing them fills the table


@dataclasses.dataclass
class Outcome:
    """What a launch did."""

    kernel: str
    grid: tuple[int, ...]
    instructions: int = 0
    races: set[str] = dataclasses.field(default_factory=set)
    fault: str | None = None
    code: str = dataclasses.field(default="", repr=False)  # PTX

    @property
    def clean(self) -> bool:
        return not self.races and self.fault is None


def run(
    ptx: str,
    arguments: Sequence[np.ndarray | int],
    grid: Sequence[int],
    shared_bytes: int,
    writable: Sequence[np.ndarray] = (),
) -> Outcome:
    """Runs a kernel's programs one after another; arrays in `writable` are written in place.

    A fault ends the run and is told in the outcome; arrays then keep what they held before.
    An array that is given twice is one buffer. Parameters beyond `arguments`, for scratch memory
    of the compiler, are null.
    """
    program = text.read(ptx)
    arrays = list({id(x): x for x in arguments if isinstance(x, np.ndarray)}.values())
    place = {id(x): i for i, x in enumerate(arrays)}
    may_write = {id(x) for x in writable}
    outcome = Outcome(program.name, (*grid, *(1,) * (3 - len(grid))), code=ptx)
    heap = memory.GlobalMemory(arrays, [id(x) in may_write for x in arrays])
    values = [heap.address(place[id(x)]) if isinstance(x, np.ndarray) else x for x in arguments]
    values += [0] * (len(program.parameters) - len(values))
    parameters = dict(zip(program.parameters, values, strict=True))
    z_y_x = itertools.product(*(range(n) for n in reversed(outcome.grid)))
    try:
        for index in z_y_x:
            where = index[::-1], outcome.grid
            one = block.Block(program, heap, shared_bytes, parameters, where, outcome.races.add)
            outcome.instructions += one.run()
    except faults.Fault as fault:
        outcome.fault = f"{type(fault).__name__}: {fault}"
        return outcome
    heap.copy_back()
    return outcome
