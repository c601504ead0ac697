"""Products of attention forward as a warpgroup issues them, each with its twin.

The inlined forms overlap: `scores_and_values` returns while the product with values runs, the
caller computes weights meanwhile, and `settle` waits. The twins compute the same one after the
other, with the same barriers in the same order, for JAX's interpreter.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._pallas.gpu._blocks import mosaic


class Signals(NamedTuple):
    """Named barriers at which a step arrives, and how many threads each joins."""

    turn: Any  # the next warpgroup may issue its products; None: no turns are taken
    turn_threads: int
    freed: Any  # the tile of keys may be overwritten
    freed_threads: int

    def give_turn(self) -> None:
        if self.turn is not None:
            mosaic.named_barrier("arrive", self.turn, self.turn_threads)

    def free_keys(self) -> None:
        mosaic.named_barrier("arrive", self.freed, self.freed_threads)

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        given = (self.freed,) if self.turn is None else (self.freed, self.turn)
        return tuple(jnp.asarray(x, jnp.int32) for x in given)

    @property
    def types(self) -> tuple[Any, ...]:
        return (mosaic.SPLAT,) * (1 if self.turn is None else 2)


def scores(q: Any, k: Any, signals: Signals, twin: bool) -> jax.Array:
    """q @ k.T [64, bk]."""
    if twin:
        made = mosaic.twin_product(None, q, k.transpose((1, 0)))
        signals.give_turn()
        signals.free_keys()
        return made
    shape = (mosaic.ROWS, k.shape[0])

    @mosaic.inlined(
        (mosaic.TILE, mosaic.TILE, *signals.types), ((shape, jnp.float32, mosaic.WGMMA),)
    )
    def issue(q: Any, k: Any, freed: Any, *turn: Any) -> tuple[Any]:
        mosaic.fence()
        made = mosaic.product(None, q, mosaic.transposed(k))
        mosaic.commit()
        for barrier in turn:
            mosaic.arrive_or_sync("arrive", barrier, signals.turn_threads)
        mosaic.wait(0)
        made = mosaic.pinned(made)
        mosaic.arrive_or_sync("arrive", freed, signals.freed_threads)
        return (mosaic.as_wgmma(made),)

    return issue(q, k, *signals.operands)[0]


def scores_and_values(
    q: Any, k: Any, weights: jax.Array, v: Any, acc: jax.Array, signals: Signals, twin: bool
) -> tuple[jax.Array, jax.Array]:
    """q @ k.T [64, bk], and acc + weights @ v [64, e], which is not to be read before `settle`."""
    if twin:
        made = mosaic.twin_product(None, q, k.transpose((1, 0)))
        signals.give_turn()
        signals.free_keys()
        return made, mosaic.twin_product(acc, weights, v)
    shape = (mosaic.ROWS, k.shape[0])

    @mosaic.inlined(
        (mosaic.TILE, mosaic.TILE, mosaic.WGMMA, mosaic.TILE, mosaic.ACCUMULATOR, *signals.types),
        ((shape, jnp.float32, mosaic.WGMMA), (acc.shape, jnp.float32, mosaic.ACCUMULATOR)),
    )
    def issue(q: Any, k: Any, weights: Any, v: Any, acc: Any, freed: Any, *turn: Any) -> Any:
        weights, acc = mosaic.pinned(weights, acc)
        mosaic.fence()
        made = mosaic.product(None, q, mosaic.transposed(k))
        mosaic.commit()
        acc = mosaic.product(acc, weights, v)
        mosaic.commit()
        for barrier in turn:
            mosaic.arrive_or_sync("arrive", barrier, signals.turn_threads)
        mosaic.wait(1)
        made = mosaic.pinned(made)
        mosaic.arrive_or_sync("arrive", freed, signals.freed_threads)
        return mosaic.as_wgmma(made), acc

    return issue(q, k, weights, v, acc, *signals.operands)


def settle(
    weights: jax.Array, sums: jax.Array, acc: jax.Array, twin: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Waits for `acc`; the weights in bfloat16 and their sums come along.

    The conversion comes after the wait: registers that ptxas reuses for it while a product runs
    make it run all products one after the other (its note C7513).
    """
    if twin:
        return weights.astype(jnp.bfloat16), sums, acc

    @mosaic.inlined(
        (mosaic.WGMMA, mosaic.WGMMA, mosaic.ACCUMULATOR),
        (
            (weights.shape, jnp.bfloat16, mosaic.WGMMA),
            (sums.shape, jnp.float32, mosaic.WGMMA),
            (acc.shape, jnp.float32, mosaic.ACCUMULATOR),
        ),
    )
    def end(weights: Any, sums: Any, acc: Any) -> tuple[Any, Any, Any]:
        weights, sums = mosaic.pinned(weights, sums)
        mosaic.wait(0)
        acc = mosaic.pinned(acc)
        return mosaic.to_bfloat16(weights), sums, acc

    return end(weights, sums, acc)


def values(weights: jax.Array, v: Any, acc: jax.Array, signals: Signals, twin: bool) -> jax.Array:
    """acc + weights @ v [64, e], finished."""
    if twin:
        signals.give_turn()
        return mosaic.twin_product(acc, weights, v)

    @mosaic.inlined(
        (mosaic.WGMMA, mosaic.TILE, mosaic.ACCUMULATOR, *signals.types[1:]),
        ((acc.shape, jnp.float32, mosaic.ACCUMULATOR),),
    )
    def issue(weights: Any, v: Any, acc: Any, *turn: Any) -> tuple[Any]:
        weights, acc = mosaic.pinned(weights, acc)
        mosaic.fence()
        acc = mosaic.product(acc, weights, v)
        mosaic.commit()
        for barrier in turn:
            mosaic.arrive_or_sync("arrive", barrier, signals.turn_threads)
        mosaic.wait(0)
        return (mosaic.pinned(acc),)

    return issue(weights, v, acc, *signals.operands[1:])[0]


def cleared(columns: int, layout: Any) -> jax.Array:
    """Zeros [64, columns] of a layout."""
    return plgpu.layout_cast(jnp.zeros((mosaic.ROWS, columns), jnp.float32), layout)
