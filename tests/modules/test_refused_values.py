"""Values that no op takes, values that every op takes, and what the errors say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _settings, modules, xla_utils
from ejkernel.kernels import _types
from ejkernel.types import MaskInfo

B, T, H, G, D = 1, 6, 2, 1, 4


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def attend(op, **options):
    q, k, v = normal(B, T, H, D), normal(B, T, G, D, seed=1), normal(B, T, G, D, seed=2)
    return getattr(modules, op)(q, k, v, **options)


def mla(**options):
    latent, weights = normal(B, T, 3, seed=1), normal(3, G, D, seed=2)
    return modules.mla_attention(normal(B, T, H, D), latent, weights, weights, **options)


def blocksparse(**options):
    options = {"sparsity_mask": jnp.ones((2, 2), bool)} | options
    return attend("blocksparse_attention", block_size=4, **options)


def pool(**options):
    return modules.mean_pooling(normal(B, T, D), **options)


def paged(**options):
    lens, tables, starts = (jnp.asarray(x) for x in ([4], [[0, 1]], [0, T]))
    values = {"context_lens": lens + 4, "block_tables": tables, "query_start_loc": starts}
    pages = normal(2, 4, 2 * G, D)
    return modules.ragged_page_attention(
        normal(T, H, D), pages, **values | {"num_seqs": 1} | options
    )


def experts(**options):
    sizes = jnp.asarray([2, 1, 3])
    values = {"group_sizes": sizes, "group_offset": 1} | options
    return modules.grouped_matmul(normal(T, D), normal(2, D, D), **values)


# Masks

MASKED = {
    "flash_attention": functools.partial(attend, "flash_attention"),
    "attention": functools.partial(attend, "attention"),
    "ring_attention": functools.partial(attend, "ring_attention"),
    "mla_attention": mla,
    "blocksparse_attention": blocksparse,
    "scaled_dot_product_attention": functools.partial(attend, "scaled_dot_product_attention"),
}


@pytest.mark.parametrize("op", MASKED)
def test_floating_masks_are_refused(op):
    """Elsewhere they are added to the scores, which is the opposite of nonzero = attend."""
    name = "mask" if op == "scaled_dot_product_attention" else "attention_mask"
    additive = jnp.where(jnp.tri(T, dtype=bool), 0.0, -jnp.inf)[None, None]
    with pytest.raises(TypeError, match=f"`{op}`: `{name}` must be bool or integer.*`bias=`"):
        MASKED[op](**{name: additive})


def test_floating_masks_are_refused_in_every_form():
    mask = jnp.ones((1, 1, T, T))
    with pytest.raises(TypeError, match=r"from_attention_mask`: `mask` must be bool.*`bias=`"):
        MaskInfo.from_attention_mask(mask)
    with pytest.raises(TypeError, match=r"`attention_mask` must be bool.*float32"):
        attend("flash_attention", mask_info=MaskInfo(attention_mask=mask))
    with pytest.raises(TypeError, match=r"`attention_mask` must be bool.*float32"):
        attend("flash_attention", attention_mask=mask > 0, mask_info=MaskInfo(attention_mask=mask))
    with pytest.raises(TypeError, match="`mask_to_segment_ids`: `mask` must be bool"):
        xla_utils.mask_to_segment_ids(mask)
    with pytest.raises(TypeError, match="`sparsity_mask` must be bool or integer"):
        blocksparse(sparsity_mask=jnp.ones((2, 2)))


def test_integer_masks_attend_where_nonzero():
    mask = np.tri(T, dtype=np.int8)[None, None]
    expected = attend("flash_attention", causal=True)
    np.testing.assert_allclose(attend("flash_attention", attention_mask=2 * mask), expected, 1e-5)
    # not a mask of attention: zero and nonzero of any dtype
    weights = jnp.asarray([[1.0, 0.0, 1.0, 0.0, 0.0, 1.0]])
    np.testing.assert_array_equal(pool(mask=weights), pool(mask=weights > 0))


# Offsets, counts, indices

CUTS = {
    "flash_attention": functools.partial(attend, "flash_attention"),
    "attention": functools.partial(attend, "attention"),
    "mla_attention": mla,
    "mean_pooling": pool,
    "gla": functools.partial(attend, "gla"),
    "lightning_attention": functools.partial(
        attend, "lightning_attention", layer_idx=0, num_layers=2
    ),
    "linear_recurrence": functools.partial(attend, "linear_recurrence"),
    "native_sparse_attention": functools.partial(attend, "native_sparse_attention"),
}


@pytest.mark.parametrize("op", CUTS)
def test_offsets_of_sequences_start_at_0(op):
    packs_keys_too = op in ("flash_attention", "attention", "mla_attention")
    name = "cum_seqlens_q" if packs_keys_too else "cu_seqlens"
    with pytest.raises(ValueError, match=rf"`{op}`: `{name}` must start at 0; got \[1, 6\]"):
        CUTS[op](**{name: jnp.asarray([1, 6])})


TRACED = {
    "cu_seqlens": (pool, [1, 6], "must start at 0"),
    "group_offset": (experts, 2, r"`group_offset` must be in \[0, 1\]"),
    "num_seqs": (paged, 2, r"`num_seqs` must be in \[0, 1\], the rows of `block_tables`; got 2"),
}


@pytest.mark.parametrize("name", TRACED)
def test_bad_values_are_refused_where_known_and_when_debugging_where_traced(name):
    call, value, words = TRACED[name]
    value = jnp.asarray(value)
    with pytest.raises(ValueError, match=words):
        call(**{name: value})
    jax.jit(lambda x: call(**{name: x}))(value)
    with _settings.override(debug=True), pytest.raises(Exception, match=words):
        jax.block_until_ready(jax.jit(lambda x: call(**{name: x}))(value))


# Unsigned integers

UNSIGNED = {
    "ids": (functools.partial(attend, "flash_attention"), "q_segment_ids", [[0, 0, 1, 1, 1, 2]]),
    "cum_seqlens": (functools.partial(attend, "flash_attention"), "cum_seqlens_q", [0, 2, 5]),
    "cu_seqlens": (pool, "cu_seqlens", [0, 2, 5]),
    "context_lens": (paged, "context_lens", [7]),
    "block_tables": (paged, "block_tables", [[1, 0]]),
    "group_sizes": (experts, "group_sizes", [1, 2, 3]),
}


@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
@pytest.mark.parametrize("name", UNSIGNED)
def test_unsigned_ids_and_lengths(name, dtype):
    call, argument, values = UNSIGNED[name]
    with _settings.override(debug=True):  # whose checks take differences
        made = call(**{argument: jnp.asarray(values, dtype)})
    np.testing.assert_array_equal(made, call(**{argument: jnp.asarray(values, jnp.int32)}))


def test_numbers_of_more_than_31_bits_are_refused():
    ids = jnp.full((B, T), 2**31, jnp.uint32)
    with pytest.raises(ValueError, match=r"`q_segment_ids` must fit into 32 bits .* 2147483648"):
        attend("flash_attention", q_segment_ids=ids)
    with pytest.raises(ValueError, match="`cu_seqlens` must fit into 32 bits"):
        pool(cu_seqlens=np.asarray([0, 2**40]))


def test_counts_of_more_than_31_bits_are_refused():
    for call, name in ((paged, "num_seqs"), (experts, "group_offset")):
        for value in (2**31, -(2**70)):
            with pytest.raises(ValueError, match=rf"`{name}` must fit into 32 bits.* got {value}"):
                call(**{name: value})


def test_a_block_beyond_every_token_is_the_row():
    expected = attend("flash_attention", causal=True)
    for size, mask in ((2**31, jnp.ones((1, 1), bool)), (2**70, None)):
        options = {"sparsity_mask": mask, "block_size": size, "causal": True}
        made = attend("blocksparse_attention", **options)
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["attention", "blocksparse_attention"])
def test_heads_without_columns(op):
    """Nothing is computed, and nothing asks how many rows no element makes."""
    q, k = normal(B, T, H, D), normal(B, T, G, D, seed=1)
    more = {"sparsity_mask": jnp.ones((2, 2), bool), "block_size": 4} if op != "attention" else {}
    call = lambda v: jax.tree.leaves(getattr(modules, op)(q, k, v, **more))[0]
    out, pull = jax.vjp(call, jnp.zeros((B, T, G, 0)))
    assert out.shape == (B, T, H, 0)
    assert pull(out)[0].shape == (B, T, G, 0)


# Texts


def test_arrays_of_objects_and_texts_are_named():
    """Also where a call of this kind was compiled before, and inside of a dict."""
    for lens in (np.asarray([0, 2]), np.asarray([object(), 2]), np.asarray(["a", "b"])):
        call = functools.partial(attend, "flash_attention", cum_seqlens_q=lens)
        if lens.dtype.kind == "i":
            call()
            continue
        words = r"`flash_attention`: `cum_seqlens_q` must be an array of numbers; got "
        with pytest.raises(TypeError, match=words):
            call()
    at = np.asarray([None])
    with pytest.raises(TypeError, match=r"`sparse_matmul`: `cols` must be an array of numbers"):
        modules.sparse_matmul(normal(1, 2, 2), np.zeros(1, int), at, normal(4, 3), shape=(4, 4))
    weights = {"w_ih": np.asarray([["a"]]), "w_hh": normal(4, 1)}
    with pytest.raises(TypeError, match=r"`weights\['w_ih'\]` must be an array of numbers"):
        modules.recurrent(normal(B, T, 1), None, weights)


def test_keys_of_random_numbers_are_no_indices():
    key = jax.random.key(0)
    with pytest.raises(TypeError, match="`rows` must have a dtype of kind"):
        modules.sparse_matmul(normal(1, 2, 2), key, key, normal(4, 3), shape=(4, 4))


def test_messages_name_the_arguments_of_the_call():
    with pytest.raises(ValueError, match=r"2 heads of `queries` .* 3 heads of keys in `kv_pages`"):
        modules.ragged_page_attention(
            normal(T, H, D), normal(2, 4, 6, D), *map(jnp.asarray, ([4], [[0, 1]], [0, T], 1))
        )
    weights = {"w_ih": normal(4 * D, D), "w_hh": normal(4 * D, D)}
    with pytest.raises(ValueError, match=r"`cell_type` must be one of .*got \['lstm'\]"):
        modules.recurrent(normal(B, T, D), None, weights, cell_type=["lstm"])
    with pytest.raises(ValueError, match=r"`attention_mask` must .* t=6 \(from `query`\)"):
        attend("ring_attention", attention_mask=jnp.ones((1, 1, T + 1, T), bool))


class Tensor:
    """What torch's tensors have."""

    def __init__(self, *shape):
        self.shape, self.dtype, self.ndim = shape, "torch.float32", len(shape)


Tensor.__module__ = "torch"


def test_tensors_of_torch_are_named():
    words = r"must be a JAX or NumPy array; got a torch.Tensor of torch.float32\[1, 6, 2, 4\]"
    tensor = Tensor(B, T, H, D)
    with pytest.raises(TypeError, match="`flash_attention`: `query` " + words):
        modules.flash_attention(tensor, normal(B, T, G, D), normal(B, T, G, D))
    with pytest.raises(TypeError, match="`scaled_dot_product_attention`: `query` " + words):
        modules.scaled_dot_product_attention(tensor, normal(B, T, G, D), normal(B, T, G, D))
    weights = {"w_ih": Tensor(4 * D, D), "w_hh": normal(4 * D, D)}
    with pytest.raises(TypeError, match=r"`weights\['w_ih'\]` must be a JAX or NumPy array"):
        modules.recurrent(normal(B, T, D), None, weights)


def test_long_values_are_cut_in_messages():
    long = list(range(5000))
    for call, kind in (
        (lambda: pool(cu_seqlens=long), TypeError),
        (lambda: pool(cu_seqlens=1 + jnp.arange(5000)), ValueError),
        (lambda: attend("flash_attention", causal=long), TypeError),
        (lambda: attend("flash_attention", logits_soft_cap=np.arange(5000.0)), TypeError),
    ):
        with pytest.raises(kind) as caught:
            call()
        assert len(str(caught.value)) < 400
    assert _types.brief(jnp.arange(3)) == "[0, 1, 2]"
    assert _types.brief(np.arange(99)) == "[0, 1, 2, 3, 4, 5, 6, 7, ...] with shape [99]"


def test_a_negative_shape_is_named():
    rows = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"`shape` must be .m, k. with m >= 0 .*got \(-4, 4\)"):
        modules.sparse_matmul(normal(1, 2, 2), rows, rows, normal(4, 3), shape=(-4, 4))


@pytest.mark.parametrize("function", [xla_utils.to_zigzag, xla_utils.from_zigzag])
def test_zigzag_names_its_arguments(function):
    x = jnp.zeros((1, 8, 2))
    for count in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"`num_devices` must be an int >= 1; got {count}"):
            function(x, count)
    with pytest.raises(ValueError, match="`axis` must be one of the 3 axes of `x`; got 3"):
        function(x, 2, axis=3)
