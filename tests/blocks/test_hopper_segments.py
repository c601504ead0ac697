"""Which blocks of the Hopper kernels hold visible pairs when ids or lengths decide; no GPU."""

import functools
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.callib import cdiv
from ejkernel.kernels._pallas.gpu._blocks import deal, segment_ranges

COUNT, SIZE = 8, 16  # tokens of a held group and of a streamed block
COMPARE = {"first": operator.ge, "last": operator.le, "ids": operator.eq}
# batch, lengths; window; whether there are ids and lengths
SHAPES = {
    "ids": ((2, 90, 90), (None, None), True, False),
    "ids_causal": ((2, 70, 99), (None, 0), True, False),
    "ids_window": ((1, 99, 70), (20, 5), True, False),
    "packed": ((1, 96, 80), (None, None), False, True),
    "packed_window": ((1, 80, 121), (25, 0), False, True),
    "rows": ((3, 70, 50), (None, 0), False, True),
    "both": ((1, 100, 100), (None, 0), True, True),
    "rows_ids": ((2, 60, 90), (30, None), True, True),
}


def draw(name, seed):
    """Ids in runs, mixed, or equal for all; lengths with empty sequences and tokens of none."""
    (batch, t, s), window, has_ids, has_lengths = SHAPES[name]
    rng = np.random.default_rng([seed, len(name)])
    made: dict[str, np.ndarray | None] = dict.fromkeys(segment_ranges._FIELDS)
    if has_ids:
        for side, length in (("q", t), ("kv", s)):
            found = rng.integers(-1, 3, (batch, length))
            if seed % 3:
                found = np.sort(found, axis=1)
                found = np.where(found < 0, 3, found)  # padding comes last
                found = np.where(found == 3, -1, found)
            if seed % 4 == 3:
                found = np.where(np.arange(length) < length - 5, 7, -1) + np.zeros_like(found)
            made[f"{side}_segment_ids"] = found.astype(np.int32)
    if has_lengths:
        for side, length in (("q", t), ("k", s)):
            if batch > 1:
                cum = np.cumsum([0, *rng.integers(0, length + 1, batch)])
            else:
                cum = np.sort(rng.integers(0, length + 1, 5))
                cum[1] = cum[2] if seed % 2 else cum[1]
            made[f"cum_seqlens_{side}"] = cum.astype(np.int32)
    return made, window


def pairs_of(name, made, window):
    """The dense mask [b, t, s] by the rules of the package's documentation."""
    (batch, t, s), _, has_ids, has_lengths = SHAPES[name]
    left, right = window
    seen = np.zeros((batch, t, s), bool)
    for b in range(batch):
        parts = [(0, t, 0, s)]
        if has_lengths:
            q, k = made["cum_seqlens_q"], made["cum_seqlens_k"]
            if batch > 1:
                parts = [(0, q[b + 1] - q[b], 0, k[b + 1] - k[b])]
            else:
                parts = [(q[n], q[n + 1], k[n], k[n + 1]) for n in range(len(q) - 1)]
        for q0, q1, k0, k1 in parts:
            i, j = np.arange(q1 - q0)[:, None], np.arange(k1 - k0)[None]
            at = (k1 - k0) - (q1 - q0) + i
            part = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
            part &= True if left is None else j >= at - left
            part &= True if right is None else j <= at + right
            seen[b, q0:q1, k0:k1] = part
    if has_ids:
        q, k = made["q_segment_ids"][:, :, None], made["kv_segment_ids"][:, None]
        seen &= (q == k) & (q >= 0)
    return seen


def sides_of(args):
    sides = segment_ranges.sides(args)
    assert sides is not None
    return sides


@functools.cache
def compute(name):
    (batch, t, s), window, *_ = SHAPES[name]

    def run(made):
        shapes = {"query": np.zeros((batch, t, 1, 1)), "key": np.zeros((batch, s, 1, 1))}
        args = types.SimpleNamespace(**shapes, **made, sliding_window=window)
        queries, keys = sides_of(args)
        found = []
        for of_keys, held, streamed in ((False, queries, keys), (True, keys, queries)):
            limits = segment_ranges.limits(args, of_keys)
            length = cdiv(held.first.shape[1], COUNT) * COUNT
            found.append(
                {
                    "rows": segment_ranges.rows(held, length, limits),
                    "marks": segment_ranges.marks(streamed, streamed.first.shape[1]),
                    "padding": segment_ranges.has_padding(streamed, SIZE),
                    "blocks": segment_ranges.blocks(held, streamed, COUNT, SIZE),
                    "behind": segment_ranges.sees_behind(held, streamed, COUNT, SIZE),
                }
            )
        return found

    return jax.jit(run)


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_cover_what_tokens_see(name):
    for seed in range(8):
        made, window = draw(name, seed)
        seen = pairs_of(name, made, window)
        given = {n: None if x is None else jnp.asarray(x) for n, x in made.items()}
        args = types.SimpleNamespace(**made, sliding_window=window)
        for of_keys, found in enumerate(compute(name)(given)):
            held = seen.swapaxes(1, 2) if of_keys else seen
            limits = segment_ranges.limits(args, bool(of_keys))
            check_pairs(held, {n: jax.tree.map(np.asarray, x) for n, x in found.items()}, limits)


def check_pairs(seen, found, limits):
    batch, length, other = seen.shape
    index = np.arange(other)[None]
    for b in range(batch):
        compared = [
            COMPARE[n](found["marks"][b][None] if n == "ids" else index, row[:length, None])
            for n, row in zip(limits, found["rows"][b], strict=True)
        ]
        np.testing.assert_array_equal(np.all(compared, axis=0), seen[b])
    starts = np.arange(0, other, SIZE)
    hidden = np.add.reduceat(found["marks"] < 0, starts, axis=1) > 0
    np.testing.assert_array_equal(found["padding"] > 0, hidden)
    for b, group in np.ndindex(found["behind"].shape):
        rows = seen[b, group * COUNT : (group + 1) * COUNT]
        first, full, ragged, last = (int(x[b, group]) for x in found["blocks"])
        assert 0 <= first <= full <= ragged <= last <= cdiv(other, SIZE)
        assert not rows[:, : first * SIZE].any()
        assert not rows[:, last * SIZE :].any()
        assert ragged * SIZE <= other or full == ragged
        assert rows[:, full * SIZE : ragged * SIZE].all()
        if (behind := found["behind"][b, group]) >= 0:
            assert rows[:, behind * SIZE :].any(axis=1).all()


def test_blocks_of_runs_are_as_few_as_can_be():
    for name in ("packed", "packed_window", "rows"):
        for seed in range(8):
            made, window = draw(name, seed)
            seen = pairs_of(name, made, window)
            found = compute(name)(
                {n: None if x is None else jnp.asarray(x) for n, x in made.items()}
            )
            blocks = jax.tree.map(np.asarray, found[0]["blocks"])
            for b, group in np.ndindex(blocks.first.shape):
                rows = seen[b, group * COUNT : (group + 1) * COUNT].any(0)
                hit = np.flatnonzero(np.add.reduceat(rows, np.arange(0, rows.size, SIZE)))
                ends = (hit[0], hit[-1] + 1) if len(hit) else (0, 0)
                assert (blocks.first[b, group], blocks.last[b, group]) == ends


def test_blocks_that_all_tokens_see_need_no_mask():
    """Of one segment, and of two of which a block holds one, all but the ends."""
    ids = np.repeat([0, 1], [64, 96])[None].astype(np.int32)
    shapes = {"query": np.zeros((1, 160, 1, 1)), "key": np.zeros((1, 160, 1, 1))}
    given = {"q_segment_ids": ids, "kv_segment_ids": ids, "cum_seqlens_q": None}
    args = types.SimpleNamespace(**shapes, **given, cum_seqlens_k=None, sliding_window=(None, 0))

    @jax.jit
    def found():
        queries, keys = sides_of(args)
        behind = segment_ranges.sees_behind(queries, keys, 16, 16)
        return segment_ranges.blocks(queries, keys, 16, 16), behind

    blocks, behind = found()
    index = np.arange(10)
    np.testing.assert_array_equal(blocks.first[0], np.where(index < 4, 0, 4))
    np.testing.assert_array_equal(blocks.full[0], blocks.first[0])
    np.testing.assert_array_equal(blocks.ragged[0], index)
    np.testing.assert_array_equal(blocks.last[0], index + 1)
    np.testing.assert_array_equal(behind[0], index)


deal_on_device = jax.jit(deal.deal_on_device, static_argnums=(1, 2, 3, 4))
# batch, query heads, pairs of a section, programs; work of tiles
DEALS = [
    (1, 1, 1, 1, [[3]]),
    (2, 3, 4, 4, [[1, 5, 2], [9, 1, 1]]),
    (3, 4, 8, 5, [[1, 5], [9, 1], [2, 2]]),  # two rows in a section, the last one alone
    (2, 5, 2, 3, [[4, 4, 1], [0, 3, 8]]),  # two heads in a section, the last one alone
]


@pytest.mark.parametrize(("batch", "heads", "width", "ctas", "work"), DEALS)
def test_every_tile_is_dealt_once(batch, heads, width, ctas, work):
    work = np.asarray(work, np.int32)
    table, rounds = (np.asarray(x) for x in deal_on_device(work, heads, width, ctas, 4))
    assert sorted(table[table >= 0].tolist()) == list(range(batch * heads * work.shape[1]))
    assert table.shape[0] == ctas
    assert table.shape[1] % 4 == 0
    assert (table[:, rounds:] == -1).all()
    assert rounds < table.shape[1]  # a program may read one more


@pytest.mark.parametrize("kind", ["one", "equal", "mixed", "padded"])
@pytest.mark.parametrize(
    ("batch", "heads", "tiles", "width"), [(4, 16, 32, 16), (1, 16, 128, 4), (16, 16, 8, 64)]
)
def test_programs_end_together(batch, heads, tiles, width, kind):
    rng = np.random.default_rng(5)
    index = np.broadcast_to(np.arange(tiles), (batch, tiles))
    starts = {
        "one": np.zeros_like(index),
        "equal": index // 8 * 8,
        "mixed": np.sort(rng.integers(0, tiles, (batch, tiles)), axis=1),
        "padded": index
        - np.where(index < (np.arange(batch)[:, None] + 1) * tiles // batch, index, 0),
    }[kind]
    work = np.maximum(index - starts + 1, 1)
    table, _ = deal_on_device(work.astype(np.int32), heads, width, 132, 128)
    table, cost = np.asarray(table), np.repeat(work[:, None], heads, axis=1).ravel() + 1.0
    sums = np.where(table >= 0, cost[np.maximum(table, 0)], 0.0).sum(axis=1)
    assert sums.max() / sums.mean() <= 1.1
