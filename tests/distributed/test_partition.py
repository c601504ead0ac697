"""`jit` over sharded arrays with kernels that XLA cannot look into: nothing is gathered."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention
from tests import host
from tests.distributed import partitioned
from tests.kernels.harness import QUICK

QKV = ("query", "key", "value")


def make_mesh():
    types = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=types, devices=jax.devices()[:4])


def arrays(groups=2, t=20, batch=4):
    keys = jax.random.split(jax.random.key(0), 6)
    return {
        "query": jax.random.normal(keys[0], (batch, t, 4, 8)),
        "key": jax.random.normal(keys[1], (batch, t, groups, 8)),
        "value": jax.random.normal(keys[2], (batch, t, groups, 12)),
        "bias": jax.random.normal(keys[3], (1, 4, t, t)),
        "softmax_aux": jax.random.normal(keys[4], (4, 2)),
    }


def place(xs, specs):
    mesh = make_mesh()
    return {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in xs.items()}


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = np.abs(np.where(np.isfinite(e), e, 0)).max()
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5 * scale)


def gathered(program, *given):
    """The shapes that a compiled program gathers."""
    text = program.lower(*given).compile().as_text()
    return re.findall(r"= (\S+) all-gather", text)


ROWS, HEADS = P("data"), P(None, None, "model")
BOTH = P("data", None, "model")
EVERY = P(None, None, ("data", "model"))
SPLITS = {
    "rows": dict.fromkeys(QKV, ROWS),
    "heads": dict.fromkeys(QKV, HEADS) | {"softmax_aux": P("model")},
    "both": dict.fromkeys(QKV, BOTH) | {"bias": P(None, "model")},
    # two devices share each of the two key heads
    "more_devices_than_key_heads": {"query": EVERY, "key": HEADS, "value": HEADS},
    "tokens": dict.fromkeys(QKV, P(None, "data", "model")),
    "queries_alone": {"query": BOTH},
}
OPTIONS = {
    "rows": {"causal": True, "cum_seqlens_q": host.asarray([0, 20, 27, 40, 53])},
    "both": {"dropout_prob": 0.3, "dropout_seed": 5, "return_lse": True},
    "tokens": {"causal": True, "sliding_window": 7},
}
FREE = {"rows", "heads", "both"}  # nothing moves but sums of gradients


@pytest.mark.parametrize("name", SPLITS)
def test_values_and_gradients(name):
    options = host.to_jax(OPTIONS.get(name, {}))
    xs = arrays(groups=2)
    wanted = (*QKV, "bias", "softmax_aux") if name in ("heads", "both") else QKV
    xs = {n: xs[n] for n in wanted}
    made = partitioned.kernel_of("flash_attention")
    through = lambda xs: partitioned.call(made, "flash_attention", xs, **options)

    def plain(xs):
        out = flash_attention(**xs, **options)
        return out if isinstance(out, tuple) else (out,)

    run = jax.jit(
        functools.partial(partitioned.answers, through, wanted=wanted), compiler_options=QUICK
    )
    expected = jax.jit(
        functools.partial(partitioned.answers, plain, wanted=wanted), compiler_options=QUICK
    )(xs)
    placed = place(xs, SPLITS[name])
    actual = run(placed)
    assert_close(actual, expected)
    if name in FREE:
        assert not gathered(run, placed)
        assert actual[0][0].sharding.is_equivalent_to(placed["query"].sharding, 4)
