"""A chunk as products of matrices (Yang et al., Gated Linear Attention, 2023), and its gradients.

The two halves of a block meet at its middle, to which keys and from which queries decay; blocks
double from one token to the chunk. With one gate for a head all pairs are one product.
Layout: [.., h, c, x].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla._blocks import chunks


class Operands(NamedTuple):
    """The arrays of chunks; before `prepare`, q, k and v have their own heads."""

    q: jax.Array  # [.., h, c, d], scaled
    k: jax.Array  # [.., h, c, d]
    v: jax.Array  # [.., h, c, e]
    a: Any  # log gates of the state's rows [.., h, c, d or 1], prepared: decays; or None
    b: Any  # log gates of the state's columns [.., h, c, e], prepared: decays; or None


def prepare(x: Operands) -> Operands:
    """Queries, keys and values of each head, and the decays that gates make."""
    x = repeat(x)
    a, b = (None if y is None else chunks.decays(y) for y in (x.a, x.b))
    return x._replace(a=a, b=b)


def repeat(x: Operands) -> Operands:
    """Queries, keys and values of each head; those with fewer serve several."""
    heads = max(y.shape[-3] for y in x[:3])
    q, k, v = (jnp.repeat(y, heads // y.shape[-3], axis=-3) for y in x[:3])
    return x._replace(q=q, k=k, v=v)


def totals(x: Operands) -> tuple[jax.Array | None, jax.Array | None]:
    """The whole chunk's decays of rows [.., h, d, 1] and of columns [.., h, 1, e]."""
    rows = None if x.a is None else x.a[-1].start[..., 0, -1, :, None]
    columns = None if x.b is None else x.b[-1].start[..., 0, -1, None, :]
    return rows, columns


def fade(h: jax.Array, rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    return times(times(h, rows), columns)


def absorb(x: Operands, exact: Any) -> jax.Array:
    """What a chunk adds to the state."""
    k, v = times(x.k, _end(x.a)), times(x.v, _end(x.b))
    return jnp.einsum("...cd,...ce->...de", k, v, precision=exact)


def receive(x: Operands, dout: jax.Array, exact: Any) -> jax.Array:
    """The gradient of `emit` with respect to the state."""
    q, dout = times(x.q, _start(x.a)), times(dout, _start(x.b))
    return jnp.einsum("...cd,...ce->...de", q, dout, precision=exact)


def emit(h: jax.Array, x: Operands, exact: Any) -> jax.Array:
    """The outputs of a chunk, [.., h, c, e], from the state before it."""
    q = times(x.q, _start(x.a))
    out = times(jnp.einsum("...cd,...de->...ce", q, h, precision=exact), _start(x.b))
    if _one_product(x):
        scores = jnp.einsum("...td,...sd->...ts", x.q, x.k, precision=exact) * _pairs(x)
        return out + jnp.einsum("...ts,...se->...te", scores, x.v, precision=exact)
    out = out + row_sums(x.q * x.k) * x.v
    for level in range(_depth(x)):
        q, k, v, later = _meet(x, level)
        scores = jnp.einsum("...td,...sd->...ts", q, k, precision=exact)
        more = jnp.einsum("...ts,...se->...te", scores, v, precision=exact)
        out = _add(out, level, 1, times(more, later))
    return out


def gradients(
    h: jax.Array, dh: jax.Array, x: Operands, dout: jax.Array, exact: Any
) -> dict[str, jax.Array]:
    """Of q, k, v and log gates, from the state before, the gradient of that after, and dout."""

    def dot(formula: str, *xs: jax.Array) -> jax.Array:
        return jnp.einsum(formula, *xs, precision=exact)

    q, k, v = times(x.q, _start(x.a)), times(x.k, _end(x.a)), times(x.v, _end(x.b))
    dout_in = times(dout, _start(x.b))
    dq, dk = dot("...ce,...de->...cd", dout_in, h), dot("...ce,...de->...cd", v, dh)
    dv = dot("...cd,...de->...ce", k, dh)
    inside = _pair_gradients if _one_product(x) else _level_gradients
    found, gates = inside(x, dout, dot)
    made = {
        "q": times(dq, _start(x.a)) + found["q"],
        "k": times(dk, _end(x.a)) + found["k"],
        "v": times(dv, _end(x.b)) + found["v"],
    }
    if x.a is not None:
        width = x.a[0].start.shape[-1]
        kept = _narrow(row_sums(fade(h, *totals(x)) * dh).swapaxes(-1, -2), width)
        top = [_narrow(y, width)[..., None, :, :] for y in (dq * q, dk * k)]
        made["a"] = chunks.gate_gradients(chunks.Decays(*top), kept, gates["a"])
        made["a"] = made["a"] + found.get("a", 0)
    if x.b is not None:
        kept = (fade(h, *totals(x)) * dh).sum(axis=-2, keepdims=True)
        top = [y[..., None, :, :] for y in (dout_in * dot("...cd,...de->...ce", q, h), dv * v)]
        made["b"] = chunks.gate_gradients(chunks.Decays(*top), kept, gates["b"])
    return made


def _pair_gradients(x: Operands, dout: jax.Array, dot: Callable) -> tuple[Any, Any]:
    """Of pairs inside the chunk, as one product; gates are one for a head, or none."""
    decay = _pairs(x)
    scores = dot("...td,...sd->...ts", x.q, x.k) * decay
    dscores = dot("...te,...se->...ts", dout, x.v)
    ddots = dscores * decay
    found = {
        "q": dot("...ts,...sd->...td", ddots, x.k),
        "k": dot("...ts,...td->...sd", ddots, x.q),
        "v": dot("...ts,...te->...se", scores, dout),
    }
    if x.a is not None:
        # a gate is in the decay of each pair around it: sums over s before, then over t from it
        before = np.triu(np.ones(scores.shape[-2:]), 1)
        around = dot("...ts,su->...tu", dscores * scores, jnp.asarray(before, scores.dtype))
        found["a"] = jnp.where(_lower(around.ndim, around.shape[-1]), around, 0).sum(axis=-2)[
            ..., None
        ]
    return found, {"a": ()}


def _level_gradients(x: Operands, dout: jax.Array, dot: Callable) -> tuple[Any, Any]:
    """Of pairs inside the chunk, by levels; for gates, of the decays of each level."""
    score, dscore = row_sums(x.q * x.k), row_sums(dout * x.v)
    dq, dk, dv = dscore * x.k, dscore * x.q, score * dout
    gates: dict[str, list[Any]] = {"a": [], "b": []}
    for level in range(_depth(x)):
        q, k, v, later = _meet(x, level)
        dmore = times(_half(dout, level, 1), later)
        scores, dscores = dot("...td,...sd->...ts", q, k), dot("...te,...se->...ts", dmore, v)
        dq_in, dk_in = dot("...ts,...sd->...td", dscores, k), dot("...ts,...td->...sd", dscores, q)
        dv_in = dot("...ts,...te->...se", scores, dmore)
        rows, columns = _decay(x.a, level), _decay(x.b, level)
        dq = _add(dq, level, 1, times(dq_in, rows[0]))
        dk = _add(dk, level, 0, times(dk_in, rows[1]))
        dv = _add(dv, level, 0, times(dv_in, columns[1]))
        if x.a is not None:
            width = x.a[0].start.shape[-1]
            gates["a"].append((_narrow(dq_in * q, width), _narrow(dk_in * k, width)))
        if x.b is not None:
            gates["b"].append((dmore * dot("...ts,...se->...te", scores, v), dv_in * v))
    return {"q": dq, "k": dk, "v": dv}, gates


# Blocks of 2 ** level tokens, two of which meet


def _meet(x: Operands, level: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Queries of second and keys, values of first halves at their middle; the outputs' decay."""
    rows, columns = _decay(x.a, level), _decay(x.b, level)
    q, k, v = (_half(y, level, side) for y, side in ((x.q, 1), (x.k, 0), (x.v, 0)))
    return times(q, rows[0]), times(k, rows[1]), times(v, columns[1]), columns[0]


def _decay(levels: Any, level: int) -> tuple[jax.Array | None, jax.Array | None]:
    """From the middle to second halves, and from first halves to the middle."""
    if levels is None:
        return None, None
    return chunks.halves(levels[level].start)[1], chunks.halves(levels[level].end)[0]


def _half(x: jax.Array, level: int, side: int) -> jax.Array:
    """[.., c, x] as the blocks [.., n, L, x] of one side."""
    return chunks.halves(x.reshape(*x.shape[:-2], -1, 2**level, x.shape[-1]))[side]


def _add(x: jax.Array, level: int, side: int, more: jax.Array) -> jax.Array:
    """Adds to the blocks of one side."""
    both = [_half(x, level, 0), _half(x, level, 1)]
    both[side] = both[side] + more
    return jnp.stack(both, axis=-3).reshape(x.shape)


def _depth(x: Operands) -> int:
    return x.q.shape[-2].bit_length() - 1


def _one_product(x: Operands) -> bool:
    return x.b is None and (x.a is None or x.a[0].start.shape[-1] == 1)


def _pairs(x: Operands) -> jax.Array:
    if x.a is not None:
        return chunks.pairs(x.a)
    return jnp.asarray(_lower(x.q.ndim, x.q.shape[-2]), x.q.dtype)


def _lower(rank: int, size: int) -> np.ndarray:
    return np.tri(size, dtype=bool).reshape(*(1,) * (rank - 2), size, size)


# Elements


def times(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor


def _start(levels: Any) -> jax.Array | None:
    return None if levels is None else levels[-1].start[..., 0, :, :]


def _end(levels: Any) -> jax.Array | None:
    return None if levels is None else levels[-1].end[..., 0, :, :]


def _narrow(x: jax.Array, width: int) -> jax.Array:
    """The sum of what one gate serves."""
    return x if x.shape[-1] == width else row_sums(x)


def row_sums(x: jax.Array) -> jax.Array:
    """Sums along the last axis, kept; a product, since XLA's own reduction is slow on a CPU."""
    ones = jnp.ones((x.shape[-1], 1), x.dtype)
    return jnp.einsum("...x,xy->...y", x, ones, precision=jax.lax.Precision.HIGHEST)
