"""Blocks of the Hopper kernels that need no GPU: the list of tiles, and ranges of blocks."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._pallas.gpu._blocks import deal, ranges

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
# work of tiles, pairs, pairs in a section, and programs
DEALS = (
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 9),
)
limits = st.one_of(st.none(), st.integers(0, 40))


@SETTINGS
@given(*DEALS)
@example([1], 1, 1, 1)
def test_every_tile_is_dealt_once(work, pairs, width, ctas):
    table = deal.deal(tuple(work), pairs, width, ctas, 4)
    dealt = table[table >= 0]
    assert sorted(dealt.tolist()) == list(range(pairs * len(work)))
    assert table.shape[0] == ctas
    assert table.shape[1] % 4 == 0
    assert (table[:, -1] == -1).all()  # a program may read one more
    behind = np.cumsum(table < 0, axis=1) > 0
    assert (table[behind] == -1).all()
    assert deal.rounds(table) == (table >= 0).sum(axis=1).max()


@SETTINGS
@given(*DEALS)
@example([5, 3, 1], 7, 5, 4)
@example([1, 2], 6, 5, 9)  # two even sections have fewer tiles than there are programs
def test_sections_end_together(work, pairs, most, ctas):
    work = tuple(work)
    width = deal.balanced(work, pairs, most, ctas)
    widest = min(pairs, max(most, -(-ctas // len(work))))
    even = -(-pairs // -(-pairs // widest))
    assert 1 <= width <= even
    assert width == even or width >= ctas // len(work)
    ends = lambda width: deal.imbalance(deal.deal(work, pairs, width, ctas, 1), work)
    assert ends(width) <= ends(even) + 5e-4


def test_sections_of_equal_or_many_tiles_are_as_wide_as_they_may_be():
    assert deal.balanced(tuple(range(1, 1 << 10)), 64, 9, 132) == 8
    assert deal.balanced((8,), 32768, 1280, 132) == 1261  # 26 sections


# batch, query heads, key heads, tokens, head size, rows of a tile
BENCHMARKS = [
    (4, 16, 16, 4096, 128, 128),
    (1, 16, 16, 16384, 128, 128),
    (4, 32, 8, 4096, 128, 128),
    (4, 32, 32, 4096, 64, 192),
    (16, 16, 16, 1024, 128, 128),
    (4, 16, 16, 4096, 192, 128),
]


@pytest.mark.parametrize("window", [None, 1023])
@pytest.mark.parametrize(("batch", "heads", "groups", "length", "d", "rows"), BENCHMARKS)
def test_programs_end_together(batch, heads, groups, length, d, rows, window):
    reach = ranges.Reach(length, length, window, 0, 128)
    first = np.arange(0, length, rows)
    blocks = reach.blocks(first, first + rows - 1)
    work = tuple((blocks.top - blocks.bottom).tolist())
    group, pairs = heads // groups, batch * heads
    width = deal.section(pairs, len(work), 2 * length * (d + min(d, 128)), group, 32 << 20, 132)
    table = deal.deal(work, pairs, width, 132, 128)
    # tiles of a window are all alike: programs with one more than others end later
    items = pairs * len(work)
    least = math.ceil(items / 132) * 132 / items if window else 1.0
    assert deal.imbalance(table, work) <= 1.02 * least


@SETTINGS
@given(
    st.integers(1, 70), st.integers(1, 70), limits, limits, st.sampled_from([4, 8, 16]),
    st.integers(0, 60), st.integers(1, 20),
)  # fmt: skip
@example(9, 9, None, 0, 8, 0, 8)
@example(20, 9, None, 0, 8, 0, 8)  # rows that see nothing
@example(9, 20, 3, 0, 8, 8, 8)
@example(64, 64, None, 0, 16, 0, 8)
@example(33, 40, 5, 5, 8, 32, 8)  # rows behind the last query
@example(64, 64, 13, 0, 8, 7, 8)  # the last row does not see the first key of the first block
def test_blocks_cover_what_rows_see(num_q, num_k, left, right, size, first, count):
    reach = ranges.Reach(num_q, num_k, left, right, size)
    rows, keys = np.arange(first, first + count)[:, None], np.arange(reach.num_blocks * size)[None]
    limits = reach.sees(*np.broadcast_arrays(rows, keys))
    seen = np.ones((count, keys.size), bool) if limits is None else limits
    seen = seen & (keys < num_k) & (rows < num_q)
    blocks = reach.blocks(first, first + count - 1)
    top, edge, inner, bottom = (int(x) for x in blocks)
    assert 0 <= bottom <= inner <= edge < top <= reach.num_blocks
    outside = np.r_[0 : bottom * size, top * size : keys.size]
    assert not seen[:, outside].any()
    # what takes no mask is visible to all rows, and the left mask is enough below
    real = seen[rows[:, 0] < num_q]
    assert real[:, inner * size : edge * size].all()
    below = slice(bottom * size, inner * size)
    if left is not None:
        assert (real[:, below] == reach.sees_left(rows, keys)[rows[:, 0] < num_q][:, below]).all()
    masked = slice(edge * size, top * size)
    found = reach.sees_at_edges(*np.broadcast_arrays(rows, keys), count)
    if found is not None:
        assert (real[:, masked] == found[rows[:, 0] < num_q][:, masked]).all()
    # every row that sees anything sees a key of the first, masked blocks
    assert (real[:, edge * size : top * size].any(axis=1) == real.any(axis=1)).all()


def test_blocks_of_several_runs_at_once():
    reach = ranges.Reach(100, 150, 20, 0, 16)
    first = np.arange(0, 100, 8)
    together = reach.blocks(first, first + 7)
    for i, row in enumerate(first.tolist()):
        alone = reach.blocks(row, row + 7)
        assert [int(x[i]) for x in together] == [int(x) for x in alone]
