"""Native sparse attention: packed sequences, garbage, memory, transformations and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel import _settings
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.modules import apply_native_sparse_attention, native_sparse_attention
from tests import host
from tests.kernels import harness
from tests.modules.test_native_sparse_attention import (
    APPLY,
    SPEC,
    arrays,
    assert_close,
    lists,
    loss,
    reference,
)

OPTIONS = {"block_counts": 2, "block_size": 4, "window_size": 3}


@pytest.fixture(scope="module", autouse=True)
def cuts():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global CUTS
    CUTS = jnp.asarray([0, 10, 10, 21], jnp.int32)  # of 23 tokens: the last two are outside


def ours(*xs, **more):
    return native_sparse_attention(*xs, **OPTIONS | more)


def everything(fn, count):
    return jax.jit(jax.value_and_grad(loss(fn), argnums=tuple(range(count))))


# Packed sequences


def test_packed_sequences_are_rows_of_their_own():
    xs = arrays(gates=3)
    packed = jax.jit(lambda cuts: ours(*xs, cu_seqlens=cuts))  # traced: no host sync
    out = packed(CUTS)
    for start, end in ((0, 10), (10, 21)):
        alone = ours(*(x[:, start:end] for x in xs))
        assert_close(out[:, start:end], alone)
    assert not out[:, 21:].any()
    # the same program, other lengths
    assert_close(packed(jnp.asarray([0, 23, 23, 23])), ours(*xs))
    assert not packed(jnp.zeros(4, jnp.int32)).any()


def test_a_prefix_of_the_tokens_gives_the_prefix_of_the_outputs():
    """Also where the prefix ends inside a block, which only compression could tell."""
    xs = arrays(gates=3)
    whole = ours(*xs)
    assert_close(ours(*(x[:, :13] for x in xs)), whole[:, :13])
    packed = jax.jit(lambda cuts: ours(*xs, cu_seqlens=cuts))
    for length in (3, 8, 13, 22):
        assert_close(packed(jnp.asarray([0, length, 23]))[:, :length], whole[:, :length])


def test_a_row_shorter_than_a_block_compresses_nothing():
    xs = arrays(t=7, gates=1)
    run = functools.partial(native_sparse_attention, *xs)
    assert not run(block_size=8).any()
    assert run(block_size=7)[:, 6].any()
    assert not run(block_size=8, cu_seqlens=jnp.asarray([0, 7])).any()


def test_packed_lists_are_numbered_in_their_sequence():
    q, k, v = arrays(groups=1)
    given = lists(0, 2, t=23)
    run = functools.partial(apply_native_sparse_attention, block_size=4)
    out = run(q, k, v, given, cu_seqlens=CUTS)
    for start, end in ((0, 10), (10, 21)):
        alone = run(*(x[:, start:end] for x in (q, k, v, given)))
        assert_close(out[:, start:end], alone)


# Garbage


def test_garbage_outside_sequences_changes_nothing():
    xs = arrays(gates=3)
    fn = functools.partial(ours, cu_seqlens=CUTS)
    outside = (jnp.arange(23) >= 21)[None, :, None]
    dirty = [jnp.where(outside.reshape(1, 23, *[1] * (x.ndim - 2)), jnp.nan, x) for x in xs]
    clean = everything(fn, 6)(*xs)
    assert_close(everything(fn, 6)(*dirty), clean)
    names = ("query", "key", "value", "g_cmp", "g_slc", "g_swa")
    values = dict(zip(names, dirty, strict=True)) | OPTIONS | {"cu_seqlens": CUTS}
    args = SPEC.canonicalize(SPEC.complete(values))
    assert_close(jax.jit(SPEC.formula_fn())(args)[0], fn(*xs))
    assert all(not jnp.where(outside, abs(g).reshape(1, 23, -1), 0).any() for g in clean[1])


def test_garbage_in_the_future_reaches_no_earlier_query():
    xs = arrays(gates=3)
    dirty = [xs[0], *(x.at[:, 14:].set(jnp.nan) for x in xs[1:3]), *xs[3:]]

    def early(*xs):
        return ours(*xs)[:, :14]

    (value, grads), (clean, expected) = everything(early, 6)(*dirty), everything(early, 6)(*xs)
    assert_close(value, clean)
    for i in (0, 3, 4, 5):  # of queries and gates: later queries spoil the keys they see
        assert_close(grads[i][:, :14], expected[i][:, :14])
    assert jnp.isnan(ours(*dirty)[:, 16:]).all()


def test_garbage_in_a_block_that_is_not_selected_stays_there():
    q, k, v = arrays(heads=2, groups=1)
    dirty = [x.at[:, 4:8].set(jnp.nan) for x in (k, v)]
    fn = lambda q, k, v: apply_native_sparse_attention(q, k, v, lists(0, 2, t=23), block_size=4)
    (value, grads), (clean, wanted) = everything(fn, 3)(q, *dirty), everything(fn, 3)(q, k, v)
    assert_close((value, grads), (clean, wanted))


# Sizes, memory, transformations


@pytest.mark.parametrize(
    "sizes",
    [
        {"t": 1},
        {"t": 0},
        {"batch": 0},
        {"t": 9, "heads": 3, "groups": 1, "batch": 3, "d": 1, "e": 7},
    ],
)
def test_sizes(sizes):
    xs = arrays(**sizes, gates=3)
    out, grads = everything(ours, 6)(*xs)
    if 0 in xs[0].shape:
        assert out == 0
        assert [g.shape for g in grads] == [x.shape for x in xs]
    else:
        assert_close((out, grads), everything(functools.partial(reference, **OPTIONS), 6)(*xs))


def test_no_sequence_gives_nothing():
    xs = arrays(gates=3)
    fn = functools.partial(ours, cu_seqlens=jnp.zeros(1, jnp.int32))
    out, grads = everything(fn, 6)(*xs)
    assert out == 0
    assert not any(g.any() for g in grads)


def test_no_square_of_tokens_in_memory():
    """8192 tokens of 16 heads: a float32 of tokens times tokens would be 4 GiB for them."""
    t = 8192
    shapes = [(16, 64), (1, 64), (1, 64), (16,), (16,), (16,)]
    xs = [jax.ShapeDtypeStruct((1, t, *s), jnp.float32) for s in [*shapes, (16, 64)]]

    @jax.jit
    def both(*xs):
        *xs, dout = xs
        out, pull = jax.vjp(functools.partial(native_sparse_attention, window_size=512), *xs)
        return out, pull(dout)

    used = both.lower(*xs).compile(compiler_options=harness.QUICK).memory_analysis()
    # queries, their gradient and the output are 32 MiB each
    assert used.temp_size_in_bytes < 640 * 2**20


@pytest.mark.slow
def test_forward_mode_and_second_order():
    xs, directions = arrays(t=9, gates=3), arrays(t=9, gates=3, seed=1)
    wanted = functools.partial(reference, **OPTIONS)

    def pushed(fn):
        return jax.jit(lambda xs, ds: jax.jvp(fn, xs, ds))(tuple(xs), tuple(directions))

    assert_close(pushed(ours), pushed(wanted))
    gradient = lambda fn: jax.grad(loss(fn), argnums=(0, 1, 2, 3, 4, 5))
    assert_close(pushed(gradient(ours)), pushed(gradient(wanted)), atol=1e-4)


@pytest.mark.slow
def test_vmap_over_lengths_and_arrays():
    q, k, v = arrays(t=13, batch=3)
    cuts = jnp.asarray([[0, 5, 13], [2, 2, 9], [0, 0, 0]], jnp.int32)
    fn = lambda q, k, v, cuts: native_sparse_attention(
        q[None], k[None], v[None], block_counts=2, block_size=3, cu_seqlens=cuts
    )
    gradient = jax.value_and_grad(loss(fn), argnums=(0, 1, 2))
    actual = jax.jit(jax.vmap(gradient))(q, k, v, cuts)
    for i in range(3):
        expected = jax.jit(gradient)(q[i], k[i], v[i], cuts[i])
        assert_close(jax.tree.map(lambda a, i=i: a[i], actual), expected)


def test_heads_and_batch_split_over_devices():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    xs = arrays(batch=2, gates=3)
    spec = PartitionSpec("x", None, "y")
    split = functools.partial(ours, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec)
    assert_close(everything(split, 6)(*xs), everything(ours, 6)(*xs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_under_x64(dtype):
    with jax.enable_x64(True):
        xs = [x.astype(dtype) for x in arrays(gates=3)]
        fn = functools.partial(ours, cu_seqlens=CUTS)
        wanted = functools.partial(reference, cu_seqlens=CUTS, **OPTIONS)
        actual, expected = everything(fn, 6)(*xs), everything(wanted, 6)(*xs)
        assert actual[1][0].dtype == dtype
        tolerance = 1e-11 if dtype == "float64" else 1e-4
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, e, rtol=0, atol=tolerance)


# Errors

ERRORS = [
    ({"block_counts": 0}, ValueError, "`block_counts` must be an int >= 1"),
    ({"block_counts": None}, ValueError, "`block_counts` must be an int >= 1"),
    ({"block_counts": True}, ValueError, "`block_counts` must be an int >= 1"),
    ({"block_counts": 2.0}, ValueError, "`block_counts` must be an int >= 1"),
    ({"block_counts": host.ones((1, 23), int)}, ValueError, "`block_counts` must have 3 axes"),
    ({"block_counts": host.ones((1, 23, 4), int)}, ValueError, "`block_counts` must have shape"),
    ({"block_size": 0}, ValueError, "`block_size` must be an int >= 1"),
    ({"block_size": 1.5}, TypeError, "`block_size`"),
    ({"window_size": -1}, ValueError, "`window_size` must be an int >= 0"),
    (
        {"g_swa": np.ones((1, 23, 4), "float32")},
        ValueError,
        "`window_size` must be at least 1 with `g_swa`",
    ),
    ({"cu_seqlens": np.asarray([1, 9])}, ValueError, r"`cu_seqlens` must start at 0; got \[1, 9\]"),
    (
        {"block_indices": np.full((1, 23, 2, 2), 6), "block_size": 4},
        ValueError,
        r"in \[0, 6\), the blocks of 4 that 23 tokens make; got 6 at \[0, 0, 0, 0\]",
    ),
    ({"block_indices": np.full((1, 23, 2, 2), -2)}, ValueError, "must be -1 .none. or in"),
    ({"softmax_scale": float("nan")}, ValueError, "`softmax_scale` must be finite"),
    ({"cu_seqlens": host.zeros(0, int)}, ValueError, "`cu_seqlens` must have at least one entry"),
    ({"cu_seqlens": host.zeros(3)}, TypeError, "`cu_seqlens`"),
    ({"g_cmp": host.ones((1, 23, 2))}, ValueError, "`g_cmp` must have shape"),
    ({"block_indices": host.zeros((1, 23, 4, 2), int)}, ValueError, "`block_indices` must have"),
    ({"block_indices": host.zeros((1, 23, 2, 17), int)}, ValueError, "Pass `block_counts=17`"),
    ({"query": host.ones((1, 23, 3, 6))}, ValueError, "must be a multiple"),
    ({"key": host.ones((1, 22, 2, 6))}, ValueError, "`key` must have shape"),
    ({"value": host.ones((1, 23, 2, 6), jnp.bfloat16)}, TypeError, "the dtype of `query`"),
    ({"platform": "cuda"}, UnsupportedError, "cuda"),
]


@pytest.mark.parametrize("form", [lambda x: x, host.to_jax], ids=["numpy", "jax"])
@pytest.mark.parametrize(("change", "error", "message"), ERRORS)
def test_errors(change, error, message, form):
    values = dict(zip(("query", "key", "value"), arrays(), strict=True))
    with pytest.raises(error, match=message):
        native_sparse_attention(**values | form(change))


def test_packing_needs_one_row():
    q, k, v = arrays(batch=2)
    given = jnp.zeros((2, 23, 2, 1), int)
    with pytest.raises(ValueError, match="the batch must be 1"):
        native_sparse_attention(q, k, v, cu_seqlens=CUTS)
    with pytest.raises(ValueError, match="`apply_native_sparse_attention`: `cu_seqlens` packs"):
        apply_native_sparse_attention(q, k, v, given, cu_seqlens=CUTS)
    with pytest.raises(ValueError, match="`apply_native_sparse_attention`: `block_counts`"):
        apply_native_sparse_attention(q, k, v, given, block_counts=0)


def test_debug_checks_values():
    q, k, v = arrays()
    with _settings.override(debug=True):
        with pytest.raises(ValueError, match="must not decrease"):
            native_sparse_attention(q, k, v, cu_seqlens=jnp.asarray([0, 24]))
        with pytest.raises(ValueError, match="`block_counts` must be at least 1; got 0"):
            native_sparse_attention(q, k, v, block_counts=jnp.zeros((1, 23, 2), int))
    problems = kernel_registry.validate_signatures()
    assert not [p for p in problems if "native_sparse" in p]


@pytest.mark.parametrize("spec", [pytest.param(SPEC, marks=pytest.mark.slow), APPLY])
def test_canonical_arguments_are_published_and_read_back(spec):
    for case in spec.cases()[:5]:
        args = spec.make(case, jnp.float32, jax.random.key(1))
        again = spec.canonicalize(spec.complete(spec.publish(args)))
        assert again.statics() == args.statics()
        assert again.arrays().keys() == args.arrays().keys()
        example = spec.example(args)
        assert spec.reduced(args, 16).arrays().keys() == example.arrays().keys()
