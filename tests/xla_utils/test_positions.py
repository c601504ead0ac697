"""Positions and ids of attention calls, against the rule written out token by token."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo
from ejkernel.xla_utils import positions

T, S = 5, 7
ROWS = (np.array([0, 3, 8]), np.array([0, 7, 11]))  # lengths 3 and 5 of queries, 7 and 4 of keys
PACKED = (np.array([0, 2, 2, 4]), np.array([0, 3, 4, 6]))  # a token of no sequence on both sides
IDS = (np.array([[0, 0, 1, 1, -1]]), np.array([[0, 0, 0, 1, 1, -1, 2]]))
POSITIONS = (np.array([[9, 0, 2, 2, 5]]), np.array([[3, 1, 4, 1, 5, 9, 2]]))


def call(kind="", ids=False, q_positions=None, kv_positions=None):
    """What the rule reads of an attention call."""
    batch = 2 if kind == "rows" else 1
    cum = {"rows": ROWS, "packed": PACKED}.get(kind, (None, None))
    q_ids, kv_ids = IDS if ids else (None, None)
    as_array = lambda x: None if x is None else jnp.asarray(x, jnp.int32)
    fields = {
        "cum_seqlens_q": cum[0],
        "cum_seqlens_k": cum[1],
        "q_segment_ids": q_ids,
        "kv_segment_ids": kv_ids,
        "q_positions": q_positions,
        "kv_positions": kv_positions,
    }
    shapes = {"query": jnp.zeros((batch, T, 1, 1)), "key": jnp.zeros((batch, S, 1, 1))}
    return types.SimpleNamespace(**shapes, **{n: as_array(x) for n, x in fields.items()})


def owner(cum, token):
    """The sequence that a packed token is of, and the first token of that one."""
    for n, (start, stop) in enumerate(itertools.pairwise(cum)):
        if start <= token < stop:
            return n, start
    return None, 0


def expected(args, kind):
    """Positions [b, T] and [b, S], and which pairs ids allow, [b, T, S]."""
    batch = args.query.shape[0]
    q, k = np.zeros((batch, T), int), np.zeros((batch, S), int)
    allowed = np.ones((batch, T, S), bool)
    for b in range(batch):
        for i, j in itertools.product(range(T), range(S)):
            q[b, i], k[b, j] = S - T + i, j
            if kind == "rows":
                len_q, len_k = (int(np.diff(cum)[b]) for cum in ROWS)
                q[b, i] = len_k - len_q + i
                allowed[b, i, j] = i < len_q and j < len_k
            if kind == "packed":
                (n, start_q), (m, start_k) = owner(PACKED[0], i), owner(PACKED[1], j)
                len_q, len_k = (0 if n is None else int(np.diff(cum)[n]) for cum in PACKED)
                q[b, i] = 0 if n is None else len_k - len_q + i - start_q
                k[b, j] = 0 if m is None else j - start_k
                allowed[b, i, j] = n is not None and n == m
            if args.q_segment_ids is not None:
                allowed[b, i, j] &= IDS[0][0, i] == IDS[1][0, j] >= 0
    if args.q_positions is not None:
        q = np.broadcast_to(POSITIONS[0], q.shape)
    if args.kv_positions is not None:
        k = np.broadcast_to(POSITIONS[1], k.shape)
    return q, k, allowed


def allowed_by(ids, batch):
    seen = np.ones((batch, T, S), bool)
    for q, k in ids:
        q, k = np.asarray(q)[:, :, None], np.asarray(k)[:, None, :]
        seen &= (q == k) & (q >= 0)
    return seen


@pytest.mark.parametrize("kind", ["", "rows", "packed"])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("given", ["", "q", "k", "qk"])
def test_the_rule(kind, ids, given):
    given_q = POSITIONS[0] if "q" in given else None
    given_k = POSITIONS[1] if "k" in given else None
    args = call(kind, ids, given_q, given_k)
    q, k, allowed = expected(args, kind)
    found = positions.of_attention(args)
    for module in (jnp, np):
        for actual, side in zip(found.both(T, S, module), (q, k), strict=True):
            assert actual.dtype == np.int32
            np.testing.assert_array_equal(np.broadcast_to(actual, side.shape), side)
    np.testing.assert_array_equal(allowed_by(found.ids, len(q)), allowed)
    told = found.both_or_none(T, S)
    assert all(x is None for x in told) == (kind == "" and not given)


@pytest.mark.parametrize("kind", ["", "rows", "packed"])
def test_masks_follow_the_same_rule(kind):
    args = call(kind, ids=True, q_positions=POSITIONS[0])
    fields = {n: x for n, x in vars(args).items() if n not in ("query", "key") and x is not None}
    if kind == "rows":
        for name, cum in (("q_lengths", "cum_seqlens_q"), ("kv_lengths", "cum_seqlens_k")):
            fields[name] = jnp.diff(fields.pop(cum))
    info = MaskInfo(**fields, causal=True)
    q, k, allowed = expected(args, kind)
    for actual, side in zip(info.resolve_positions(T, S), (q, k), strict=True):
        np.testing.assert_array_equal(np.broadcast_to(actual, side.shape), side)
    dense = allowed & (k[:, None, :] <= q[:, :, None])
    np.testing.assert_array_equal(info.materialize(T, S)[:, 0], dense)


def test_positions_of_the_index_are_known_while_tracing():
    found = jax.jit(lambda: positions.of_attention(call()).both(T, S, np)[0] * 1)
    q, k = positions.of_attention(call()).both(T, S, np)
    assert isinstance(q, np.ndarray)
    assert isinstance(k, np.ndarray)
    np.testing.assert_array_equal(found(), q)
