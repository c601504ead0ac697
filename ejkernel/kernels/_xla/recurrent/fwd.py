"""Recurrent cells forward: blocks of steps, whose inputs are projected by one product each.

Arrays of all steps are [b, t, p * n], the columns of one direction after those of the other: rows
lie as the caller's, so nothing is transposed. A step writes the states after it and no more than
its columns; outputs and the states before each step follow from those after the loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._shared import cells as shared
from ejkernel.kernels._shared.precision import xla_precision
from ejkernel.kernels._shared.products import multiply, wide
from ejkernel.kernels._specs import recurrent as spec
from ejkernel.kernels._xla._blocks import loops
from ejkernel.kernels._xla.recurrent import cells
from ejkernel.kernels._xla.recurrent.config import Config


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

    def before(self, first: jax.Array, after: jax.Array) -> jax.Array:
        """States [b, s, d] before each step from those after it; `first` is before all."""
        if self.backwards:
            return jnp.concatenate([after[:, 1:], first[:, None]], axis=1)
        return jnp.concatenate([first[:, None], after[:, :-1]], axis=1)


def forward(args: Any, cfg: Config) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs and final states; residuals are states and columns of each step."""
    layer = Layer(args, cfg)

    def run(blocks: list[Block], carry: Any) -> Any:
        states, made = carry
        states, rows = layer.run(blocks, states)
        for block, own in zip(blocks, rows, strict=True):
            made = [write_steps(x, r, block) for x, r in zip(made, own, strict=True)]
        return states, made

    d, wide_dtype = args.w_hh.shape[2], wide(args.inputs.dtype)
    counts = (d, layer.cell.kept * d) + ((d,) if args.cell is not None else ())
    made = [buffer(args, d, args.inputs.dtype), *(buffer(args, n, wide_dtype) for n in counts)]
    starts = [args.hidden] if args.cell is None else [args.hidden, args.cell]
    first = (by_direction(args, starts), made)
    states, (out, *kept) = over_blocks(args, cfg, run, first)
    return (out, *shared.finals(args, states)), tuple(kept)


class Layer:
    """What every block of a call needs: weights in the dtype of products, biases."""

    def __init__(self, args: Any, cfg: Config):
        self.args, self.cfg = args, cfg
        self.cell, self.functions = cells.of(args)
        self.dtype = dtype_of_products(args, cfg)
        # transposed once: a product with the rows of w_hh in the loop takes a third longer on CPU
        self.weights = args.w_hh.astype(self.dtype).swapaxes(1, 2)
        self.first, self.second = shared.biases(args)

    def run(
        self, blocks: list[Block], states: list[cells.State]
    ) -> tuple[list[cells.State], list[tuple[jax.Array, ...]]]:
        """The states after a block, and the block's rows of outputs and residuals."""
        args = self.args
        xs = [self._project(block) for block in blocks]
        d, keep = args.w_hh.shape[2], not self.cfg.late_gates
        widths = [d] * len(states[0]) + ([self.cell.kept * d] if keep else [])
        room = [zeros(args, args.inputs.shape[0], blocks[0].size, n) for n in widths]

        def body(k: Any, carry: Any) -> Any:
            states, narrow, made = carry
            after, factors, rows = [], [], []
            for block, x, state, h, old in zip(blocks, xs, states, narrow, made, strict=True):
                j, i = block.step(k)
                new, gates = self._step(block, read(x, j, 0, x.shape[2]), state, h)
                if args.lengths is not None:
                    seen = (i < args.lengths)[:, None]
                    new = tuple(jnp.where(seen, a, b) for a, b in zip(new, state, strict=True))
                parts = (*new, gates) if keep else new
                rows.append([write(x, r, j) for x, r in zip(old, parts, strict=True)])
                after.append(new)
                factors.append(new[0].astype(self.dtype))
            return after, factors, rows

        # the state in the dtype of products is carried too: it costs a step no conversion then
        narrow = [state[0].astype(self.dtype) for state in states]
        first = (states, narrow, [room] * len(blocks))
        after, _, made = loops.fori(0, blocks[0].size, body, first, self.cfg.unroll)
        together = zip(blocks, xs, states, made, strict=True)
        return after, [self._rows(*one) for one in together]

    def _step(self, block: Block, x: jax.Array, state: cells.State, h: jax.Array) -> Any:
        y = jnp.dot(
            h,
            self.weights[block.p],
            precision=xla_precision(self.dtype),
            preferred_element_type=wide(self.dtype),
        )
        if self.second is not None:
            y = y + self.second[block.p][None]
        return self.cell.step(self.functions, x, y, state)

    def _project(self, block: Block) -> jax.Array:
        """The inputs of a block, [b, s, m]."""
        args, p = self.args, block.p
        x = shared.seen_inputs(args, steps(args.inputs, block), block.start)
        return shared.project(x, args.w_ih[p], None if self.first is None else self.first[p])

    def _rows(
        self, block: Block, x: jax.Array, state: cells.State, made: list[jax.Array]
    ) -> tuple[jax.Array, ...]:
        """Outputs and residuals of a block from the states after each step."""
        args = self.args
        after, late = made[: len(state)], made[len(state) :]
        shown = after[0]
        if args.lengths is not None:
            shown = jnp.where(shared.seen_steps(args, block.start, block.size), shown, 0)
        before = [block.before(s, a) for s, a in zip(state, after, strict=True)]
        gates = late[0] if late else self._columns(block, x, before[0])
        return (shown.astype(args.inputs.dtype), before[0], gates, *before[1:])

    def _columns(self, block: Block, x: jax.Array, before: jax.Array) -> jax.Array:
        """What the steps of a block keep of their projections."""
        p = block.p
        y = multiply("bti,im->btm", before.astype(self.dtype), self.weights[p])
        if self.second is not None:
            y = y + self.second[p][None, None]
        if self.args.cell_type != "gru":
            return x + y
        d = before.shape[-1]
        n = 2 * d
        return jnp.concatenate([x[..., :n] + y[..., :n], x[..., n:], y[..., n:]], axis=-1)


def dtype_of_products(args: Any, cfg: Config) -> Any:
    return shared.product_dtype(args) if cfg.narrow else wide(args.inputs.dtype)


def over_blocks(
    args: Any,
    cfg: Config,
    run: Callable[[list[Block], Any], Any],
    carry: Any,
    *,
    back: bool = False,
) -> Any:
    """Runs all blocks in the order of the recurrence, or the other way, with a shorter last one."""
    t = args.inputs.shape[1]
    size = min(cfg.block_t, max(t, 1))
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


def by_direction(args: Any, states: list[jax.Array]) -> list[cells.State]:
    """States like the caller's by direction."""
    states = [s.astype(wide(args.inputs.dtype)) for s in states]
    if not args.bidirectional:
        return [tuple(states)]
    return [tuple(s[p] for s in states) for p in range(2)]


def buffer(args: Any, columns: int, dtype: Any) -> jax.Array:
    """Room for `columns` of every step and direction."""
    batch, t, _ = args.inputs.shape
    return zeros(args, batch, t, len(spec.directions(args)) * columns, dtype=dtype)


def zeros(args: Any, *shape: int, dtype: Any = None) -> jax.Array:
    """Zeros in the wide dtype, or in another."""
    return loops.vary_like(jnp.zeros(shape, dtype or wide(args.inputs.dtype)), args.inputs)


def read(x: jax.Array, i: Any, p: int, columns: int) -> jax.Array:
    """Step i of direction p: [b, n] of [b, t, p * n]."""
    start = (jnp.int32(0), jnp.int32(i), jnp.int32(p * columns))
    return jax.lax.dynamic_slice(x, start, (x.shape[0], 1, columns))[:, 0]


def write(x: jax.Array, rows: jax.Array, i: Any) -> jax.Array:
    """Writes step i of a block."""
    start = (jnp.int32(0), jnp.int32(i), jnp.int32(0))
    return jax.lax.dynamic_update_slice(x, rows[:, None], start)


def write_steps(x: jax.Array, rows: jax.Array, block: Block) -> jax.Array:
    """Writes the steps of a block and direction."""
    start = (jnp.int32(0), jnp.int32(block.start), jnp.int32(block.p * rows.shape[2]))
    return jax.lax.dynamic_update_slice(x, rows, start)
