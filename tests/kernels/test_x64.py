"""Double precision: float64 calls are computed in it, and float32 calls still work beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import kernel_registry
from tests.kernels import harness

ENTRIES = [
    (entry.op, entry.name)
    for op in ("attention", "flash_attention")
    for entry in kernel_registry.list(op)
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("op", "entry_name"), harness.marked(ENTRIES))
def test_under_x64(op, entry_name, dtype):
    entry, spec = harness.find_entry(op, entry_name), kernel_registry.spec(op)
    with jax.enable_x64(True):
        case = next(c for c in spec.cases() if c.name == "segments_window_bias")
        values = case.values(jnp.float32, jax.random.key(3))
        widen = lambda x: x.astype(dtype) if getattr(x, "dtype", None) == jnp.float32 else x
        args = spec.make(
            harness.Case(case.name, lambda *_: {n: widen(x) for n, x in values.items()}),
            dtype,
            jax.random.key(3),
        )
        if entry.why_not(args) is not None:
            pytest.skip("refused")
        made = harness.solve(spec, args)
        actual = harness.run_entry(entry, made, harness.configs(entry, args, "testing"))
        tolerance = 1e-12 if dtype == "float64" else 2e-5
        for kind in ("outputs", "gradients"):
            for name, value in getattr(actual, kind).items():
                np.testing.assert_allclose(
                    value, getattr(made.oracle, kind)[name], rtol=0, atol=tolerance, err_msg=name
                )
