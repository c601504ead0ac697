"""The linear recurrence in chunks (Yang et al., Gated Linear Attention, 2023), in plain JAX.

Inside a chunk, pairs of tokens are products of matrices: in parts of a few tokens the decay of
each pair is written out; the two halves of a block meet at its middle, to which keys and from
which queries decay, and blocks double until they are the chunk. Between chunks a scan carries
the states. Layout inside: [m, b, h, c, x].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla._blocks import chunks, loops
from ejkernel.kernels._xla._blocks.pairs import precision, wide
from ejkernel.kernels._xla.linear_recurrence import config


class Operands(NamedTuple):
    """A chunk's arrays, or those of all chunks."""

    q: jax.Array  # [.., h, c, d], scaled
    k: jax.Array  # [.., g, c, d]
    v: jax.Array  # [.., g, c, e]
    a: jax.Array | None  # [.., h, c, d or 1], log decay of the state's rows
    b: jax.Array | None  # [.., h, c, e], log decay of the state's columns


class Plan(NamedTuple):
    """How a call is cut."""

    chunks: chunks.Chunks
    part: int
    at_once: int
    exact: Any


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and the last states when asked for); no residuals."""
    plan = make_plan(args, cfg)
    x = operands(args, plan.chunks)
    states, last = scan_states(args, plan, x)
    out = chunks.each(lambda xs: emit(plan, *xs), (states, x), plan.at_once)
    out = plan.chunks.join(out).astype(args.query.dtype)
    return ((out, last) if args.return_state else (out,)), ()


def make_plan(args: Any, cfg: config.Config) -> Plan:
    size, part = config.sizes(args, cfg)
    cut = chunks.Chunks(args.query.shape[1], size, args.cu_seqlens, args.reverse)
    if args.gk is None and args.gv is None:
        part = size  # one decay for each pair of tokens is a factor of their product
    return Plan(cut, part, cfg.block_n, precision(wide(args.query.dtype)))


def operands(args: Any, cut: chunks.Chunks) -> Operands:
    """The arrays of all chunks; gates of a head become part of those of its rows, if any."""
    dtype = wide(args.query.dtype)
    q, k, v = (x.astype(dtype) for x in (args.query, args.key, args.value))
    rows = None
    if args.g is not None:
        rows = args.g.astype(dtype)[..., None]
    if args.g_gamma is not None:
        gamma = jnp.broadcast_to(args.g_gamma.astype(dtype)[:, None], (*q.shape[:3], 1))
        rows = gamma if rows is None else rows + gamma
    if args.gk is not None:
        rows = args.gk.astype(dtype) + (0 if rows is None else rows)
    columns = None if args.gv is None else args.gv.astype(dtype)
    made = Operands(q * args.softmax_scale, k, v, rows, columns)
    return jax.tree.map(cut.cut, made)


def initial(args: Any) -> jax.Array:
    """The states before the first token, [n, h, d, e]."""
    batch, _, heads, d = args.query.shape
    rows = batch if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    dtype = wide(args.query.dtype)
    if args.initial_state is not None:
        return loops.vary_like(args.initial_state.astype(dtype), args.query)
    zeros = jnp.zeros((rows, heads, d, args.value.shape[-1]), dtype)
    return loops.vary_like(zeros, args.query)


def scan_states(args: Any, plan: Plan, x: Operands) -> tuple[jax.Array, jax.Array]:
    """The state before each chunk, and the last state of each row or sequence."""
    parts = chunks.each(lambda x: absorb(plan, x), x, plan.at_once)
    start, cut = initial(args), plan.chunks
    if cut.sequence is None:

        def step(h: jax.Array, parts: Any) -> Any:
            return fade(h, *parts[1:]) + parts[0], h

        last, states = jax.lax.scan(step, start, parts)
        return states, last
    if not cut.count:
        return jnp.zeros((0, 1, *start.shape[1:]), start.dtype), start

    def step_packed(carry: Any, xs: Any) -> Any:
        h, last = carry
        parts, sequence, first = xs
        h = jnp.where(first, start[jnp.minimum(sequence, start.shape[0] - 1)][None], h)
        after = fade(h, *parts[1:]) + parts[0]
        return (after, last.at[sequence].set(after[0], mode="drop")), h

    # the state of no sequence yet: zeros that vary as the others do
    xs = (parts, cut.sequence, cut.first)
    (_, last), states = jax.lax.scan(step_packed, (start[:1] * 0, start), xs)
    return states, last


def fade(h: jax.Array, rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    """A state after a chunk's total decays."""
    h = h if rows is None else h * jnp.exp(rows)[..., :, None]
    return h if columns is None else h * jnp.exp(columns)[..., None, :]


def absorb(plan: Plan, x: Operands) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """What a chunk adds to the state, and the log of its decays of rows and columns."""
    k, v = _repeat(x)
    rows = columns = None
    if x.a is not None:
        a = chunks.sums(x.a, plan.part, plan.exact)
        k, rows = k * jnp.exp(a.end), a.total
    if x.b is not None:
        b = chunks.sums(x.b, plan.part, plan.exact)
        v, columns = v * jnp.exp(b.end), b.total
    return jnp.einsum("bhcd,bhce->bhde", k, v, precision=plan.exact), rows, columns


def emit(plan: Plan, h: jax.Array, x: Operands) -> jax.Array:
    """The outputs of a chunk, [b, h, c, e], from the state before it."""
    k, v = _repeat(x)
    a = None if x.a is None else chunks.sums(x.a, plan.part, plan.exact)
    b = None if x.b is None else chunks.sums(x.b, plan.part, plan.exact)
    faded = x.q if a is None else x.q * jnp.exp(a.start)
    out = jnp.einsum("bhcd,bhde->bhce", faded, h, precision=plan.exact)
    out = out if b is None else out * jnp.exp(b.start)
    return out + _within(plan, x.q, k, v, a, b)


def receive(plan: Plan, x: Operands, dout: jax.Array) -> jax.Array:
    """The gradient of `emit` with respect to the state."""
    q = x.q
    if x.a is not None:
        q = q * jnp.exp(chunks.sums(x.a, plan.part, plan.exact).start)
    if x.b is not None:
        dout = dout * jnp.exp(chunks.sums(x.b, plan.part, plan.exact).start)
    return jnp.einsum("bhcd,bhce->bhde", q, dout, precision=plan.exact)


def _within(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: chunks.Sums | None,
    b: chunks.Sums | None,
) -> jax.Array:
    """What a chunk's tokens add to its outputs, [b, h, c, e]."""

    def blocks(x: jax.Array, size: int) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, size, x.shape[-1])

    size, total = plan.part, q.shape[2]
    out = _inside(plan, *(blocks(x, size) for x in (q, k, v)), a, b)
    level = 0
    while size < total:
        later, sooner = chunks.halves(blocks(q, size))[1], chunks.halves(blocks(k, size))[0]
        values = chunks.halves(blocks(v, size))[0]
        if a is not None:
            later = later * jnp.exp(chunks.halves(a.levels[level].start)[1])
            sooner = sooner * jnp.exp(chunks.halves(a.levels[level].end)[0])
        if b is not None:
            values = values * jnp.exp(chunks.halves(b.levels[level].end)[0])
        scores = jnp.einsum("bhntd,bhnsd->bhnts", later, sooner, precision=plan.exact)
        more = jnp.einsum("bhnts,bhnse->bhnte", scores, values, precision=plan.exact)
        if b is not None:
            more = more * jnp.exp(chunks.halves(b.levels[level].start)[1])
        first, second = chunks.halves(out)
        out = jnp.concatenate([first, second + more], axis=-2)
        size, level = 2 * size, level + 1
    return out[:, :, 0]


def _inside(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: chunks.Sums | None,
    b: chunks.Sums | None,
) -> jax.Array:
    """The outputs of parts [b, h, n, p, x] by themselves, decays of all their pairs written out."""
    if a is None or a.inside.shape[-1] == 1:
        scores = jnp.einsum("bhntd,bhnsd->bhnts", q, k, precision=plan.exact)
        scores = scores if a is None else scores * jnp.exp(a.inside[..., 0])
    else:
        scores = (jnp.exp(a.inside) * q[..., :, None, :] * k[..., None, :, :]).sum(axis=-1)
    scores = jnp.where(np.tri(plan.part, dtype=bool), scores, 0.0)
    if b is None:
        return jnp.einsum("bhnts,bhnse->bhnte", scores, v, precision=plan.exact)
    return (scores[..., None] * jnp.exp(b.inside) * v[..., None, :, :]).sum(axis=-2)


def _repeat(x: Operands) -> tuple[jax.Array, jax.Array]:
    """Keys and values of each query head."""
    times = x.q.shape[1] // x.k.shape[1]
    return jnp.repeat(x.k, times, axis=1), jnp.repeat(x.v, times, axis=1)
