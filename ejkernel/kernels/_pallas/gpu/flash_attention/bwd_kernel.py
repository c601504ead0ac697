"""What the kernels of the attention backward have in common: operands, and three warpgroups.

Two warpgroups compute and one loads. Those that compute have code of their own, in which addresses
of shared memory are constants: with one code for both, a step took 20 % more instructions, and
registers spilled.

There are two of each kernel, with exact weights or without, and a flag in device memory says which
one has work.
"""

import dataclasses
import functools
import itertools
from typing import Any, ClassVar, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import launch
from ejkernel.kernels._pallas.gpu.flash_attention import bwd_plan, bwd_tokens

OWN = 5  # named barriers from here on, of one warpgroup alone each


class Operands(NamedTuple):
    """Device memory that is read; `rows` and `neg_delta` [b, h, t] have whole blocks of queries."""

    q: Any  # [b, t, h, d]
    k: Any  # [b, s, g, d]
    v: Any
    dout: Any
    rows: Any
    neg_delta: Any
    exact: Any  # [1]


class Refs(NamedTuple):
    """Of a kernel, in `kinds` of its own but for the operands."""

    operands: Operands
    results: Any
    shared: Any
    barriers: Any
    tokens: Any = None  # `bwd_tokens.Tokens`, where ids or lengths decide


@dataclasses.dataclass(frozen=True)
class AbstractKernel:
    """A kernel of a plan, with or without `exact` weights."""

    plan: bwd_plan.Plan
    exact: bool

    kinds: ClassVar[tuple[Any, Any, Any]]  # of results, shared memory and barriers

    @property
    def programs(self) -> int:
        raise NotImplementedError

    def scratch(self) -> tuple[Any, Any]:
        """Shared memory and barriers."""
        raise NotImplementedError

    def place(self, program: Any, tokens: Any) -> Any:
        """What a program works on."""
        raise NotImplementedError

    def load(self, refs: Refs, place: Any) -> None:
        """The work of the warpgroup that loads."""
        raise NotImplementedError

    def compute(self, refs: Refs, place: Any, warpgroup: Any) -> None:
        """The work of one of the others."""
        raise NotImplementedError

    def launch(self, operands: Operands, results: Any, tokens: Any = ()) -> Any:
        """Writes results, unless `operands.exact` names the other kernel."""
        shared, barriers = self.scratch()
        made = launch.launch(
            self,
            [*operands, *tokens],
            updated=results,
            scratch=[*shared, *(x for x in barriers if x is not None)],
            programs=self.programs,
            warpgroups=bwd_plan.WARPGROUPS + 1,
            auto_barriers=False,
        )
        return type(results)(*made)

    def __call__(self, *given: Any) -> None:
        taken = iter(given)

        def bundle(kind: Any) -> Any:
            return kind(*itertools.islice(taken, len(kind._fields)))

        operands = bundle(Operands)
        tokens = bundle(bwd_tokens.Tokens) if self.plan.limits else None
        results, shared, barriers = self.kinds
        refs = Refs(operands, bundle(results), bundle(shared), barriers(*taken), tokens)
        warpgroup = lax.axis_index("warpgroup")

        def place() -> Any:
            return self.place(lax.axis_index("cta"), tokens)

        def load() -> None:
            plgpu.set_max_registers(self.plan.registers[1], action="decrease")
            self.load(refs, place())

        def compute(number: int) -> None:
            plgpu.set_max_registers(self.plan.registers[0], action="increase")
            self.compute(refs, place(), number)
            plgpu.wait_smem_to_gmem(0)

        def body() -> None:
            for number in range(bwd_plan.WARPGROUPS):
                pl.when(warpgroup == number)(functools.partial(compute, number))
            pl.when(warpgroup == bwd_plan.WARPGROUPS)(load)

        pl.when(refs.operands.exact[0] == int(self.exact))(body)
