"""Schedules as libtpu writes them; the sample is a kernel of `sample.py` for a v5e."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.aot import _schedule, _tpu, _trips
from ejkernel.aot._schedule import Control
from tests.aot import sample

DATA = pathlib.Path(__file__).parent / "data"
BUNDLES = (DATA / "sample_bundles.txt").read_text()
UTILIZATION = (DATA / "sample_utilization.txt").read_text()
STEPS = 6
CONTROL = [Control("branch", 1 / 3), Control("loop", 2.0), Control("branch", 1 / 3)]
# bundles of the sample, counted by hand: the loop over the grid, the inner loop, two branches
GRID, LOOP, FIRST, LAST, ALL = 194, 56, 17, 17, 219


def test_loops_and_branches_are_weighed():
    made = _schedule.read(BUNDLES, UTILIZATION, CONTROL, STEPS)
    once = GRID - LOOP - FIRST - LAST
    expected = (ALL - GRID) + STEPS * (once + 2 * LOOP + (FIRST + LAST) / 3)
    assert made.exact
    assert made.cycles == pytest.approx(expected)
    assert made.steps == STEPS


def test_shares_are_of_the_weighed_cycles():
    few = _schedule.read(BUNDLES, UTILIZATION, CONTROL, STEPS)
    many = [c if c.kind == "branch" else Control("loop", 200.0) for c in CONTROL]
    much = _schedule.read(BUNDLES, UTILIZATION, many, STEPS)
    assert 0 < few.mxu_share < much.mxu_share < 1
    assert 0 < few.vpu_share < 1
    assert _schedule.read(BUNDLES, "", CONTROL, STEPS).mxu_share is None


@pytest.mark.parametrize("control", [None, [], CONTROL[:1], [*CONTROL, Control("loop", 3.0)]])
def test_what_is_not_known_is_a_lower_bound(control):
    made = _schedule.read(BUNDLES, UTILIZATION, control, STEPS)
    assert not made.exact
    assert made.cycles < _schedule.read(BUNDLES, UTILIZATION, CONTROL, STEPS).cycles * 1.2


def test_branches_that_are_always_taken_may_be_none():
    more = [Control("branch", 1.0), *CONTROL, Control("branch", 0.0)]
    assert _schedule.read(BUNDLES, "", more, STEPS) == _schedule.read(BUNDLES, "", CONTROL, STEPS)


def test_two_cores_share_a_grid():
    halved = BUNDLES.replace(
        f", {STEPS + 2} /* loop exit test", f", {STEPS // 2 + 2} /* loop exit test"
    )
    assert halved != BUNDLES
    assert _schedule.read(halved, "", CONTROL, STEPS).steps == STEPS // 2


def test_a_schedule_without_loops():
    text = "     0   :  { %a = smov.u32 1 }\n   0x1   :  {}\n"
    assert _schedule.read(text, "", [], 1) == _schedule.Schedule(2.0, True, None, None, 1)


# Trip counts


def kernels(rows=(1, 3), inputs=None):
    traced = jax.make_jaxpr(sample.program(rows))(sample.SHAPES)
    return _trips.kernels(traced, inputs or [None] * len(sample.SHAPES))


def test_trips_of_a_constant_table():
    (kernel,) = kernels()
    control, flops = _trips.control(kernel)
    assert (kernel.name, kernel.grid) == ("sample_kernel", (2, 3))
    assert control == CONTROL
    assert flops == 3 * (1 + 3) * 2 * 128**3


def test_trips_of_a_table_among_the_arguments():
    (kernel,) = kernels(None, [np.array([5, 0], np.int32), None, None])
    assert _trips.control(kernel)[0][1] == Control("loop", 2.5)


def test_loops_of_a_fixed_length():
    def body(table, x, out):
        def step(k, carry):
            @pl.when(table[0] > 4)
            def _():
                out[...] += jnp.dot(x[...], x[...])

            return carry

        jax.lax.fori_loop(0, 5, step, np.int32(0))

    def traced(x):
        spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(2,))
        out = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        return pl.pallas_call(body, grid_spec=spec, out_shape=out)(np.int32([7]), x)

    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    (kernel,) = _trips.kernels(jax.make_jaxpr(traced)(x), [None])
    assert _trips.control(kernel) == ([Control("branch", 1.0)], 2 * 5 * 2 * 128**3)


def test_work_in_a_branch_counts_as_often_as_the_branch_is_entered():
    """Of four grid steps, the second and the third enter; only the third enters the inner one."""

    def body(table, x, out):
        i = pl.program_id(0)

        def step(k, carry):
            out[...] += jnp.dot(x[...], x[...])
            return carry

        @pl.when((i == 1) | (i == 2))
        def _():
            jax.lax.fori_loop(0, table[i], step, np.int32(0))

            @pl.when(table[i] > 4)
            def _():
                out[...] += jnp.dot(x[...], x[...])

    def traced(x):
        spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(4,))
        out = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        return pl.pallas_call(body, grid_spec=spec, out_shape=out)(np.int32([9, 3, 7, 9]), x)

    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    (kernel,) = _trips.kernels(jax.make_jaxpr(traced)(x), [None])
    control, flops = _trips.control(kernel)
    assert control == [Control("branch", 0.5), Control("loop", 5.0), Control("branch", 0.5)]
    assert flops == (3 + 7 + 1) * 2 * 128**3


def test_a_branch_may_depend_on_the_index_of_its_loop():
    """All trips but the last enter, 2 of 3 and 4 of 5."""

    def body(table, x, out):
        count = table[pl.program_id(0)]

        def step(k, carry):
            @pl.when(k + 1 < count)
            def _():
                out[...] += jnp.dot(x[...], x[...])

            return carry

        jax.lax.fori_loop(0, count, step, np.int32(0))

    def traced(x):
        spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(2,))
        out = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        return pl.pallas_call(body, grid_spec=spec, out_shape=out)(np.int32([3, 5]), x)

    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    (kernel,) = _trips.kernels(jax.make_jaxpr(traced)(x), [None])
    control, flops = _trips.control(kernel)
    assert control == [Control("loop", 4.0), Control("branch", 0.75)]
    assert flops == 6 * 2 * 128**3


def test_a_table_that_nobody_knows():
    (kernel,) = kernels(None)
    assert _trips.control(kernel) == (None, None)


def test_a_grid_without_end_is_left_alone():
    (kernel,) = kernels()
    huge = _trips.Kernel(kernel.name, (1 << 12, 1 << 12), kernel.jaxpr, kernel.tables)
    assert _trips.control(huge) == (None, None)


def test_vmem_is_read_from_the_report(tmp_path):
    uses = (
        '{"hlo_breakdowns": {"sample_kernel.1": {"total_size": 300, "blocks": [{"allocations": ['
        '{"size": 200, "tag": "scratch operand"}, {"size": 100, "tag": "SPILL"}]}]}}}'
    )
    assert _tpu._vmem(tmp_path) == {}
    (tmp_path / "1-TLP-03-vmem_report.html").write_text(f"<script>const DATA ={uses};</script>")
    assert _tpu._vmem(tmp_path) == {"sample_kernel.1": (300, 100)}
