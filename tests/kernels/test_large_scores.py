"""Large scores and capped scores with offsets, in every attention-like operation.

Each is called so that it computes plain or causal attention of the same queries, keys and values.
Products of small whole numbers are exact, so the oracle, in NumPy and float64, has the same scores.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _settings, modules
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import kernel_registry
from tests.kernels import harness

T, HEADS, D = 24, 2, 24  # d ** -0.5 is no power of two: a product with it is rounded
PAGE = 8
RNG = np.random.default_rng(7)
Q = RNG.integers(-7, 8, (T, HEADS, D))
K = RNG.integers(-63, 64, (T, D))
V = RNG.integers(-127, 128, (T, D)) / 64
# every row sees one key more than the one before it, or all
CAUSAL, ALL = np.tri(T, dtype=bool), np.ones((T, T), bool)
TABLE = np.arange(T // PAGE, dtype=np.int32)[None]


@pytest.fixture(autouse=True)
def _compiled_as_users_compile(quick_compilation):
    jax.config.update("jax_disable_most_optimizations", False)
    with _settings.override(interpret=True):
        yield


def batched(q, k, v):
    """[b, t, h, d] of one row."""
    return q[None], k[None, :, None], v[None, :, None]


def interleaved(k, v):
    return jnp.stack([k, v], axis=1).reshape(T // PAGE, PAGE, 2, D)


def flash(q, k, v, **options):
    out, lse = modules.flash_attention(*batched(q, k, v), return_lse=True, **options)
    return out[0], lse[0].T


def plain(q, k, v, **options):
    out, weights = modules.attention(*batched(q, k, v), **options)
    return out[0], weights[0]


def sdpa(q, k, v, platform):
    arrays = batched(q, k, v)
    return (modules.scaled_dot_product_attention(*arrays, implementation=platform)[0],)


def ring(q, k, v, **options):
    out, lse = modules.ring_attention(
        *batched(q, k, v), causal=False, return_lse=True, strategy="ring", **options
    )
    return out[0], lse[0].T


def rotating(q, k, v, **options):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("ring",), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec(None, "ring")
    specs = {"in_specs": (spec,) * 3, "out_specs": spec}
    out = modules.ring_attention(
        *batched(q, k, v), causal=False, strategy="ring", mesh=mesh, **specs, **options
    )
    return (out[0],)


def blocksparse(q, k, v, **options):
    mask = jnp.ones((2, 2), bool)
    out, lse = modules.blocksparse_attention(
        *batched(q, k, v), mask, block_size=2 * PAGE, return_lse=True, **options
    )
    return out[0], lse[0].T


def latent(q, k, v, **options):
    eye, none = jnp.eye(D, dtype=q.dtype), jnp.zeros((D, D), q.dtype)
    w_kc, w_vc = jnp.concatenate([eye, none])[:, None], jnp.concatenate([none, eye])[:, None]
    out, lse = modules.mla_attention(
        q[None], jnp.concatenate([k, v], axis=1)[None], w_kc, w_vc, return_lse=True, **options
    )
    return out[0], lse[0].T


def selected(q, k, v, **options):
    indices = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (1, T, 1, 3))
    args = batched(q, k, v)
    return (modules.apply_native_sparse_attention(*args, indices, block_size=PAGE, **options)[0],)


def native(q, k, v, **options):
    gate = jnp.ones((1, T, HEADS), q.dtype)
    # the branches of selection and window both see everything
    out = modules.native_sparse_attention(
        *batched(q, k, v),
        g_slc=gate,
        g_swa=-2 * gate,
        block_counts=3,
        block_size=PAGE,
        window_size=T,
        **options,
    )
    return (-out[0],)


def paged(q, k, v, **options):
    cache = lambda x: x.reshape(T // PAGE, 1, PAGE, D)
    table, lens = np.repeat(TABLE, T, axis=0), np.full(T, T, np.int32)
    return modules.page_attention(q, cache(k), cache(v), lens, table, return_lse=True, **options)


def ragged_decode(q, k, v, **options):
    rows = lambda x: jnp.broadcast_to(x[None, :, None], (T, T, 1, D))
    ends = np.full(T, T, np.int32)
    return modules.ragged_decode_attention(
        q, rows(k), rows(v), 0 * ends, ends, return_lse=True, **options
    )


LENS, STARTS = np.asarray([T], np.int32), np.asarray([0, T], np.int32)


def ragged_paged(q, k, v, **options):
    pages = interleaved(k, v)
    count = np.asarray([1], np.int32)
    return modules.ragged_page_attention(
        q, pages, LENS, TABLE, STARTS, count, return_lse=True, **options
    )


def serving(q, k, v, **options):
    pages, parts = jnp.zeros((T // PAGE, PAGE, 2, D), q.dtype), np.asarray([0, 0, 1], np.int32)
    out, _, lse = modules.ragged_page_attention_v3(
        q, k[:, None], v[:, None], pages, LENS, TABLE, STARTS, parts, return_lse=True, **options
    )
    return out, lse


def latent_paged(q, k, v, **options):
    """The scores have the rope part of keys alone, and the values are the rest."""
    pages = jnp.concatenate([v, k], axis=1).reshape(T // PAGE, PAGE, 2 * D)
    count = np.asarray([1], np.int32)
    return modules.mla_page_attention(
        *(0 * q, q, pages, LENS, TABLE, STARTS, count),
        softmax_scale=D**-0.5,
        return_lse=True,
        **options,
    )


# what it computes, the visible pairs, whether it is differentiable, whether it has caps and slopes
OPS = {
    "flash_attention": (flash, ALL, True, True),
    "attention": (plain, ALL, True, True),
    "scaled_dot_product_attention": (sdpa, ALL, True, False),
    "ring_attention": (ring, ALL, True, True),
    "ring_attention_of_two_devices": (rotating, ALL, True, True),
    "blocksparse_attention": (blocksparse, ALL, True, False),
    "mla_attention": (latent, ALL, True, True),
    "apply_native_sparse_attention": (selected, CAUSAL, True, False),
    "native_sparse_attention": (native, CAUSAL, True, False),
    "page_attention": (paged, ALL, False, False),
    "ragged_decode_attention": (ragged_decode, ALL, False, False),
    "ragged_page_attention": (ragged_paged, CAUSAL, False, True),
    "ragged_page_attention_v3": (serving, CAUSAL, False, True),
    "mla_page_attention": (latent_paged, CAUSAL, False, True),
}


def softmax(x, seen):
    x = np.where(seen, x, -np.inf)
    top = x.max(axis=-1, keepdims=True)
    weights = np.exp(x - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total, (top + np.log(total))[..., 0]


# a TPU's interpreter does not run gradients inside a shard_map that checks what varies
NOT_HERE = {("ring_attention_of_two_devices", "pallas/tpu")}
ALIASES = {
    "scaled_dot_product_attention": "flash_attention",
    "ring_attention_of_two_devices": "ring_attention",
}


def quick(name, entry):
    """Whether `make test` runs it: of interpreted kernels those with a softmax of their own."""
    return name == "flash_attention" or (entry.platform == "triton" and entry.base is None)


def by_entry(names):
    """(name, entry) for every kernel; "name-entry" is what the results of tests are sorted by.

    On a CPU, platform="pallas" is the kernel for TPUs; that for Hopper has tests of its own. cuDNN
    has no float32, which these calls are in; test_cudnn.py checks that it says so.
    """
    others = (("pallas", "gpu"), ("cudnn", "gpu"))
    return [
        pytest.param(name, entry.name, marks=harness.marks(entry, quick=quick(name, entry)))
        for name in names
        for entry in kernel_registry.list(ALIASES.get(name, name))
        if not entry.priority and (name, entry.name) not in NOT_HERE
        if (entry.platform, entry.backend) not in others
    ]


def on(run, entry_name, refused):
    """The function on the platform of an entry; `refused` is told of a call that it refuses."""
    platform = entry_name.partition("/")[0]

    def call(*arrays, **options):
        try:
            return run(*arrays, platform=platform, **options)
        except UnsupportedError:
            refused("refused", True)
            raise

    return call


def test_every_op_with_scores_is_here():
    scaled = {
        op
        for op in kernel_registry.ops()
        if "softmax_scale" in {f.name for f in dataclasses.fields(kernel_registry.spec(op).args)}
    }
    assert scaled - {"gla", "lightning_attention", "linear_recurrence"} == OPS.keys() - ALIASES


@pytest.mark.parametrize(("name", "entry"), by_entry(OPS))
def test_scores_of_a_million_millions(name, entry, record_property):
    run, seen, differentiable, _ = OPS[name]
    run = on(run, entry, record_property)
    k = K * 2.0**33
    arrays = [jnp.asarray(x, jnp.float32) for x in (Q, k, V)]
    x = np.einsum("thd,sd->hts", Q, k).astype(np.float32) * np.float32(D**-0.5)
    weights, lse = softmax(x.astype(np.float64), seen)
    assert 1e12 < np.abs(lse).max() < 1e13
    expected = np.einsum("hts,se->the", weights, V)

    def loss(*arrays):
        found = run(*arrays)
        return found[0].sum(), found

    if differentiable:
        gradients, found = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
        assert all(np.isfinite(g).all() for g in gradients)
        assert np.abs(gradients[2]).max() <= HEADS * T  # of weights that are at most one
    else:
        found = jax.jit(run)(*arrays)
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)
    if name == "attention":
        np.testing.assert_allclose(found[1], weights, rtol=0, atol=1e-6)
    elif len(found) > 1:
        ulp = np.spacing(np.abs(lse).astype(np.float32)).T.astype(np.float64)
        assert (np.abs(found[1] - lse.T) <= 2 * ulp).all()


@pytest.mark.parametrize(
    ("name", "entry"), by_entry([name for name, (*_, offsets) in OPS.items() if offsets])
)
def test_slopes_are_added_to_capped_scores(name, entry, record_property):
    run, seen, _, _ = OPS[name]
    run = on(run, entry, record_property)
    q = Q / 16
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, K / 16, V)]
    slopes = np.asarray([0.5, -0.25], np.float32)
    options = {"logits_soft_cap": 2.0, "alibi_slopes": slopes}
    distance = np.arange(T)[None, :] - np.arange(T)[:, None]
    capped = 2.0 * np.tanh(np.einsum("thd,sd->hts", q, K / 16) * D**-0.5 / 2.0)
    weights, _ = softmax(capped + slopes[:, None, None] * distance, seen)
    found = jax.jit(lambda *arrays: run(*arrays, **options)[0])(*arrays)
    np.testing.assert_allclose(found, np.einsum("hts,se->the", weights, V), rtol=0, atol=1e-5)


def test_merged_states_of_large_scores():
    """The product that makes an lse and the difference from the larger one may be fused."""
    merge = jax.jit(lambda x, a, b: modules.merge_attention_states(a, 0.1 * x[0], b, 0.1 * x[1]))
    x = np.random.default_rng(0).normal(size=(2, 1, 2, 40)).astype(np.float32) * np.float32(1e13)
    a, b = jnp.ones((1, 40, 2, 4)), jnp.full((1, 40, 2, 4), 2.0)
    out, lse = merge(x, a, b)
    scores = x * np.float32(0.1)
    expected = np.where(scores[0] > scores[1], 1.0, 2.0)
    np.testing.assert_array_equal(out, np.broadcast_to(expected.swapaxes(1, 2)[..., None], a.shape))
    np.testing.assert_allclose(lse, scores.max(axis=0), rtol=2e-7)
