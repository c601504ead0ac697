"""Steps over blocks of rows and groups, against loops in Python."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._shared import groups

SETTINGS = settings(max_examples=5, deadline=None, derandomize=True)
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def rows_of(sizes, offset, count, m):
    """[start, stop) of each matrix, by hand."""
    stops = np.minimum(np.cumsum(sizes), m)
    starts = np.concatenate([[0], stops[:-1]])
    known = [i for i in range(offset, offset + count) if i < len(sizes)]
    return [(int(starts[i]), int(stops[i])) for i in known]


@SETTINGS
@given(sizes=SIZES, offset=st.integers(0, 2), more=st.integers(0, 7), block=st.sampled_from([2, 4]))
@example(sizes=[0, 0, 0], offset=0, more=5, block=4)
@example(sizes=[4, 4], offset=0, more=0, block=4)
@example(sizes=[9, 9], offset=0, more=-7, block=4)  # more than there are rows
@pytest.mark.parametrize("kind", ["block", "group"])
def test_every_row_of_every_group_once(kind, sizes, offset, more, block):
    offset = min(offset, len(sizes) - 1)
    count, m = len(sizes) - offset, max(sum(sizes) + more, 1)
    made = groups.of_sizes(jnp.asarray(sizes), jnp.int32(offset), count, m)
    expected = rows_of(sizes, offset, count, m)
    assert [(int(a), int(b)) for a, b in zip(*made, strict=True)] == expected
    owned = {r for a, b in expected for r in range(a, b)}
    assert set(np.flatnonzero(made.owned(m))) == owned

    found = getattr(groups, f"by_{kind}")(made, m, block)
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
