"""What the kernels of the attention backward have in common: operands, and three warpgroups.

Two warpgroups compute and one loads. Those that compute have code of their own, in which addresses
of shared memory are constants: with one code for both, a step took 20 % more instructions, and
registers spilled.

There are two of each kernel, with exact weights or without, and a flag in device memory says which
one has work. A program has one tile, or a list of tiles that the host made; then the warpgroup that
loads works on the next tile while the others end one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
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
    deal: Any = None  # [programs, tiles], where a program has several


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
        """What a program with one tile works on."""
        raise NotImplementedError

    def place_of_item(self, item: Any, before: Any) -> Any:
        """What an item of a program's list works on, with the steps `before` it and after it."""
        raise NotImplementedError

    def load(self, refs: Refs, place: Any) -> None:
        """The work of the warpgroup that loads, on a tile."""
        raise NotImplementedError

    def compute(self, refs: Refs, place: Any, warpgroup: Any) -> None:
        """The work of one of the others, on a tile."""
        raise NotImplementedError

    def launch(self, operands: Operands, results: Any, tokens: Any = ()) -> Any:
        """Writes results, unless `operands.exact` names the other kernel."""
        shared, barriers = self.scratch()
        listed = (jnp.asarray(self.plan.dealt),) if self.plan.persistent else ()
        made = launch.launch(
            self,
            [*operands, *tokens, *listed],
            updated=results,
            scratch=[*shared, *_present(barriers).values()],
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
        deal = next(taken) if self.plan.persistent else None
        of_results, of_shared, of_barriers = self.kinds
        results, shared = bundle(of_results), bundle(of_shared)
        barriers = of_barriers(**dict(zip(_present(self.scratch()[1]), taken, strict=True)))
        refs = Refs(operands, results, shared, barriers, tokens, deal)
        warpgroup = lax.axis_index("warpgroup")

        def load() -> None:
            plgpu.set_max_registers(self.plan.registers[1], action="decrease")
            self._each_tile(refs, lambda place: self.load(refs, place))

        def compute(number: int) -> None:
            plgpu.set_max_registers(self.plan.registers[0], action="increase")
            self._each_tile(refs, lambda place: self.compute(refs, place, number))
            plgpu.wait_smem_to_gmem(0)

        def body() -> None:
            for number in range(bwd_plan.WARPGROUPS):
                pl.when(warpgroup == number)(functools.partial(compute, number))
            pl.when(warpgroup == bwd_plan.WARPGROUPS)(load)

        pl.when(refs.operands.exact[0] == int(self.exact))(body)

    def _each_tile(self, refs: Refs, visit: Callable[[Any], None]) -> None:
        """Calls visit(place) for each tile of this program."""
        program = lax.axis_index("cta")
        if not self.plan.persistent:
            visit(self.place(program, refs.tokens))
            return

        def one(index: Any, carry: Any) -> Any:
            before, item = carry
            ahead = refs.deal[program, index + 1]
            place = self.place_of_item(item, before)
            pl.when(item >= 0)(lambda: visit(place))
            return place.after, ahead

        first = (jnp.int32(0), refs.deal[program, 0])
        lax.fori_loop(0, self.plan.rounds, one, first)


def _present(bundle: Any) -> dict[str, Any]:
    """The members that are not None."""
    return {name: x for name, x in bundle._asdict().items() if x is not None}
