"""Kernels under `vmap`: its axis joins the batch, which the kernels loop over anyway."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


def joins_batch(
    fn: Callable[..., tuple[jax.Array, ...]], without_batch: Sequence[int] = ()
) -> Callable[..., tuple[jax.Array, ...]]:
    """`fn`, whose arrays and results begin with a batch axis, and which may be mapped.

    Arrays at the places `without_batch` have none: where they are mapped, calls run in turn.
    """
    run = jax.custom_batching.custom_vmap(fn)

    @run.def_vmap
    def _(size: int, has_axis: Sequence[bool], *arrays: jax.Array):
        wide = [
            x if has else jnp.broadcast_to(x, (size, *x.shape))
            for x, has in zip(arrays, has_axis, strict=True)
        ]
        if any(has_axis[i] for i in without_batch):
            made = jax.lax.map(lambda xs: joined(*xs), tuple(wide))
            return made, (True,) * len(made)
        folded = [
            arrays[i] if i in without_batch else x.reshape(-1, *x.shape[2:])
            for i, x in enumerate(wide)
        ]
        made = tuple(x.reshape(size, -1, *x.shape[1:]) for x in joined(*folded))
        return made, (True,) * len(made)

    def joined(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return joins_batch(fn, without_batch)(*arrays)  # for a further `vmap` around this one

    return run
