"""Bisection against NumPy's, for every size around powers of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.xla_utils import search


@pytest.fixture(params=["cpu", "few", "many"])
def branch(request, monkeypatch):
    """Runs the code for CPUs, or one of those for other devices."""
    name = "cpu" if request.param == "cpu" else "default"
    pick = lambda *args, **branches: branches[name](*args)
    monkeypatch.setattr(jax.lax, "platform_dependent", pick)
    if request.param == "many":
        monkeypatch.setattr(search, "_MOST_PAIRS", -1)


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33])
def test_counts_are_those_of_numpy(count, inclusive, branch):
    generator = np.random.default_rng(count)
    ends = np.sort(generator.integers(0, 12, count)).astype(np.int32)  # with equal neighbours
    values = np.arange(-2, 15, dtype=np.int32).reshape(1, -1)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = search.count_before(jnp.asarray(ends), values, inclusive=inclusive)
    expected = np.searchsorted(ends, values, side="right" if inclusive else "left")
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, expected)


def test_ends_that_are_not_sorted_stay_within_them(branch):
    found = search.count_before(jnp.array([5, -3, 1 << 30, 0], jnp.int32), jnp.arange(9))
    assert ((found >= 0) & (found <= 4)).all()


def test_mapped():
    ends, values = jnp.array([[1, 4, 6], [0, 0, 9]], jnp.int32), jnp.arange(8, dtype=jnp.int32)
    found = jax.vmap(search.count_before, in_axes=(0, None))(ends, values)
    for row, mine in zip(ends, found, strict=True):
        np.testing.assert_array_equal(mine, np.searchsorted(row, values, side="right"))


@pytest.mark.parametrize(("platform", "is_loop"), [("cpu", True), ("cuda", False), ("tpu", False)])
@pytest.mark.parametrize("sizes", [(9, 100), (1025, 65536)])
def test_a_loop_on_cpus_alone(platform, is_loop, sizes):
    shapes = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in sizes)
    program = jax.jit(search.count_before).trace(*shapes).lower(lowering_platforms=(platform,))
    assert ("stablehlo.while" in program.as_text()) == is_loop
