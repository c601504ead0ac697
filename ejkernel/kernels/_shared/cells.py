"""What recurrent layers compute outside the loop over steps: projections and products after it.

Backward gives the gradients of a step's columns. Those of an LSTM and of a plain RNN are the sums
of both projections. A GRU has n of the inputs' projection, r and z of the sums, and n of the
states' projection: in this order the columns of either projection are neighbours.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.products import multiply, wide

Gradients = dict[str, jax.Array]


def product_dtype(args: Any) -> Any:
    """The dtype of both factors of a step's product: that of the weights.

    States of another dtype than the weights', such as float32 beside bfloat16, are not rounded.
    """
    same = args.hidden.dtype == args.inputs.dtype
    return args.inputs.dtype if same else wide(args.inputs.dtype)


def biases(args: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """Biases [p, m] that the inputs' projection takes, and those of the states' projection.

    They are the sum of both, but for n of a GRU, where a gate multiplies the states' projection.
    """
    first, second = (None if b is None else b.astype(wide(b.dtype)) for b in (args.b_ih, args.b_hh))
    if second is None:
        return first, None
    inner = None
    if args.cell_type == "gru":
        d = args.w_hh.shape[2]
        inner, second = second.at[:, : 2 * d].set(0), second.at[:, 2 * d :].set(0)
    return second if first is None else first + second, inner


def seen_steps(args: Any, start: Any, size: int) -> jax.Array:
    """Which steps from `start` on are real, [b, s, 1]."""
    step = start + jnp.arange(size, dtype=jnp.int32)
    return (step[None] < args.lengths[:, None])[..., None]


def seen_inputs(args: Any, inputs: jax.Array, start: Any) -> jax.Array:
    """Steps of the inputs with zeros beyond the lengths: 0 * nan is nan."""
    if args.lengths is None:
        return inputs
    return jnp.where(seen_steps(args, start, inputs.shape[1]), inputs, 0)


def project(inputs: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The projections [b, s, m] of inputs [b, s, i] by a weight [m, i], in the wide dtype."""
    made = multiply("bti,mi->btm", inputs, weight)
    return made if bias is None else made + bias[None, None]


def of_states(args: Any, columns: jax.Array) -> jax.Array:
    """Of the columns of a step, those [..., m] of the states' projection, in its order."""
    return columns[..., columns.shape[-1] - args.w_hh.shape[1] :]


def by_projection(args: Any, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The columns [..., m] of the inputs' projection and those of the states'."""
    return columns[..., : args.w_hh.shape[1]], of_states(args, columns)


def products(
    args: Any,
    columns: tuple[jax.Array, jax.Array],
    factors: tuple[Callable[[], jax.Array], Callable[[], jax.Array]],
    p: int,
    wanted: frozenset[str],
) -> Gradients:
    """What the gradients of a direction's projections [b, s, m] add to those of the arguments.

    Args:
      args: The call.
      columns: Gradients of the columns of steps, by projection.
      factors: Make the inputs [b, s, i] and the states before each step [b, s, d].
      p: The direction.
      wanted: Names of arguments; those of states are not made here.
    """
    dx, dy = columns
    dtype, sums = dx.dtype, wide(dx.dtype)
    # n comes first among a GRU's columns of inputs, and last among the rows of its weights
    turn = args.w_hh.shape[2] if args.cell_type == "gru" else 0
    by_rows = lambda d, x: multiply("btm,bti->mi", d, x.astype(dtype))
    makers = {
        "inputs": lambda: multiply(
            "btm,mi->bti", dx, jnp.roll(args.w_ih[p], turn, axis=0).astype(dtype)
        ),
        "w_ih": lambda: jnp.roll(by_rows(dx, factors[0]()), -turn, axis=0),
        "w_hh": lambda: by_rows(dy, factors[1]()),
        "b_ih": lambda: jnp.roll(dx.astype(sums).sum(axis=(0, 1)), -turn),
        "b_hh": lambda: dy.astype(sums).sum(axis=(0, 1)),
    }
    return {name: make() for name, make in makers.items() if name in wanted}


def finals(args: Any, states: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
    """States by direction as arrays like the caller's."""
    stack = jnp.stack if args.bidirectional else lambda x: x[0]
    starts = (args.hidden, args.cell)
    return [
        stack(s).astype(start.dtype)
        for s, start in zip(zip(*states, strict=True), starts, strict=False)
    ]
