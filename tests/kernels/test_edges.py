"""What bites attention kernels: sizes, rows without a key, and garbage where nobody looks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _oracle, kernel_registry
from tests import host
from tests.backend import BACKEND
from tests.kernels import harness

OP = "flash_attention"
SPEC = kernel_registry.spec(OP)
ENTRIES = [
    pytest.param(entry.name, marks=harness.marks(entry, quick=False))
    for entry in kernel_registry.list(OP)
]
pytestmark = pytest.mark.parametrize("entry_name", ENTRIES)


IDS = np.repeat(np.arange(3), (13, 14, 13))[None]


def arrays(batch, t, s, heads, groups, d, e, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "query": jax.random.normal(keys[0], (batch, t, heads, d)),
        "key": jax.random.normal(keys[1], (batch, s, groups, d)),
        "value": jax.random.normal(keys[2], (batch, s, groups, e)),
    }


def make(values):
    return SPEC.canonicalize(SPEC.unpack(SPEC.complete(values)))


def run(entry_name, args, made=None):
    """Answer of an entry; the oracle's problem is made from the same arguments if not given."""
    entry = harness.find_entry(OP, entry_name)
    if (reason := entry.why_not(args)) is not None:
        pytest.skip(f"refused: {reason}")
    made = made or harness.solve(SPEC, args)
    cfg = harness.configs(entry, args, "testing")
    replaced = harness.Problem(args, made.cotangents, made.wanted, made.oracle, made.naive)
    return harness.run_entry(entry, replaced, cfg, compiler_options=harness.QUICK), made


def tokens(solved, where, names):
    """An answer and its problem, of some arrays and some of their tokens alone."""
    actual, made = solved

    def part(answer):
        pick = lambda found: {n: x[:, where] for n, x in found.items() if n in names}
        return harness.Answer(pick(answer.outputs), pick(answer.gradients))

    oracle, naive = part(made.oracle), part(made.naive)
    return part(actual), dataclasses.replace(made, oracle=oracle, naive=naive)


SIZES = {
    "one": (1, 1, 1, 1, 1, 1, 1),
    "one_query": (2, 1, 37, 2, 1, 8, 8),
    "one_key": (1, 21, 1, 2, 2, 8, 4),
    "no_query": (2, 0, 5, 2, 1, 4, 4),
    "no_key": (2, 5, 0, 2, 1, 4, 4),
    "no_batch": (0, 5, 5, 2, 1, 4, 4),
    "head_size_1": (1, 20, 20, 2, 1, 1, 3),
    "head_size_256": (1, 17, 18, 2, 2, 256, 7),
    "wide_values": (1, 17, 18, 1, 1, 3, 256),
    "group_of_3": (1, 18, 18, 6, 2, 8, 8),
    "group_of_8": (1, 18, 18, 8, 1, 8, 8),
}


LATE = ("wide_values", "group_of_8")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LATE else []) for n in SIZES]
)
def test_sizes(entry_name, name):
    args = make(arrays(*SIZES[name]) | {"causal": True, "return_lse": True})
    actual, made = run(entry_name, args)
    harness.assert_close_to_oracle(actual, made)


def test_no_key_with_sinks(entry_name):
    values = arrays(1, 4, 0, 2, 1, 4, 4) | {"softmax_aux": jnp.ones((2, 3)), "return_lse": True}
    actual, made = run(entry_name, make(values))
    harness.assert_close_to_oracle(actual, made)
    np.testing.assert_allclose(actual.outputs["lse"], 1 + np.log(3), rtol=1e-6)


def test_blocks_of_queries_without_keys_beside_a_bias(entry_name):
    """Some kernels leave before their loop over keys if there are none."""
    values = arrays(1, 64, 16, 1, 1, 8, 8) | {"return_lse": True}
    values["bias"] = jax.random.normal(jax.random.key(9), (1, 1, 64, 16))
    values["q_segment_ids"] = host.asarray(np.repeat([0, 1], 32)[None].astype(np.int32))
    values["kv_segment_ids"] = host.asarray(np.zeros((1, 16), np.int32))
    actual, made = run(entry_name, make(values))
    harness.assert_close_to_oracle(actual, made)
    assert (actual.outputs["lse"][..., 32:] == -np.inf).all()


# Where garbage may stand without anybody seeing it: (options, queries, keys that are garbage)
LENGTHS = host.asarray([0, 9, 29])  # rows of 9 and 20 of 24 tokens
_ROWS = np.arange(24)[None] >= np.array([[9], [20]])
_TAIL = np.arange(24)[None].repeat(2, 0) >= 17
_HOLES = np.arange(24)[None].repeat(2, 0) % 7 > 3
HIDDEN = {
    "lengths": ({"cum_seqlens_q": LENGTHS}, _ROWS, _ROWS),
    "segments": ({"q_segment_ids": host.asarray(np.where(_TAIL, -1, 0))}, _TAIL, _TAIL),
    "holes": ({"q_segment_ids": host.asarray(np.where(_HOLES, -1, 0))}, _HOLES, _HOLES),
    "key_padding": ({"attention_mask": ~_TAIL[:, None, None]}, None, _TAIL),
    "window": ({"sliding_window": (30, -1), "causal": False,
                "attention_mask": ~_TAIL[:, None, None]}, None, _TAIL),
}  # fmt: skip


PADDING = ("lengths", "segments", "holes")


def cleans_only_padding(entry_name):
    """What a causal, window or dense mask alone hides may spoil rows of its own tile."""
    return entry_name.startswith("triton")


@pytest.mark.parametrize("garbage", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("extra", [{}, {"causal": True, "softmax_aux": host.ones((4, 1))}])
@pytest.mark.parametrize("name", HIDDEN)
def test_garbage_that_nobody_sees_changes_nothing(entry_name, name, extra, garbage):
    if cleans_only_padding(entry_name) and name not in PADDING:
        pytest.skip("a dense mask may hide no garbage from this entry")
    options, queries, keys = HIDDEN[name]
    clean = arrays(2, 24, 24, 4, 2, 8, 8) | host.to_jax(options | extra)
    made = harness.solve(SPEC, make(clean))
    dirty = dict(clean)
    for array, where in (("query", queries), ("key", keys), ("value", keys)):
        if where is not None:
            dirty[array] = jnp.where(where[:, :, None, None], garbage, clean[array])
    actual, _ = run(entry_name, make(dirty), made)
    harness.assert_close_to_oracle(actual, made)


def test_garbage_in_the_future_reaches_no_earlier_query(entry_name):
    if cleans_only_padding(entry_name):
        pytest.skip("a causal mask may hide no garbage from this entry")
    clean = arrays(1, 24, 24, 2, 1, 8, 8) | {"causal": True}
    made = harness.solve(SPEC, make(clean))
    dirty = dict(clean)
    for name in ("key", "value"):
        dirty[name] = clean[name].at[:, 15:].set(jnp.nan)
    actual, _ = run(entry_name, make(dirty), made)
    assert np.isnan(actual.outputs["out"][:, 15:]).all()
    harness.assert_close_to_oracle(*tokens((actual, made), slice(15), {"out", "query"}))


def test_garbage_in_the_past_reaches_no_later_key(entry_name):
    if cleans_only_padding(entry_name):
        pytest.skip("a causal mask may hide no garbage from this entry")
    clean = arrays(1, 40, 40, 2, 1, 8, 8) | {"causal": True}
    made = harness.solve(SPEC, make(clean))
    dirty = clean | {"query": clean["query"].at[:, :9].set(jnp.nan)}
    actual, _ = run(entry_name, make(dirty), made)
    for name in ("key", "value"):
        assert np.isnan(actual.gradients[name][:, :9]).all()
    harness.assert_close_to_oracle(*tokens((actual, made), slice(9, None), {"key", "value"}))


@pytest.mark.parametrize("factor", [60.0, -60.0])
@pytest.mark.parametrize(
    ("length", "options"),
    [
        (64, {}),
        pytest.param(70, {}, marks=pytest.mark.slow),
        (64, {"causal": True}),
        (70, {"sliding_window": (25, 25)}),
    ],
)
def test_logits_that_rise_far(entry_name, length, options, factor):
    """A reference that the first keys gave may be hundreds of powers of two too low or high."""
    values = arrays(1, length, length, 2, 1, 8, 8) | options | {"return_lse": True}
    rising = jnp.where(jnp.arange(length) < 35, 1.0, factor)[None, :, None, None]
    values["key"] = values["key"] * rising
    made = harness.solve(SPEC, make(values), grads=("bias",))  # no gradient: only outputs
    actual, _ = run(entry_name, made.args, made)
    oracle = made.oracle.outputs
    largest = np.abs(oracle["lse"]).max()
    assert largest > 90
    # a logit is off by its last place, and a weight by as much of itself
    bound = 4 * np.finfo(np.float32).eps * largest
    np.testing.assert_allclose(actual.outputs["lse"], oracle["lse"], atol=bound, rtol=0)
    scale = np.abs(oracle["out"]).max()
    np.testing.assert_allclose(actual.outputs["out"], oracle["out"], atol=bound * scale, rtol=0)


@pytest.mark.parametrize("logit", [500.0, -500.0])
def test_rows_that_see_nothing_of_their_first_block(entry_name, logit):
    """With a window, no key of the first block may be there to take a reference from."""
    values = arrays(1, 70, 70, 2, 1, 8, 8) | {"sliding_window": (20, 0), "softmax_scale": 1.0}
    values["query"] = jnp.full_like(values["query"], logit / 8)
    values["key"] = jnp.ones_like(values["key"])
    made = harness.solve(SPEC, make(values), grads=("bias",))
    actual, _ = run(entry_name, made.args, made)
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize("later", [-100.0, -300.0])
def test_packed_rows_take_their_reference_from_the_first_keys_they_see(entry_name, later):
    """The last row of a block of 16 sees nothing of the first block, and all of the second."""
    values = {n: x.astype(jnp.bfloat16) for n, x in arrays(1, 96, 96, 2, 1, 8, 8).items()}
    logits = jnp.where(jnp.arange(96) < 64, -200.0, later)[None, :, None, None]
    values["query"] = jnp.ones_like(values["query"])
    values["key"] = jnp.broadcast_to(logits / 8, values["key"].shape).astype(jnp.bfloat16)
    ids = jnp.ones((1, 96), jnp.int32)
    values |= {"q_segment_ids": ids, "kv_segment_ids": ids, "sliding_window": (47, 0)}
    made = harness.solve(SPEC, make(values | {"softmax_scale": 1.0}), grads=("bias",))
    actual, _ = run(entry_name, made.args, made)
    harness.assert_close_to_oracle(actual, made)


def test_large_weights_of_large_values_do_not_overflow(entry_name):
    values = arrays(1, 64, 64, 2, 1, 8, 8)
    values["key"] = values["key"].at[:, 40:].multiply(20.0)
    values["value"] = jnp.abs(values["value"]) * 1e30  # of one sign: inf, not nan
    made = harness.solve(SPEC, make(values), grads=("bias",))
    actual, _ = run(entry_name, made.args, made)
    harness.assert_close_to_oracle(actual, made)


def test_garbage_in_a_visible_key_shows(entry_name):
    dirty = arrays(1, 24, 24, 2, 1, 8, 8)
    for name in ("query", "key", "value"):
        args = make(dirty | {name: dirty[name].at[0, 3, 0, 2].set(jnp.nan)})
        entry = harness.find_entry(OP, entry_name)
        if (reason := entry.why_not(args)) is not None:
            pytest.skip(f"refused: {reason}")
        (out,), _ = entry.fn(args, harness.configs(entry, args, "testing")[0])
        spoiled = np.isnan(out).any(axis=-1)
        expected = np.zeros((1, 24, 2), bool)
        expected[(slice(None),) if name != "query" else (0, 3, 0)] = True
        np.testing.assert_array_equal(spoiled, expected)


@pytest.mark.parametrize(
    ("options", "garbage"),
    [({"causal": True}, np.nan), ({"q_segment_ids": IDS, "kv_segment_ids": IDS}, np.inf)],
)
def test_garbage_in_a_visible_cotangent_shows(entry_name, options, garbage):
    made = harness.solve(SPEC, make(arrays(1, 40, 40, 2, 1, 8, 8) | options))
    dirty = (made.cotangents[0].at[0, 20, 0, 3].set(garbage),)
    actual, _ = run(entry_name, made.args, dataclasses.replace(made, cotangents=dirty))
    seen = np.arange(40) <= 20 if "causal" in options else IDS[0] == IDS[0, 20]
    for name in ("key", "value"):
        spoiled = ~np.isfinite(actual.gradients[name]).all(axis=(0, 2, 3))
        assert spoiled[seen].all()
        if not cleans_only_padding(entry_name):
            np.testing.assert_array_equal(spoiled, seen)


def test_products_that_overflow_downwards_weigh_nothing(entry_name):
    """The first keys have logits of -inf without being hidden; those of the others differ much."""
    values = arrays(1, 48, 64, 2, 1, 8, 8)  # whole blocks: no mask anywhere
    values["query"] = values["query"].at[..., 0].set(1e20)
    values["key"] = values["key"].at[..., 0].set(0.0).at[:, :32, :, 0].set(-1e20)
    values["key"] = values["key"].at[:, 40:].multiply(60.0)
    for options in ({}, {"alibi_slopes": jnp.full(2, 0.01)}):
        hidden = np.arange(64)[None, None, None, :] >= 32
        made = harness.solve(SPEC, make(values | options | {"attention_mask": hidden}))
        actual, _ = run(entry_name, make(values | options), made)
        out, oracle, naive = (x.outputs["out"] for x in (actual, made.oracle, made.naive))
        assert _oracle.compare(out, oracle, naive, float(jnp.finfo(jnp.float32).eps)) is None


# Scores of any size. Products of small whole numbers are exact, so the oracle has the same scores.

OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def whole_numbers(d, dtype, power, length=40):
    """Attention of 2 heads with scores of about 100 times 2^power, and these scores, [h, t, s]."""
    rng = np.random.default_rng(d)
    q, k = rng.integers(-7, 8, (1, length, 2, d)), rng.integers(-63, 64, (1, length, 1, d))
    v = rng.integers(-127, 128, (1, length, 1, d)) / 64
    values = {"query": q, "key": k * 2.0**power, "value": v}
    x = np.einsum("thd,sd->hts", q[0], k[0, :, 0]) * 2.0**power
    x = (x.astype(np.float32) * np.float32(d**-0.5)).astype(np.float64)
    return {n: jnp.asarray(a, dtype) for n, a in values.items()}, x


def run_large(entry_name, values, options=None, rows=None):
    """Outputs and gradients, compiled as by users; and the cotangent, of some rows [t, h]."""
    if "cudnn" in entry_name:
        pytest.skip("cuDNN's arithmetic is its own")
    args = make(values | {"return_lse": True} | (options or {}))
    entry = harness.find_entry(OP, entry_name)
    if (reason := entry.why_not(args)) is not None:
        pytest.skip(f"refused: {reason}")
    dout = jax.random.normal(jax.random.key(3), args.query.shape, jnp.float32)
    dout = (dout if rows is None else dout * rows[None, :, :, None]).astype(args.query.dtype)
    cotangents = (dout, jnp.zeros((1, 2, args.query.shape[1])))
    wanted = tuple(n for n in ("query", "key", "value", "bias") if getattr(args, n) is not None)
    made = harness.Problem(args, cotangents, wanted, None, None)
    cfg = harness.configs(entry, args, "testing")
    found = harness.run_entry(entry, made, cfg, compiler_options=OPTIMISED)
    return found, np.asarray(dout, np.float64)


def softmax64(x):
    top = x.max(axis=-1, keepdims=True)
    weights = np.exp(x - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total, (top + np.log(total))[..., 0]


# factors of 3e4 and of 1e5 in queries and keys
LARGE = [("float32", 128, 30), ("bfloat16", 64, 34)]
LARGE_TOO = [("float32", 64, 30), ("float32", 64, 34), ("float32", 128, 34)]
LARGE_TOO += [("bfloat16", 64, 30), ("bfloat16", 128, 30), ("bfloat16", 128, 34)]
ON_CPU = [pytest.mark.slow] if BACKEND == "cpu" else []


@pytest.mark.parametrize(
    ("dtype", "d", "power"), [*LARGE, *(pytest.param(*row, marks=ON_CPU) for row in LARGE_TOO)]
)
def test_scores_of_a_million_millions(entry_name, dtype, d, power):
    values, x = whole_numbers(d, dtype, power)
    found, dout = run_large(entry_name, values)
    weights, lse = softmax64(x)
    assert 5e10 < np.abs(lse).max() < 2e13
    ulp = np.spacing(np.abs(lse).astype(np.float32)).astype(np.float64)
    assert (np.abs(found.outputs["lse"][0] - lse) <= 2 * ulp).all()
    eps = float(jnp.finfo(dtype).eps)
    out = np.einsum("hts,se->the", weights, np.asarray(values["value"], np.float64)[0, :, 0])
    np.testing.assert_allclose(found.outputs["out"][0], out, rtol=0, atol=4 * eps)
    for gradient in found.gradients.values():
        assert np.isfinite(gradient).all()
    most = np.abs(dout).sum(axis=(1, 2))  # of weights that are at most one
    assert (np.abs(found.gradients["value"]) <= most[:, None, None] * (1 + 4 * eps)).all()


@pytest.mark.parametrize(
    ("dtype", "power", "causal"),
    [
        ("float32", 13, False),
        ("bfloat16", 12, True),
        pytest.param("float32", 6, True, marks=ON_CPU),
        pytest.param("bfloat16", 6, False, marks=ON_CPU),
    ],
)
def test_gradients_of_scores_up_to_a_million(entry_name, dtype, power, causal):
    values, x = whole_numbers(24, dtype, power)
    x = np.where(np.tri(40, dtype=bool), x, -np.inf) if causal else x
    second, first = np.sort(x, axis=-1)[..., -2:].transpose(2, 0, 1)
    # the sum of equal weights is known to the last place of the lse alone, 0.06 for a million
    apart = (first - second > 16).T
    found, dout = run_large(entry_name, values, {"causal": causal}, rows=apart)
    assert apart.mean() > 0.9
    assert 100 * 2**power < np.abs(first).max() < 1100 * 2**power
    q, k, v = (np.asarray(values[n], np.float64)[0] for n in ("query", "key", "value"))
    weights, _ = softmax64(x)
    dweights = np.einsum("the,se->hts", dout[0], v[:, 0])
    dx = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True)) * 24**-0.5
    eps = float(jnp.finfo(dtype).eps)
    noise = 16 * eps * np.abs(dweights).max() * 24**-0.5  # of a row whose differences cancel
    expected = {
        "value": (np.einsum("hts,the->se", weights, dout[0])[:, None], 16 * eps),
        "query": (np.einsum("hts,sd->thd", dx, k[:, 0]), noise * np.abs(k).max()),
        "key": (np.einsum("hts,thd->sd", dx, q)[:, None], 40 * noise * np.abs(q).max()),
    }
    for name, (gradient, bound) in expected.items():
        bound = max(bound, 4 * eps * np.abs(gradient).max())
        np.testing.assert_allclose(found.gradients[name][0], gradient, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_of_minus_infinity_hides_a_key_under_a_cap(entry_name, dtype):
    values = {n: x.astype(dtype) for n, x in arrays(1, 40, 40, 2, 1, 8, 8).items()}
    hidden = np.random.default_rng(0).random((1, 2, 40, 40)) < 0.4
    hidden[:, :, 11] = True  # a row without a key
    options = {"logits_soft_cap": 2.0, "return_lse": True}
    bias = jnp.where(hidden, -jnp.inf, 0.0)
    actual, made = run(entry_name, make(values | options | {"bias": bias}))
    assert np.isneginf(made.oracle.outputs["lse"][:, :, 11]).all()
    assert (made.oracle.gradients["bias"][hidden] == 0.0).all()
    harness.assert_close_to_oracle(actual, made)
    masked = harness.solve(SPEC, make(values | options | {"attention_mask": ~hidden}), ("query",))
    for name, value in masked.oracle.outputs.items():
        np.testing.assert_allclose(made.oracle.outputs[name], value, rtol=1e-6, atol=1e-6)


def test_a_cap_comes_before_bias_and_slopes(entry_name):
    """Written out in float64, independent of the oracle."""
    values = arrays(1, 24, 24, 2, 1, 8, 8)
    bias = 3.0 * jax.random.normal(jax.random.key(5), (1, 2, 24, 24))
    options = {"logits_soft_cap": 1.5, "bias": bias, "alibi_slopes": jnp.asarray([0.5, -0.25])}
    found, dout = run_large(entry_name, values, options)
    q, k, v = (np.asarray(values[n], np.float64) for n in ("query", "key", "value"))
    capped = np.tanh(np.einsum("bthd,bsd->bhts", q, k[:, :, 0]) * 8**-0.5 / 1.5)
    slopes = np.asarray([0.5, -0.25])[:, None, None]
    x = 1.5 * capped + np.asarray(bias, np.float64)
    x = x + slopes * (np.arange(24)[None, :] - np.arange(24)[:, None])
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(
        found.outputs["out"], np.einsum("bhts,bse->bthe", weights, v[:, :, 0]), atol=3e-6
    )
    dweights = np.einsum("bthe,bse->bhts", dout, v[:, :, 0])
    dx = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(found.gradients["bias"], dx, atol=3e-6)
    dq = np.einsum("bhts,bsd->bthd", dx * (1 - capped**2), k[:, :, 0]) * 8**-0.5
    np.testing.assert_allclose(found.gradients["query"], dq, atol=3e-6)


MOST = 2**29 - 1


@pytest.mark.parametrize(
    ("of_queries", "of_keys", "window"),
    [
        (-MOST, MOST, (-1, 0)),
        pytest.param(-1, MOST, (-1, 0), marks=pytest.mark.slow),
        (MOST, -MOST, (4, 5)),
        pytest.param(-MOST, MOST, (3, 0), marks=pytest.mark.slow),
        (MOST, -MOST, (-1, 0)),
    ],
)
def test_positions_far_from_each_other(entry_name, of_queries, of_keys, window):
    q_pos, k_pos = (np.arange(40, dtype=np.int32)[None].copy() for _ in range(2))
    q_pos[:, 30:], k_pos[:, 20:25] = of_queries, of_keys
    values = arrays(1, 40, 40, 2, 1, 8, 8) | {"sliding_window": window, "return_lse": True}
    values |= {"alibi_slopes": jnp.asarray([1e-9, -3e-9])}
    made = harness.solve(SPEC, make(values | {"q_positions": q_pos, "kv_positions": k_pos}))
    actual, _ = run(entry_name, made.args, made)
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize("cap", [pytest.param(1e-3, marks=pytest.mark.slow), 50.0, 1e5])
def test_soft_caps_of_any_size_in_half_precision(entry_name, cap):
    values = {n: x.astype(jnp.float16) for n, x in arrays(1, 40, 40, 2, 1, 8, 8).items()}
    args = make(values | {"logits_soft_cap": cap, "sliding_window": (9, 0), "return_lse": True})
    actual, made = run(entry_name, args)
    harness.assert_close_to_oracle(actual, made)


ONE_EACH = np.arange(1, 98)[None]
LONE = {
    "window": (97, {"sliding_window": (0, 0)}),
    "key": (1, {}),
    # in another order, so that a block of queries has its keys in two blocks
    "segments": (97, {"q_segment_ids": ONE_EACH, "kv_segment_ids": 98 - ONE_EACH}),
    "dropout": (97, {"sliding_window": (0, 0), "dropout_prob": 0.5, "dropout_seed": 3}),
}


@pytest.mark.parametrize(("case", "cap"), [("segments", None), *((case, 50.0) for case in LONE)])
def test_the_only_key_of_a_row(entry_name, case, cap):
    """Its weight is one: the output is its value, and the logits have no gradient."""
    keys, options = LONE[case]
    values = {n: x.astype(jnp.bfloat16) for n, x in arrays(1, 97, keys, 2, 1, 64, 64).items()}
    args = make(values | {"logits_soft_cap": cap} | options)
    actual, made = run(entry_name, args)
    assert np.abs(made.oracle.gradients["query"]).max() == 0.0
    harness.assert_close_to_oracle(actual, made)


def test_nothing_is_visible_under_a_cap(entry_name):
    ids = {"q_segment_ids": jnp.zeros((1, 33), jnp.int32)}
    ids |= {"kv_segment_ids": jnp.ones((1, 130), jnp.int32)}
    args = make(arrays(1, 33, 130, 2, 1, 32, 40) | ids | {"logits_soft_cap": 60.0})
    actual, made = run(entry_name, args)
    for answer in (made.oracle, made.naive, actual):
        assert all((g == 0.0).all() for g in answer.gradients.values())
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize(("cap", "window"), [(1.5, None), (1.5, (9, 0)), (30.0, None)])
def test_logits_far_above_their_cap(entry_name, cap, window):
    """Of some queries, and under a cap of 30 of these alone."""
    values = {n: x.astype(jnp.bfloat16) for n, x in arrays(1, 40, 40, 2, 1, 8, 8).items()}
    values["query"] = values["query"].at[:, 7:9].multiply(400.0)
    options = {"logits_soft_cap": cap, "sliding_window": window, "return_lse": True}
    actual, made = run(entry_name, make(values | options))
    dots = jnp.einsum("btd,bsd->bts", values["query"][:, :, 0], values["key"][:, :, 0])
    assert jnp.abs(dots[:, 7:9]).max() * 8**-0.5 > 100 * min(cap, 1.5)
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize("cap", [50.0, 60.0])
def test_rows_all_of_whose_logits_are_near_a_cap(entry_name, cap):
    """From e^-50 to e^50: no row may need another's reference."""
    values = arrays(1, 40, 40, 2, 1, 8, 8)
    values["key"] = values["key"].at[..., 0].add(20.0)
    for rows, factor in ((slice(7, 20), 15.0), (slice(20, 36), -15.0)):
        values["query"] = values["query"].at[:, rows, :, 0].set(factor)
    values = {n: x.astype(jnp.bfloat16) for n, x in values.items()}
    options = {"logits_soft_cap": cap, "causal": True, "return_lse": True}
    actual, made = run(entry_name, make(values | options))
    lse = made.oracle.outputs["lse"]
    assert (lse[..., 7:20] > 0.95 * cap).all()
    assert (lse[..., 20:36] < -0.85 * cap).all()
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize(("names", "garbage"), [(("query",), 3e4), (("query", "key"), np.nan)])
def test_garbage_in_padding_under_a_cap(entry_name, names, garbage):
    """Padding has no logsumexp, whatever it holds."""
    values = {n: x.astype(jnp.bfloat16) for n, x in arrays(1, 80, 80, 2, 1, 8, 8).items()}
    ids = jnp.where(jnp.arange(80) < 20, 0, -1)[None]
    options = {"logits_soft_cap": 1.5, "return_lse": True}
    options |= {"q_segment_ids": ids, "kv_segment_ids": ids}
    made = harness.solve(SPEC, make(values | options))
    for name in names:
        values[name] = values[name].at[:, 20:].set(garbage)
    actual, _ = run(entry_name, make(values | options), made)
    harness.assert_close_to_oracle(actual, made)
    assert np.isneginf(actual.outputs["lse"][..., 20:]).all()


def test_no_sinks_at_all(entry_name):
    values = arrays(1, 20, 20, 2, 1, 8, 8)
    actual, made = run(entry_name, make(values | {"softmax_aux": jnp.zeros((2, 0))}))
    harness.assert_close_to_oracle(actual, made)
    assert actual.gradients["softmax_aux"].shape == (2, 0)


def test_rows_without_a_key_give_nothing(entry_name):
    """More queries than keys under causal: the first queries stand before every key."""
    values = arrays(1, 20, 13, 2, 2, 8, 8) | {"causal": True, "return_lse": True}
    actual, made = run(entry_name, make(values))
    harness.assert_close_to_oracle(actual, made)
    assert (actual.outputs["out"][:, :7] == 0).all()
    assert np.isneginf(actual.outputs["lse"][..., :7]).all()
    assert (actual.gradients["query"][:, :7] == 0).all()


def test_small_sinks_of_padding(entry_name):
    """Rows that see nothing else have the logsumexp of their sinks, however small that is."""
    ids = jnp.asarray(np.where(_TAIL, -1, 0))
    values = arrays(2, 24, 24, 4, 2, 8, 8) | {"q_segment_ids": ids, "kv_segment_ids": ids}
    values |= {"softmax_aux": jnp.full((4, 2), -300.0), "return_lse": True}
    made = harness.solve(SPEC, make(values), grads=("bias",))
    actual, _ = run(entry_name, made.args, made)
    assert made.oracle.outputs["lse"].min() < -290
    harness.assert_close_to_oracle(actual, made)


def test_only_the_lse_cotangent_reaches_sinks_of_empty_rows(entry_name):
    mask = jnp.zeros((1, 1, 1, 18), bool)
    values = arrays(1, 18, 18, 2, 1, 8, 8) | {
        "attention_mask": mask,
        "softmax_aux": jnp.asarray([[0.3, -1.0], [2.0, 0.1]]),
        "return_lse": True,
    }
    actual, made = run(entry_name, make(values))
    harness.assert_close_to_oracle(actual, made)
    assert np.abs(actual.gradients["softmax_aux"]).max() > 1e-2
    assert all((actual.gradients[name] == 0).all() for name in ("query", "key", "value"))


def test_bias_of_minus_infinity_hides_a_pair(entry_name):
    hidden = jax.random.bernoulli(jax.random.key(4), 0.4, (1, 1, 20, 20)).at[0, 0, 3].set(True)
    clean = arrays(1, 20, 20, 2, 1, 8, 8)
    made = harness.solve(SPEC, make(clean | {"attention_mask": ~hidden}))
    actual, _ = run(entry_name, make(clean | {"bias": jnp.where(hidden, -jnp.inf, 0.0)}), made)
    harness.assert_close_to_oracle(actual, made)


def test_large_logits_do_not_overflow(entry_name):
    values = arrays(1, 20, 20, 2, 1, 8, 8) | {"softmax_scale": 100.0, "return_lse": True}
    actual, made = run(entry_name, make(values))
    eps = float(jnp.finfo(jnp.float32).eps)
    for name, value in actual.outputs.items():
        naive = made.naive.outputs[name]
        assert _oracle.compare(value, made.oracle.outputs[name], naive, eps) is None
    # weights are recomputed from a float32 lse of this size, so that is their relative error
    rounding = eps * np.abs(made.oracle.outputs["lse"]).max()
    for name, value in actual.gradients.items():
        oracle = made.oracle.gradients[name]
        np.testing.assert_allclose(value, oracle, rtol=0, atol=4 * rounding * np.abs(oracle).max())


def test_block_sizes_do_not_change_the_dropped_pairs(entry_name):
    args = make(arrays(2, 33, 29, 2, 1, 8, 8) | {"dropout_prob": 0.5, "dropout_seed": 9})
    entry = harness.find_entry(OP, entry_name)
    if entry.why_not(args) is not None:
        pytest.skip("refused")
    outs = [
        entry.fn(args, harness.configs(entry, args, kind)[0])[0][0]
        for kind in ("testing", "heuristic")
    ]
    np.testing.assert_allclose(outs[0], outs[1], rtol=1e-5, atol=1e-6)
