"""Attention backward for Hopper: lowered for a GPU, run there, and interpreted through its twin."""

import dataclasses
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._device import Target
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import _oracle, _spec, kernel_registry
from ejkernel.kernels._pallas.gpu._blocks import probe
from ejkernel.kernels._pallas.gpu.flash_attention import config
from tests.backend import BACKEND
from tests.kernels import harness

H200 = Target("gpu", "NVIDIA H200", "9.0")
WANTED = frozenset({"query", "key", "value"})
SPEC = kernel_registry.spec("flash_attention")
WHY_NOT = probe.why_not() if BACKEND == "gpu" else probe.why_not_interpreted()
runs_kernels = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def interpreted(test):
    """A wrong barrier makes a kernel wait for ever."""
    return runs_kernels(pytest.mark.timeout(200)(test))


lowered = pytest.mark.skipif(probe.why_not() is not None, reason=str(probe.why_not()))


pytestmark = pytest.mark.usefixtures("usable_mosaic_interpreter")


# batch, lengths, heads, key heads and head size; options
CASES = {
    "causal_grouped_sinks": ((1, 70, 140, 2, 1, 128), {"causal": True, "softmax_aux": 2}),
    "window_small_heads": ((1, 300, 290, 2, 1, 64), {"sliding_window": (90, 20)}),
    "in_order": (
        (1, 60, 140, 2, 1, 128),
        {"causal": True, "softmax_aux": 2, "deterministic": True},
    ),
    "heads_of_192": ((1, 70, 100, 1, 1, 192), {"sliding_window": (40, 20)}),
}
SLOW = {
    "full": ((1, 128, 256, 1, 1, 128), {}),
    "full_odd": ((2, 130, 131, 1, 1, 128), {}),
    "causal": ((1, 256, 256, 2, 2, 128), {"causal": True}),
    "causal_long_queries": ((1, 260, 130, 1, 1, 128), {"causal": True, "return_lse": False}),
    "causal_window": ((1, 400, 400, 4, 2, 128), {"causal": True, "sliding_window": 70}),
    "causal_small_heads": ((1, 300, 430, 2, 2, 64), {"causal": True}),
    "window_to_the_right": ((1, 200, 200, 3, 1, 64), {"sliding_window": (-1, 30)}),
    "short": ((2, 3, 5, 2, 1, 128), {"causal": True}),
    "cap": ((1, 130, 130, 1, 1, 64), {"causal": True, "logits_soft_cap": 2.0}),
    "keys_that_nobody_sees": ((1, 70, 520, 1, 1, 128), {"sliding_window": (40, 0)}),
}
IN_ORDER = {
    **SLOW,
    "window_small_heads": CASES["window_small_heads"],
    "causal_192": ((1, 200, 330, 2, 1, 192), {"causal": True}),
    "full_192": ((1, 130, 70, 2, 2, 192), {}),
    "cap_192": ((1, 65, 65, 1, 1, 192), {"causal": True, "logits_soft_cap": 2.0}),
}


def make(shape, dtype=jnp.bfloat16, **options):
    """Canonical arguments; every array from a key of its own."""
    b, t, s, h, g, d = shape
    keys = jax.random.split(jax.random.key(31), 4)
    normal = lambda i, *size: jax.random.normal(keys[i], size, jnp.float32).astype(dtype)
    if (count := options.get("softmax_aux")) is not None:
        options["softmax_aux"] = normal(3, h, count)
    values = {"query": normal(0, b, t, h, d), "key": normal(1, b, s, g, d)}
    values |= {"value": normal(2, b, s, g, min(d, 128)), "return_lse": True}
    case = _spec.Case("made", lambda dtype, key: values | options, frozenset())
    return SPEC.make(case, dtype, keys[0])


def run(args, made, kernels=(False,)):
    """Gradients by the twin from the oracle's outputs, and by its exact weights or not."""
    from ejkernel.kernels._pallas.gpu.flash_attention import bwd

    with_lse = dataclasses.replace(args, return_lse=True)
    out, lse = SPEC.reference_fn()(with_lse)
    outputs = (out, lse) if args.return_lse else (out,)

    def gradients(args, outputs, lse, cotangents):
        cfg, wanted = config.testing(args, "backward"), frozenset(made.wanted)
        return bwd.backward(args, cfg, outputs, (lse,), cotangents, wanted, kernels)

    jitted = jax.jit(gradients, compiler_options=harness.QUICK)
    found = jitted(args, outputs, lse, made.cotangents)
    return _oracle.answer(SPEC, args, outputs, found)


def check(shape, options, kernels=(False,)):
    args = make(shape, **options)
    made = harness.solve(SPEC, args)
    actual = run(args, made, kernels)
    assert actual.gradients.keys() == made.oracle.gradients.keys()
    harness.assert_close_to_oracle(actual, made)


def plan_of(shape, left=None, right=None, **options):
    from ejkernel.kernels._pallas.gpu.flash_attention import bwd_plan

    names = ("batch", "num_q", "num_k", "heads", "key_heads", "head_dim")
    sizes: dict[str, int] = dict(zip(names, shape, strict=True))
    sizes["value_dim"] = min(sizes["head_dim"], 128)
    more = {"block_q": 8192 // sizes["head_dim"], "num_stages": 2, "registers": (240, 24)}
    more |= {"section": 1, "num_programs": 4, "twin": True, "scale": 0.1, "cap": None} | options
    return bwd_plan.Plan(**sizes, left=left, right=right, **more)


LENGTHS = ((1, 1), (256, 256), (300, 290), (70, 400), (400, 70), (129, 128))
WINDOWS = ((None, None), (None, 0), (0, 0), (90, 20), (10, None), (300, 0), (None, 200))


@lowered
@pytest.mark.parametrize("lengths", LENGTHS)
def test_blocks_of_queries_are_those_that_see_keys(lengths):
    t, s = lengths
    for d in (64, 128):
        for left, right in WINDOWS:
            plan = plan_of((1, t, s, 1, 1, d), left, right)
            tiles = jnp.arange(plan.k_tiles)
            bounds = [np.asarray(jnp.broadcast_to(x, tiles.shape)) for x in plan.bounds(tiles)]
            q, k = np.arange(plan.padded_q)[:, None], np.arange(plan.k_tiles * 128)[None]
            distance = k - (q + s - t)
            seen = (distance <= (s + t if right is None else right)) & (k < s)
            seen &= distance >= -(s + t if left is None else left)
            blocks = (plan.padded_q // plan.block_q, plan.block_q, plan.k_tiles, 128)
            real = seen & (q < t)
            some = real.reshape(blocks).any((1, 3))
            all_ = (seen | (q >= t)).reshape(blocks).all((1, 3))
            for tile, (first, full, ragged, last) in enumerate(zip(*bounds, strict=True)):
                where = (lengths, d, left, right, tile)
                block = np.arange(blocks[0])
                assert 0 <= first <= full <= ragged <= last <= blocks[0], where
                assert first < last, where
                assert not (some[:, tile] & ((block < first) | (block >= last))).any(), where
                plain = (block >= full) & (block < ragged)
                assert all_[plain, tile].all(), where
                # a block that needs no mask takes one only behind one that does
                masked = some[:, tile] & all_[:, tile] & ~plain
                assert not masked.any() or plan.cuts_keys or t % plan.block_q, where
            if plan.masks:
                pairs = np.broadcast_arrays(q, k)
                given = np.asarray(plan.sees(*(jnp.asarray(x, jnp.int32) for x in pairs)))
                np.testing.assert_array_equal(given[:t], seen[:t])


@lowered
@pytest.mark.parametrize("lengths", LENGTHS)
def test_blocks_of_keys_are_those_that_queries_see(lengths):
    t, s = lengths
    for d in (128, 192):
        for left, right in WINDOWS:
            plan = plan_of((1, t, s, 1, 1, d), left, right, in_order=True)
            tiles = jnp.arange(plan.q_tiles)
            bounds = [
                np.asarray(jnp.broadcast_to(x, tiles.shape)) for x in plan.query_bounds(tiles)
            ]
            count = -(-s // plan.block_k)
            q, k = np.arange(plan.padded_q)[:, None], np.arange(count * plan.block_k)[None]
            distance = k - (q + s - t)
            seen = (distance <= (s + t if right is None else right)) & (k < s)
            seen &= distance >= -(s + t if left is None else left)
            blocks = (plan.q_tiles, plan.padded_q // plan.q_tiles, count, plan.block_k)
            some = (seen & (q < t)).reshape(blocks).any((1, 3))
            all_ = (seen | (q >= t)).reshape(blocks).all((1, 3))
            for tile, (first, full, ragged, last) in enumerate(zip(*bounds, strict=True)):
                where, block = (lengths, d, left, right, tile), np.arange(count)
                assert 0 <= first <= full <= ragged <= last <= count, where
                assert first < last, where
                assert not (some[tile] & ((block < first) | (block >= last))).any(), where
                assert all_[tile, full:ragged].all(), where
                assert full == first or left is not None, where
                assert ragged == last or plan.masks_last_keys, where
            if plan.masks_last_keys or left is not None:
                pairs = [jnp.asarray(x, jnp.int32) for x in np.broadcast_arrays(q, k)]
                given = np.asarray(plan.query_reach.sees(*pairs))
                np.testing.assert_array_equal(given[:t], seen[:t])


@lowered
@pytest.mark.parametrize("shape", [(3, 500, 700, 6, 2, 128), (1, 64, 64, 1, 1, 64)])
def test_programs_cover_all_keys(shape):
    for section in (1, 8):
        plan = plan_of(shape, section=section)
        count = plan.batch * plan.heads * plan.q_tiles
        for right in (None, 0):
            queries = plan_of(shape, right=right, section=section, in_order=True)
            places = np.stack([np.asarray(x) for x in queries.place_queries(jnp.arange(count))], 1)
            assert len(np.unique(places, axis=0)) == count
            assert (places.max(0) + 1 == (plan.batch, plan.heads, plan.q_tiles)).all()
        count = plan.batch * plan.key_heads * plan.k_tiles
        places = np.stack([np.asarray(x) for x in plan.place(jnp.arange(count))], axis=1)
        assert len(np.unique(places, axis=0)) == count
        assert (places.max(0) + 1 == (plan.batch, plan.key_heads, plan.k_tiles)).all()


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    check(*CASES[name])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_gradients_of_more_calls(name):
    check(*SLOW[name])


@lowered
@pytest.mark.parametrize(
    "shape", [(4, 4096, 16, 16, 128), (4, 4096, 32, 8, 128), (1, 16384, 16, 16, 128)]
)
def test_programs_end_together(shape):
    """Each multiprocessor takes the next program when it is free."""
    batch, length, *heads = shape
    plan = plan_of((batch, length, length, *heads), right=0, num_programs=132, section=40)
    bounds = plan.bounds(jnp.arange(plan.k_tiles))
    steps = plan.group * (np.asarray(bounds.last) - np.asarray(bounds.first))
    count = plan.batch * plan.key_heads * plan.k_tiles
    free = [0] * 132
    for tile in np.asarray(plan.place(jnp.arange(count))[2]):
        heapq.heapreplace(free, free[0] + int(steps[tile]) + 1)
    assert max(free) <= 1.02 * np.mean(free)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ORDER)
def test_gradients_in_order(name):
    shape, options = IN_ORDER[name]
    check(shape, options | {"deterministic": True})


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 192])
def test_two_runs_have_the_same_bits(d):
    args = make((1, 200, 200, 2, 1, d), causal=True, deterministic=True)
    made = harness.solve(SPEC, args)
    one, two = (run(args, made).gradients for _ in range(2))
    for name, gradient in one.items():
        bits = lambda x: np.asarray(x).view(np.uint16 if x.dtype == jnp.bfloat16 else np.uint32)
        np.testing.assert_array_equal(bits(gradient), bits(two[name]))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_exact_weights_bear_large_scores(deterministic):
    shape, options = (1, 70, 70, 1, 1, 128), {"causal": True, "deterministic": deterministic}
    check(shape, options, kernels=(True,))
    check(shape, options | {"softmax_scale": 400.0}, kernels=(True,))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_large_scores_take_exact_weights(deterministic):
    from ejkernel.kernels._pallas.gpu.flash_attention import bwd

    options = {"causal": True, "softmax_scale": 400.0, "deterministic": deterministic}
    args = make((1, 70, 70, 1, 1, 128), **options)
    made = harness.solve(SPEC, args)
    outputs = SPEC.reference_fn()(args)
    cfg = config.testing(args, "backward")
    found = jax.jit(
        lambda: bwd.backward(args, cfg, outputs, outputs[1:], made.cotangents, WANTED),
        compiler_options=harness.QUICK,
    )()
    harness.assert_close_to_oracle(_oracle.answer(SPEC, args, outputs, found), made)


@interpreted
@pytest.mark.slow
@pytest.mark.skipif(BACKEND == "gpu", reason="the interpreter finds races")
def test_no_races():
    from ejkernel import _contexts

    with _contexts.detect_races(True):
        check((1, 130, 130, 2, 1, 128), {"causal": True})
        check((1, 260, 130, 1, 1, 64), {})
        check((1, 130, 260, 2, 1, 128), {"causal": True, "deterministic": True})
        check((1, 130, 130, 1, 1, 192), {})


LOWERED = {
    "causal": ((2, 512, 512, 4, 4, 128), {"causal": True, "return_lse": False}),
    "full": ((2, 512, 512, 4, 4, 64), {}),
    "odd": ((1, 500, 301, 4, 2, 128), {"causal": True}),
    "window": ((1, 500, 500, 4, 1, 64), {"sliding_window": (100, 30), "softmax_aux": 1}),
    "short": ((1, 3, 5, 1, 1, 128), {}),
    "cap": ((1, 256, 256, 2, 1, 128), {"causal": True, "logits_soft_cap": 20.0}),
    "short_192": ((1, 3, 5, 1, 1, 192), {}),
    "odd_192": ((1, 500, 301, 4, 2, 192), {"causal": True}),
    "cap_192": ((1, 256, 256, 2, 1, 192), {"causal": True, "logits_soft_cap": 20.0}),
}


def lower(args, cfg):
    """The backward of a call, lowered for an H200."""
    from ejkernel.kernels._pallas.gpu._blocks import segment_ranges
    from ejkernel.kernels._pallas.gpu.flash_attention import bwd
    from tests.kernels.test_pallas_gpu_lowers import on_an_h200

    def gradients(args, outputs, lse, cotangents):
        return bwd.backward(args, cfg, outputs, (lse,), cotangents, WANTED)

    plain = dataclasses.replace(segment_ranges.without(args), return_lse=True)
    shapes = jax.eval_shape(SPEC.reference_fn(), plain)
    outputs = shapes if args.return_lse else shapes[:1]
    with on_an_h200():
        traced = jax.jit(gradients).trace(args, outputs, shapes[1], outputs)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def late(names, quick):
    """Names as parameters of a test, those that are not quick marked."""
    return [pytest.param(n, marks=[] if n in quick else [pytest.mark.slow]) for n in names]


@lowered
@pytest.mark.parametrize("name", late(LOWERED, ("odd", "odd_192")))
def test_lowers_for_a_gpu(name):
    assert_lowers(*LOWERED[name])


@lowered
@pytest.mark.slow
@pytest.mark.parametrize("name", LOWERED)
def test_lowers_in_order(name):
    shape, options = LOWERED[name]
    assert_lowers(shape, options | {"deterministic": True})


def assert_lowers(shape, options):
    args = make(shape, **options)
    text = lower(args, config.heuristic(args, "backward", H200))
    # rows, and with no cap two of each kernel, of which one does the work
    kernels = 2 if config.sums_in_order(args) else 1
    each = 1 if "logits_soft_cap" in options else 2
    assert text.count("mosaic_gpu") >= 1 + kernels * each


@lowered
@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "deterministic"), [(128, False), (64, True), (128, True), (192, True)]
)
def test_every_candidate_lowers(d, deterministic):
    args = make((1, 500, 500, 2, 1, d), causal=True, deterministic=deterministic)
    for cfg in config.candidates(args, "backward", H200):
        assert config.misfit(args, "backward", cfg, H200) is None
        lower(args, cfg)


@interpreted
@pytest.mark.slow
def test_after_its_own_forward():
    entry = harness.find_entry("flash_attention", "pallas/gpu")
    args = make((1, 140, 140, 2, 1, 64), causal=True)
    made = harness.solve(SPEC, args)
    actual = harness.run_entry(
        entry, made, harness.configs(entry, args, "testing"), compiler_options=harness.QUICK
    )
    harness.assert_close_to_oracle(actual, made)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_vmap(deterministic):
    from ejkernel.kernels._pallas.gpu.flash_attention import bwd

    args = make((4, 65, 65, 2, 1, 64), causal=True, deterministic=deterministic)
    outputs, cfg = SPEC.reference_fn()(args), config.testing(args, "backward")

    def gradients(query, key, value, out, lse):
        given = args.with_arrays({"query": query, "key": key, "value": value})
        cotangents = (out * 2.0, lse * 0.5)
        return bwd.backward(given, cfg, (out, lse), (lse,), cotangents, WANTED, (False,))

    arrays = (args.query, args.key, args.value, *outputs)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in arrays]
    found = jax.jit(jax.vmap(gradients), compiler_options=harness.QUICK)(*split)
    expected = jax.jit(gradients, compiler_options=harness.QUICK)(*arrays)
    for name, gradient in found.items():
        np.testing.assert_array_equal(gradient.reshape(expected[name].shape), expected[name])


@lowered
@pytest.mark.parametrize(("d", "deterministic"), [(64, True), (192, False)])
def test_gradients_in_order_are_refused_with_segments(d, deterministic):
    from ejkernel.kernels._pallas.gpu import flash_attention

    entry = harness.find_entry("flash_attention", "pallas/gpu")
    shape = (1, 64, 64, 1, 1, d)
    args = make(shape, deterministic=deterministic)
    assert entry.why_not(args, H200, direction="backward") is None
    ids = jnp.zeros((1, 64), jnp.int32)
    args = make(shape, deterministic=deterministic, q_segment_ids=ids, kv_segment_ids=ids)
    assert "with segments" in str(flash_attention.backward_requires(args))
    assert entry.why_not(args, H200, direction="backward") is not None


@lowered
def test_blocks_of_other_sizes_are_refused():
    args = make((1, 64, 64, 1, 1, 128))
    with pytest.raises(UnsupportedError, match="needs 64 queries and 128 keys"):
        lower(args, config.Config(block_q=128))
