"""Latent attention: both forms against attention over expanded keys and values, and its edges."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import _settings
from ejkernel._device import Target, find
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._xla.mla_attention import config
from ejkernel.modules import (
    MLAAttention,
    MLAAttentionConfig,
    create_default_executor,
    flash_attention,
    flash_mla,
    mla_attention,
)
from ejkernel.ops import BwdParams, Executor, FwdParams, Invocation
from ejkernel.ops.config import selection
from tests import host
from tests.kernels import harness

SPEC = kernel_registry.spec("mla_attention")
BATCH, T, S, HEADS, GROUPS, D, E, L, R = 2, 21, 26, 4, 2, 8, 6, 10, 4
NAMES = ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k")


def arrays(t=T, s=S, heads=HEADS, groups=GROUPS, batch=BATCH):
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(batch, t, heads, D), (batch, s, L), (L, groups, D), (L, groups, E)]
    shapes += [(batch, t, heads, R), (batch, s, R)]
    made = [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]
    made[2:4] = [w * L**-0.5 for w in made[2:4]]
    return tuple(made)


def small(absorb):
    """Blocks that cut the shapes of these tests, in one of the two forms."""
    return config.Config(block_q=8, block_k=12, absorb=absorb)


def ours(*xs, absorb, **options):
    made = small(absorb)
    return mla_attention(*xs, fwd_params=made, bwd_params=made, **options)


def expanded(query, latent, w_kc, w_vc, b_q=None, b_k=None, **options):
    """`flash_attention` over keys and values of all heads."""
    key, value = (jnp.einsum("bsl,lgd->bsgd", latent, w, precision="highest") for w in (w_kc, w_vc))
    if b_k is not None:
        rope = jnp.broadcast_to(b_k[:, :, None], (*key.shape[:3], b_k.shape[-1]))
        key = jnp.concatenate([key, rope], -1)
    if b_q is not None:
        b_q = b_q[:, :, None] if b_q.ndim == 3 else b_q
        b_q = jnp.broadcast_to(b_q, (*query.shape[:3], b_q.shape[-1]))
        query = jnp.concatenate([query, b_q], -1)
    return flash_attention(query, key, value, **options)


def assert_close(actual, expected, rtol=2e-5):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = np.abs(np.where(np.isfinite(e), e, 0)).max(initial=1e-3)
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * scale)


def pull(fn, xs, **options):
    """Outputs, and gradients of a function of output and lse."""

    def loss(*xs):
        out, lse = fn(*xs, return_lse=True, **options)
        seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
        ramp = jnp.linspace(-1.0, 1.0, out.size).reshape(out.shape)
        return (out * ramp).sum() + (jnp.sin(seen)).sum(), (out, lse)

    run = jax.value_and_grad(loss, argnums=tuple(range(len(xs))), has_aux=True)
    (_, outputs), grads = jax.jit(run, compiler_options=harness.QUICK)(*xs)
    return outputs, grads


def assert_forms_equal_expanded(xs, wrap=lambda fn: fn, **options):
    """Outputs and gradients of both forms; those of the first."""
    expected = pull(wrap(expanded), xs, **options)
    made = [pull(wrap(functools.partial(ours, absorb=a)), xs, **options) for a in (False, True)]
    for actual in made:
        assert_close(actual, expected)
    return made[0]


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window_cap_sinks": {
        "sliding_window": (5, 3),
        "logits_soft_cap": 2.0,
        "softmax_aux": host.asarray(np.linspace(-1.0, 1.0, HEADS)[:, None]),
        "softmax_scale": 0.6,
    },
    "rows_dropout_alibi": {
        "causal": True,
        "cum_seqlens_q": host.asarray([0, 15, 36]),
        "cum_seqlens_k": host.asarray([0, 26, 35]),
        "dropout_prob": 0.3,
        "dropout_seed": 7,
        "alibi_slopes": host.asarray(np.linspace(0.1, 0.5, HEADS)),
    },
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "window_cap_sinks" else pytest.mark.slow) for n in OPTIONS],
)
def test_equals_attention_over_expanded_keys(name):
    assert_forms_equal_expanded(arrays(), **host.to_jax(OPTIONS[name]))


def test_gradients_of_bias_and_sinks():
    xs = (*arrays(), jax.random.normal(jax.random.key(8), (1, HEADS, T, S)), jnp.ones((1, 2)))

    def with_both(fn):
        return lambda *xs, **options: fn(*xs[:6], bias=xs[6], softmax_aux=xs[7], **options)

    assert_forms_equal_expanded(xs, with_both, causal=True)


@pytest.mark.parametrize("absorb", [pytest.param(False, marks=pytest.mark.slow), True])
def test_both_forms_meet_the_bound_in_half_precision(absorb):
    entry = harness.find_entry("mla_attention", "xla/any")
    made = harness.problem("mla_attention", "causal_window_sinks", "bfloat16")
    cfg = [dataclasses.replace(small(absorb), block_q=16)] * 2
    actual = harness.run_entry(entry, made, cfg, compiler_options=harness.QUICK)
    harness.assert_close_to_oracle(actual, made)


@pytest.mark.parametrize("absorb", [False, True])
def test_values_by_hand(absorb):
    """Two keys with scores 0 and ln 3, so weights 1/4 and 3/4, and values 2 and 4."""
    query = jnp.ones((1, 1, 1, 1))
    latent = jnp.asarray([[[0.0, 1.0], [np.log(3.0), 2.0]]])
    w_kc, w_vc = jnp.asarray([[[1.0]], [[0.0]]]), jnp.asarray([[[0.0]], [[2.0]]])
    run = functools.partial(ours, query, latent, w_kc, w_vc, absorb=absorb, return_lse=True)
    out, lse = run(softmax_scale=1.0)
    np.testing.assert_allclose(out[0, 0, 0], [3.5], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], [np.log(4.0)], rtol=1e-6)
    # rope scores of ln 9 and 0, halved with the others by the scale: 3 and sqrt(3)
    b_q, b_k = jnp.ones((1, 1, 1)), jnp.asarray([[[np.log(9.0)], [0.0]]])
    out, lse = run(b_q, b_k, softmax_scale=0.5)
    total = 3 + np.sqrt(3)
    np.testing.assert_allclose(out[0, 0, 0], [(6 + 4 * np.sqrt(3)) / total], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], [np.log(total)], rtol=1e-6)
    # the default scale counts both parts
    assert_close(run(b_q, b_k), run(b_q, b_k, softmax_scale=2**-0.5))


def test_spellings_of_the_rope_part():
    query, latent, w_kc, w_vc, b_q, b_k = arrays()
    apart = mla_attention(query, latent, w_kc, w_vc, b_q, b_k, causal=True)
    inside = mla_attention(
        jnp.concatenate([query, b_q], -1), latent, w_kc, w_vc, b_k=b_k, causal=True
    )
    np.testing.assert_array_equal(apart, inside)
    shared = flash_mla(query, latent, w_kc, w_vc, b_q[:, :, 0], b_k)
    repeated = jnp.repeat(b_q[:, :, :1], HEADS, axis=2)
    assert_close(shared, flash_mla(query, latent, w_kc, w_vc, repeated, b_k))
    whole = create_default_executor()(MLAAttention(), query, latent, w_kc, w_vc, b_q, b_k)
    np.testing.assert_array_equal(whole, flash_mla(query, latent, w_kc, w_vc, b_q, b_k))
    assert flash_mla is mla_attention


def test_gradient_of_a_shared_rope_part():
    *xs, b_q, b_k = arrays()
    assert_forms_equal_expanded((*xs, b_q[:, :, 0], b_k))


# Rows that nobody sees


@pytest.mark.parametrize("absorb", [pytest.param(False, marks=pytest.mark.slow), True])
def test_garbage_beyond_lengths_changes_nothing(absorb):
    clean = arrays(s=T)
    sums = jnp.asarray([0, 9, 28])
    hidden = jnp.arange(T)[None] >= jnp.asarray([9, 19])[:, None]
    fill = ("query", "key_value", "b_q", "b_k")
    fn = functools.partial(ours, absorb=absorb, causal=True, cum_seqlens_q=sums)
    expected = pull(fn, clean)
    for garbage in (np.nan, np.inf):
        dirty = tuple(
            jnp.where(hidden.reshape(BATCH, T, *[1] * (x.ndim - 2)), garbage, x) if n in fill else x
            for n, x in zip(NAMES, clean, strict=True)
        )
        (out, lse), grads = pull(fn, dirty)
        assert_close(((out, lse), grads), expected)
        assert (out[0, 9:] == 0).all()
        assert np.isneginf(lse[0, :, 9:]).all()
        assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("absorb", [False, True])
def test_garbage_in_the_future_shows_only_there(absorb):
    xs = list(arrays(s=T))
    xs[1] = xs[1].at[:, 15:].set(jnp.inf)
    out = ours(*xs, causal=True, absorb=absorb)
    clean = ours(*arrays(s=T), causal=True, absorb=absorb)
    assert np.isnan(out[:, 15:]).all()
    assert_close(out[:, :15], clean[:, :15])
    pushed = jax.jvp(lambda w: mla_attention(*xs[:3], w, *xs[4:], causal=True), (xs[3],), (xs[3],))
    assert_close(pushed[1][:, :15], clean[:, :15])


@pytest.mark.parametrize(
    "sizes", [(0, 5, 2), pytest.param((3, 0, 2), marks=pytest.mark.slow), (3, 5, 0), (1, 1, 1)]
)
def test_sizes(sizes):
    t, s, batch = sizes
    xs = arrays(t=t, s=s, batch=batch)
    (out, lse), _ = assert_forms_equal_expanded(xs, softmax_aux=jnp.zeros((1, 3)))
    if s == 0:
        np.testing.assert_allclose(lse, np.log(3.0), rtol=1e-6)
        assert (out == 0).all()


@pytest.mark.parametrize("heads", [(6, 1), pytest.param((3, 3), marks=pytest.mark.slow)])
def test_grouped_heads(heads):
    xs = arrays(heads=heads[0], groups=heads[1])
    for absorb in (False, True):
        assert_close(ours(*xs, causal=True, absorb=absorb), expanded(*xs, causal=True))


# Transformations


def test_traced_lengths_and_vmap():
    xs = arrays(batch=1, s=T)
    run = jax.jit(lambda sums: mla_attention(*xs, causal=True, cum_seqlens_q=sums))
    for sums in ([0, 4, 4, 19], [0, 9, 12, 21]):
        sums = jnp.asarray(sums)
        assert_close(run(sums), expanded(*xs, causal=True, cum_seqlens_q=sums))
    many = [jnp.stack([x, 2 * x]) for x in xs]
    out = jax.vmap(functools.partial(mla_attention, causal=True))(*many)
    assert_close(out[1], mla_attention(*(x[1] for x in many), causal=True))


@pytest.mark.slow
def test_forward_mode_and_second_order():
    xs = arrays(t=3, s=4, heads=2, groups=1, batch=1)

    def loss(fn):
        return lambda *xs: jnp.sin(fn(*xs, causal=True)).sum()

    assert_close(jax.jvp(loss(mla_attention), xs, xs), jax.jvp(loss(expanded), xs, xs), rtol=1e-4)
    second = [
        jax.jit(jax.jacrev(jax.grad(loss(fn), argnums=(1, 2))))(*xs)
        for fn in (mla_attention, expanded)
    ]
    assert_close(*second, rtol=1e-4)


@pytest.mark.parametrize("absorb", [False, True])
def test_a_mesh_changes_nothing(absorb):
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    xs = arrays()
    place = {
        "mesh": mesh,
        "in_specs": {"query": P("data", None, "model")},
        "out_specs": (P("data", None, "model"), P("data", "model")),
    }
    run = functools.partial(ours, absorb=absorb)
    assert_close(pull(run, xs, causal=True, **place), pull(run, xs, causal=True))


@pytest.mark.slow
def test_double_precision():
    with jax.enable_x64(True):
        xs = tuple(x.astype(jnp.float64) for x in arrays())
        expected = pull(expanded, xs, causal=True)
        for absorb in (False, True):
            run = functools.partial(ours, absorb=absorb)
            assert_close(pull(run, xs, causal=True), expected, rtol=1e-12)
        narrow = tuple(x.astype(jnp.float32) for x in xs)
        assert_close(pull(run, narrow, causal=True), expected)


# Form, blocks and memory


def avals(t, s, heads, d, latent, rope, batch=1, dtype=jnp.float32):
    shapes = [(batch, t, heads, d), (batch, s, latent), (latent, heads, d), (latent, heads, d)]
    shapes += [(batch, t, heads, rope), (batch, s, rope)]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def chosen(direction, *sizes, **options):
    xs = [jnp.zeros(x.shape, x.dtype) for x in avals(*sizes)]
    args = SPEC.canonicalize(SPEC.complete(dict(zip(NAMES, xs, strict=True)) | options))
    return config.heuristic(args, direction, find())


def test_the_form_with_less_work_is_chosen():
    assert chosen("forward", 1, 4096, 16, 128, 512, 64).absorb
    assert chosen("forward", 1, 4096, 16, 128, 512, 64, causal=True).absorb
    assert not chosen("forward", 1024, 1024, 8, 64, 256, 32, causal=True).absorb
    assert not chosen("backward", 1024, 1024, 8, 64, 256, 32, causal=True).absorb
    # a latent smaller than a head is cheaper in both directions
    assert chosen("forward", 1024, 1024, 4, 128, 32, 16).absorb
    assert chosen("backward", 1024, 1024, 4, 128, 32, 16).absorb
    # a window makes a query's pairs few and leaves the projections
    assert chosen("forward", 256, 4096, 8, 64, 256, 16, sliding_window=(16, 0)).absorb


def test_candidates_hold_both_forms():
    args = SPEC.make(SPEC.cases()[0], jnp.float32, jax.random.key(0))
    for direction in ("forward", "backward"):
        made = config.candidates(args, direction, find())
        assert {cfg.absorb for cfg in made} == {False, True}
        assert made[0] == config.heuristic(args, direction, find())
        assert all(config.memory(args, direction, cfg) > 0 for cfg in made)


# Keys and values of all heads, then a kernel of `flash_attention`

GPU = Target("gpu", "NVIDIA H200", "9.0")


def shapes_of(*sizes, dtype=jnp.bfloat16, **options):
    xs = dict(zip(NAMES, avals(*sizes, dtype=dtype), strict=True))
    return jax.eval_shape(lambda **xs: SPEC.canonicalize(SPEC.complete(xs | options)), **xs)


def order(*sizes, target=GPU, direction="forward", **options):
    """The kernels that can serve a call, best guess first, and why others cannot."""
    args = shapes_of(*sizes, **options)
    inv = Invocation(kernel=MLAAttention(), call=args, target=target, direction=direction)
    able, refused = selection.sort_out(inv)
    return [made.name for made in able], refused


def test_a_gpu_projects_first_unless_queries_are_few():
    long, short = (4096, 4096, 16, 128, 512, 64), (1, 4096, 16, 128, 512, 64)
    projected = ["cudnn/gpu", "triton/gpu"]
    for direction in ("forward", "backward"):
        assert order(*long, causal=True, direction=direction)[0][:2] == projected
    able, _ = order(*short)
    assert able[0] == "xla/any"
    assert {*projected} <= {*able}  # none is refused
    on_cpu, refused = order(*long, target=find())
    assert on_cpu == ["xla/any", "xla/any@-1"]
    assert "needs a GPU" in refused["triton/gpu"]


def test_refusals_are_those_of_flash_attention():
    _, refused = order(64, 64, 4, 128, 64, 64, dtype=jnp.float32)
    assert refused["cudnn/gpu"] == (
        "needs bfloat16 or float16; got float32 (as a call of `flash_attention`)"
    )
    _, refused = order(64, 64, 4, 256, 64, 64)
    assert "head sizes from 1 to 256; got 320 and 256" in refused["triton/gpu"]
    _, refused = order(64, 64, 4, 128, 64, 64, logits_soft_cap=2.0)
    assert refused["cudnn/gpu"] == "does not honour ['logits_soft_cap']"
    with pytest.raises(UnsupportedError, match="cudnn/gpu: needs a GPU; this call is for cpu"):
        mla_attention(*arrays(), platform="cudnn")


def test_tuned_rows_of_a_platform_are_those_of_flash_attention():
    xs = arrays()
    inv = Executor().invocation(MLAAttention(), *xs, platform="triton")
    assert inv.op == "flash_attention"
    assert Executor().invocation(MLAAttention(), *xs).op == "mla_attention"
    wanted = frozenset({"w_kc", "b_q", "bias"})
    assert SPEC.lowers_to.names(wanted) == {"key", "query", "bias"}


def test_keys_and_values_count_as_memory():
    args = shapes_of(64, 96, 4, 32, 48, 16)
    made = harness.find_entry("mla_attention", "xla/any@-1")
    there = SPEC.lowers_to.shapes(args)
    cfg = made.heuristic(args)
    sizes = [x.size for x in (there.query, there.key, there.value)]
    inner = made.base.memory(there, "forward", cfg)
    assert made.memory(args, "forward", cfg) == inner + 2 * sum(sizes)


def test_projected_in_tritons_interpreter():
    pytest.importorskip("triton")
    xs = arrays()
    options = {"causal": True, "sliding_window": 9, "softmax_scale": 0.4}
    expected = pull(mla_attention, xs, **options)
    with _settings.override(interpret=True):
        assert_close(pull(mla_attention, xs, platform="triton", **options), expected)


@pytest.mark.parametrize("absorb", [False, True])
def test_keys_of_all_heads_are_never_in_memory(absorb):
    t, s, heads, d, latent = 64, 8192, 16, 64, 128
    expanded_bytes = 4 * s * heads * 2 * d
    cfg = config.Config(block_q=64, block_k=256, absorb=absorb)
    run = functools.partial(mla_attention, causal=True, fwd_params=cfg, bwd_params=cfg)

    def gradient(*xs):
        return jax.grad(lambda *xs: run(*xs).sum(), argnums=tuple(range(6)))(*xs)

    xs = avals(t, s, heads, d, latent, 16)
    for fn in (run, gradient):
        memory = jax.jit(fn).lower(*xs).compile().memory_analysis()
        assert memory.temp_size_in_bytes < expanded_bytes // 3


def test_training_memory_is_linear():
    xs = avals(4096, 4096, 4, 32, 64, 16)
    gradient = jax.grad(lambda *xs: mla_attention(*xs, causal=True).sum(), argnums=(0, 1, 2, 3))
    memory = jax.jit(gradient).lower(*xs).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 4 * 4096 * 4096 // 4  # scores of all pairs


def test_block_sizes_from_the_caller():
    xs = arrays()
    plain = mla_attention(*xs)
    params = {"fwd_params": FwdParams(q_blocksize=8), "bwd_params": BwdParams(kv_blocksize=8)}
    assert_close(mla_attention(*xs, **params), plain)
    assert_close(mla_attention(*xs, cfg=MLAAttentionConfig(FwdParams(kv_blocksize=8))), plain)
    guess = config.from_params(small(True), {"block_q": 4, "num_warps": 8})
    assert guess == config.Config(block_q=4, block_k=12, absorb=True)
    with pytest.raises(ValueError, match="absorb=1 must be a bool"):
        config.Config(block_q=4, block_k=4, absorb=1)
    with pytest.raises(ValueError, match="block_k=0 must be a positive int"):
        config.Config(block_q=4, block_k=0)


# Errors


def test_errors_say_what_to_do():
    query, latent, w_kc, w_vc, b_q, b_k = arrays()
    with pytest.raises(ValueError, match=r"`b_q` must come with `b_k`.*Pass `b_k` \[b, s, 4\]"):
        mla_attention(query, latent, w_kc, w_vc, b_q)
    with pytest.raises(ValueError, match=r"head size 12, 8 of `w_kc` and 4 of `b_k`; got 8\. Pass"):
        mla_attention(query, latent, w_kc, w_vc, b_k=b_k)
    with pytest.raises(ValueError, match=r"`query` must have head size 8, 8 of `w_kc`; got 7"):
        mla_attention(query[..., :7], latent, w_kc, w_vc)
    with pytest.raises(ValueError, match=r"`b_q` must be \[2, 21, 4, 4\], or \[2, 21, 4\] for all"):
        mla_attention(query, latent, w_kc, w_vc, b_q[:, 1:, 0], b_k)
    with pytest.raises(ValueError, match="the 4 heads of `query` must be a multiple of the 3"):
        mla_attention(query, latent, jnp.ones((L, 3, D)), jnp.ones((L, 3, E)))
    with pytest.raises(TypeError, match="`w_vc` must have the dtype of `query`"):
        mla_attention(query, latent, w_kc, w_vc.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="`w_vc` must have shape"):
        mla_attention(query, latent, w_kc, w_vc[:-1])
    with pytest.raises(ValueError, match="`attention_mask` must have 4 axes"):
        mla_attention(query, latent, w_kc, w_vc, attention_mask=jnp.ones((T, S), bool))
    with pytest.raises(ValueError, match="`mla_attention`: `logits_soft_cap` must be positive"):
        mla_attention(query, latent, w_kc, w_vc, logits_soft_cap=0.0)
    with pytest.raises(ValueError, match="`cum_seqlens_q` without `cum_seqlens_k`"):
        mla_attention(query, latent, w_kc, w_vc, cum_seqlens_q=jnp.asarray([0, 3, 5]))


def test_lengths_are_checked_under_debug():
    xs = arrays(s=T)
    with (
        _settings.override(debug=True),
        pytest.raises(ValueError, match="`mla_attention`: `cum_seqlens_q` must not decrease"),
    ):
        mla_attention(*xs, cum_seqlens_q=jnp.asarray([0, 9, 5]))
    sums = [jnp.asarray([0, 9, end]) for end in (20, 99)]
    with (
        _settings.override(debug=True),
        pytest.raises(ValueError, match=r"`cum_seqlens_k` reaches beyond the 21 .* `key_value`"),
    ):
        mla_attention(*xs, cum_seqlens_q=sums[0], cum_seqlens_k=sums[1])
