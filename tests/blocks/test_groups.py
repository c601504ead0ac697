"""Steps over blocks of rows and groups, against loops in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._shared import groups
from ejkernel.xla_utils import search

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
SIZES = st.lists(st.integers(0, 5), min_size=4, max_size=4)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def steps_of(sizes, offset, count, m, kind, block):
    """Groups, the rows that they own, and the steps over them; compiled for a few shapes alone."""
    made = groups.of_sizes(sizes, offset, count, m)
    return made, made.owned(m), getattr(groups, f"by_{kind}")(made, m, block)


def rows_of(sizes, offset, count, m):
    """[start, stop) of each matrix, by hand."""
    stops = np.minimum(np.cumsum(sizes), m)
    starts = np.concatenate([[0], stops[:-1]])
    known = [i for i in range(offset, offset + count) if i < len(sizes)]
    return [(int(starts[i]), int(stops[i])) for i in known]


@SETTINGS
@given(
    sizes=SIZES,
    offset=st.sampled_from([0, 2]),
    m=st.sampled_from([7, 12]),
    block=st.sampled_from([2, 4]),
)
@example(sizes=[0, 0, 0, 0], offset=0, m=7, block=4)
@example(sizes=[4, 4, 0, 4], offset=0, m=12, block=4)
@example(sizes=[9, 9, 0, 0], offset=0, m=12, block=4)  # more than there are rows
@example(sizes=[3, 0, 2, 1], offset=2, m=7, block=2)
@pytest.mark.parametrize("kind", ["block", "group"])
def test_every_row_of_every_group_once(kind, sizes, offset, m, block):
    count = len(sizes) - offset
    given_sizes, first = jnp.asarray(np.asarray(sizes)), jnp.asarray(np.int32(offset))
    made, owns, found = jax.device_get(steps_of(given_sizes, first, count, m, kind, block))
    expected = rows_of(sizes, offset, count, m)
    assert [(int(a), int(b)) for a, b in zip(*made, strict=True)] == expected
    owned = {r for a, b in expected for r in range(a, b)}
    assert set(np.flatnonzero(owns)) == owned

    visits = [np.asarray(x) for x in found]
    assert len({len(x) for x in visits}) == 1
    seen = [
        (int(g), int(b) * block + r)
        for g, b, low, high, *_ in zip(*visits, strict=True)
        for r in range(low, high)
    ]
    assert seen == sorted((g, r) for g, (a, b) in enumerate(expected) for r in range(a, b))
    # each block or group has steps in a row, the first and the last of which are marked
    owners = visits[1] if kind == "block" else visits[0]
    total = -(-m // block) if kind == "block" else count
    for flag in visits[4:]:
        assert sorted(owners[flag == 1].tolist()) == list(range(total))
    assert (np.diff(owners) >= 0).all()


@pytest.mark.parametrize("kind", ["block", "group"])
@pytest.mark.parametrize(
    "sizes", [[2**31 - 1] * 4, [12, 2**31 - 1, -5, 3], [2**31 - 1, 5, 2**31 - 1, 2**31 - 1]]
)
@pytest.mark.parametrize("most_pairs", [None, 1 << 20, 0])
def test_steps_stay_inside_whatever_the_sizes_sum_to(kind, sizes, most_pairs, monkeypatch):
    # kernels for TPUs do not check the addresses that they make of these
    if most_pairs is not None:  # as on devices other than CPUs
        monkeypatch.setattr(search, "_MOST_PAIRS", most_pairs)
        other = lambda *xs, cpu, default: default(*xs)
        monkeypatch.setattr(jax.lax, "platform_dependent", other)
    first, given_sizes = jnp.asarray(np.int32(0)), jnp.asarray(np.asarray(sizes, np.int32))
    _, _, found = jax.device_get(steps_of.__wrapped__(given_sizes, first, 4, 12, kind, 4))
    assert found.group.min() >= 0
    assert found.group.max() < 4
    assert found.block.min() >= 0
    assert found.block.max() < 3
