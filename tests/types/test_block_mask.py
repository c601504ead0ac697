"""Patterns of blocks: their tables, alignment, algebra and identity."""

import numpy as np
import pytest

from ejkernel.types import block_mask


def table(pattern, t=20, s=20, size=4):
    return ["".join(".#"[x] for x in row) for row in pattern.build(t, s, size).astype(int)]


def test_tables():
    assert table(block_mask.local(1)) == ["##...", "###..", ".###.", "..###", "...##"]
    assert table(block_mask.local(2, 0)) == ["#....", "##...", "###..", ".###.", "..###"]
    assert table(block_mask.causal()) == ["#....", "##...", "###..", "####.", "#####"]
    assert table(block_mask.strided(2)) == ["#.#.#", ".#.#.", "#.#.#", ".#.#.", "#.#.#"]
    assert table(block_mask.global_()) == ["#####", "#....", "#....", "#....", "#...."]
    assert table(block_mask.global_((1, 4))) == [".#..#", "#####", ".#..#", ".#..#", "#####"]


def test_the_last_query_stands_at_the_last_key():
    assert table(block_mask.causal(), t=8) == ["####.", "#####"]
    assert table(block_mask.local(0), t=8) == ["...#.", "....#"]
    # 6 queries from position 12 on, blocks of 4: the second block holds two of them
    assert table(block_mask.causal(), t=6, s=18) == ["####.", "#####"]
    # positions 3..6 and 7..8: a block of queries that lies across two blocks of keys
    assert table(block_mask.local(0), t=6, s=9) == ["##.", ".##"]
    # more queries than keys: the first ones stand before every key
    assert table(block_mask.causal(), t=12, s=4) == [".", ".", "#"]


def test_algebra():
    a, b = block_mask.local(1), block_mask.strided(2)
    built = [x.build(20, 28, 4) for x in (a, b, a | b, a & b, ~a)]
    np.testing.assert_array_equal(built[2], built[0] | built[1])
    np.testing.assert_array_equal(built[3], built[0] & built[1])
    np.testing.assert_array_equal(built[4], ~built[0])
    with pytest.raises(TypeError):
        a | 3


def test_random_is_a_number_of_blocks_for_each_row_and_a_function_of_its_seed():
    made = block_mask.random(3, seed=1).build(64, 80, 4)
    assert (made.sum(axis=1) == 3).all()
    assert made.any(axis=0).sum() > 10
    np.testing.assert_array_equal(made, block_mask.random(3, seed=1).build(64, 80, 4))
    assert (made != block_mask.random(3, seed=2).build(64, 80, 4)).any()
    assert block_mask.random(9).build(8, 8, 4).all()
    # pinned: another version or machine must draw the same blocks
    assert table(block_mask.random(1, seed=7)) == PINNED


PINNED = ["....#", "....#", "..#..", "...#.", "....#"]


def test_bigbird_is_the_union_of_its_parts():
    parts = block_mask.local(1) | block_mask.global_(2) | block_mask.random(2, seed=3)
    whole = block_mask.bigbird(window=1, num_global=2, num_random=2, seed=3)
    np.testing.assert_array_equal(whole.build(40, 40, 4), parts.build(40, 40, 4))


def test_equal_patterns_are_one_key():
    a, b = (block_mask.local(2) | block_mask.random(1, seed=4) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != block_mask.local(2) | block_mask.random(1, seed=5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: block_mask.local(-1), "`left` must be an int >= 0; got -1"),
        (lambda: block_mask.local(1, 0.5), "`right` must be"),
        (lambda: block_mask.strided(0), "`stride` must be an int >= 1; got 0"),
        (lambda: block_mask.global_((1, -2)), "`blocks` must be"),
        (lambda: block_mask.global_(1.5), "int or a tuple"),
        (lambda: block_mask.random(-1), "`count` must be"),
        (lambda: block_mask.random(1, seed=-1), "`seed` must be"),
        (lambda: block_mask.causal().build(4, 4, 0), "`block_size` must be"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
