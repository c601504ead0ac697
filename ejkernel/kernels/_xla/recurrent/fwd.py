"""Recurrent cells forward: blocks of steps, whose inputs are projected by one product each.

Arrays of all steps are [b, t, p * n], the columns of one direction after those of the other: rows
lie as the caller's, so nothing is transposed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared.precision import xla_precision
from ejkernel.kernels._specs import recurrent as spec
from ejkernel.kernels._xla._blocks import loops
from ejkernel.kernels._xla._blocks.pairs import wide
from ejkernel.kernels._xla.recurrent import cells


class Residuals(NamedTuple):
    """The residuals of the spec, which says what they mean."""

    states: jax.Array  # [b, t, p * d]
    gates: jax.Array
    cells: jax.Array | None = None  # [b, t, p * d], of an LSTM


class Block(NamedTuple):
    """Consecutive steps of one direction; `start` may be traced."""

    p: int
    start: Any
    size: int
    backwards: bool

    def step(self, k: Any) -> tuple[Any, Any]:
        """The k-th step that is run: its number in the block and in the sequence."""
        j = self.size - 1 - k if self.backwards else k
        return j, self.start + j


def forward(args: Any, cfg: None) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs and final states; residuals are states and gates before each step."""
    cell, functions = cells.of(args)
    _, m, d = args.w_hh.shape
    dtype = wide(args.inputs.dtype)
    # transposed once: a product with the rows of w_hh in the loop takes a third longer on CPU
    weights = args.w_hh.astype(dtype).swapaxes(1, 2)
    first, second = (_bias(b, dtype) for b in (args.b_ih, args.b_hh))
    counts = (d, d, cell.kept * d) + ((d,) if args.cell is not None else ())

    def run(blocks: list[Block], carry: Any) -> Any:
        xs = [_project(args, block) for block in blocks]

        def body(k: Any, carry: Any) -> Any:
            states, made = carry
            after = []
            for block, x, state in zip(blocks, xs, states, strict=True):
                p, (j, i) = block.p, block.step(k)
                y = jnp.dot(state[0], weights[p], precision=xla_precision(dtype)) + second(p)
                new, gates = cell.step(functions, read(x, j, 0, m) + first(p), y, state)
                shown = new[0]
                if args.lengths is not None:
                    seen = (i < args.lengths)[:, None]
                    new = tuple(jnp.where(seen, a, b) for a, b in zip(new, state, strict=True))
                    shown = jnp.where(seen, shown, 0)
                rows = (shown, state[0], gates, *state[1:])
                made = [write(x, s, i, p) for x, s in zip(made, rows, strict=True)]
                after.append(new)
            return after, made

        return loops.fori(0, blocks[0].size, body, carry)

    made = [buffer(args, n) for n in counts]
    starts = [args.hidden] if args.cell is None else [args.hidden, args.cell]
    states, (out, *kept) = over_blocks(args, run, (by_direction(args, starts), made))
    return (out.astype(args.inputs.dtype), *finals(args, states)), tuple(kept)


def over_blocks(
    args: Any, run: Callable[[list[Block], Any], Any], carry: Any, *, back: bool = False
) -> Any:
    """Runs all blocks in the order of the recurrence, or the other way, with a shorter last one."""
    batch, t, _ = args.inputs.shape
    # a thousand rows fill a matrix product, and what is made of them stays in the cache: all steps
    # at once are a tenth slower (LSTM, 16 x 256 x 256 batch, steps, features; AMD EPYC)
    size = min(max(1024 // max(batch, 1), 16), max(t, 1))
    count, rest = divmod(t, size)

    def at(offset: Any, size: int, carry: Any) -> Any:
        blocks = [
            Block(p, t - offset - size if backwards else offset, size, backwards)
            for p, backwards in enumerate(spec.directions(args))
        ]
        return run(blocks, carry)

    if back and rest:
        carry = at(count * size, rest, carry)
    order = (lambda n: count - 1 - n) if back else (lambda n: n)
    carry = loops.fori(0, count, lambda n, carry: at(order(n) * size, size, carry), carry)
    if rest and not back:
        carry = at(count * size, rest, carry)
    return carry


def steps(x: jax.Array, block: Block) -> jax.Array:
    """The steps of a block, [b, s, …] of [b, t, …]."""
    if x.shape[1] == block.size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jnp.int32(block.start), block.size, 1)


def seen_inputs(args: Any, block: Block) -> jax.Array:
    """Inputs with zeros beyond the lengths: 0 * nan is nan."""
    x = steps(args.inputs, block).astype(wide(args.inputs.dtype))
    if args.lengths is None:
        return x
    step = block.start + jnp.arange(block.size, dtype=jnp.int32)
    seen = step[None] < args.lengths[:, None]
    return jnp.where(seen[..., None], x, 0)


def _project(args: Any, block: Block) -> jax.Array:
    """The inputs of a block, [b, s, m]."""
    x = seen_inputs(args, block)
    w = args.w_ih[block.p].astype(x.dtype)
    return jnp.einsum("bti,mi->btm", x, w, precision=xla_precision(x.dtype))


def _bias(bias: jax.Array | None, dtype: Any) -> Callable[[int], Any]:
    return (lambda p: 0) if bias is None else (lambda p: bias[p].astype(dtype)[None])


def by_direction(args: Any, states: list[jax.Array]) -> list[cells.State]:
    """States like the caller's by direction."""
    states = [s.astype(wide(args.inputs.dtype)) for s in states]
    if not args.bidirectional:
        return [tuple(states)]
    return [tuple(s[p] for s in states) for p in range(2)]


def finals(args: Any, states: list[cells.State]) -> list[jax.Array]:
    """States by direction as arrays like the caller's."""
    stack = jnp.stack if args.bidirectional else lambda x: x[0]
    starts = (args.hidden, args.cell)
    return [
        stack(s).astype(start.dtype)
        for s, start in zip(zip(*states, strict=True), starts, strict=False)
    ]


def buffer(args: Any, columns: int) -> jax.Array:
    """Room for `columns` of every step and direction."""
    batch, t, _ = args.inputs.shape
    return zeros(args, batch, t, len(spec.directions(args)) * columns)


def zeros(args: Any, *shape: int) -> jax.Array:
    return loops.vary_like(jnp.zeros(shape, wide(args.inputs.dtype)), args.inputs)


def read(x: jax.Array, i: Any, p: int, columns: int) -> jax.Array:
    """Step i of direction p: [b, n] of [b, t, p * n]."""
    start = (jnp.int32(0), jnp.int32(i), jnp.int32(p * columns))
    return jax.lax.dynamic_slice(x, start, (x.shape[0], 1, columns))[:, 0]


def write(x: jax.Array, rows: jax.Array, i: Any, p: int) -> jax.Array:
    start = (jnp.int32(0), jnp.int32(i), jnp.int32(p * rows.shape[1]))
    return jax.lax.dynamic_update_slice(x, rows[:, None], start)
