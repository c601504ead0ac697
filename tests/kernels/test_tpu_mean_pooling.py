"""Mean pooling on TPUs beyond the generated tests: block sizes, refusals, races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.callib import _pallas
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._pallas.tpu.mean_pooling import config, layout
from tests.kernels import harness

OP = "mean_pooling"
SPEC = kernel_registry.spec(OP)
ENTRY = harness.find_entry(OP, "pallas/tpu")
SMALL = config.Config(block_t=16, block_d=128, rows=2)


def make(shape, dtype=jnp.float32, **options):
    x = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    return SPEC.canonicalize(SPEC.complete({"inputs": x} | options))


def test_blocks_that_do_not_divide():
    """33 tokens in blocks of 16 and 200 features in blocks of 128, both filled up."""
    args = make((2, 33, 200), mask=jnp.arange(66).reshape(2, 33) % 4 != 0)
    of = layout.Rows(args, SMALL)
    assert (of.bt, of.padded, of.features.padded) == (16, 48, (256,))
    made = harness.solve(SPEC, args)
    actual = harness.run_entry(ENTRY, made, (SMALL, SMALL), compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize("options", [{"chunk_size": 4}, {"cu_seqlens": np.asarray([0, 4, 8, 24])}])
def test_a_token_that_is_not_finite_stays_in_its_row(options):
    x = jnp.ones((1, 24, 2, 8)).at[0, 5].set(jnp.nan)
    args = SPEC.canonicalize(SPEC.complete({"inputs": x} | options))
    rows = jax.jit(lambda args: ENTRY.fn(args, SMALL)[0][0])(args).reshape(-1, 16)
    assert np.isnan(rows[1]).all()
    assert (np.delete(rows, 1, axis=0) == 1).all()


def test_heads_stay_an_axis_where_there_is_no_mask():
    assert layout.Rows(make((1, 24, 2, 8)), SMALL).features.heads
    assert not layout.Rows(make((1, 24, 2, 8), mask=jnp.ones((1, 24))), SMALL).features.heads
    assert not layout.Rows(make((1, 24, 2, 256)), SMALL).features.heads  # too many for a block


@pytest.mark.parametrize("case", ["packed", pytest.param("cover00", marks=pytest.mark.slow)])
def test_no_race(case):
    made = harness.problem(OP, case, "float32")
    cfg = harness.configs(ENTRY, made.args, "testing")
    with _pallas.detect_races():
        actual = harness.run_entry(ENTRY, made, cfg, compiler_options=harness.QUICK)
        assert not _pallas.races_found()
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize("bad", [{"block_t": 12}, {"block_d": 0}, {"rows": 1.0}])
def test_configs_check_themselves(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}=.* must be a positive multiple"):
        config.Config(**{"block_t": 16, "block_d": 128, "rows": 1} | bad)


def test_what_is_refused():
    assert "`inputs` is float16" in ENTRY.why_not(make((1, 4, 8), jnp.float16))
    assert "at least one row" in ENTRY.why_not(make((1, 0, 8)))
    assert "at least one sequence" in ENTRY.why_not(make((1, 4, 8), cu_seqlens=jnp.asarray([0])))
