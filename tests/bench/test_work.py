"""Counts of work agree with counting one by one, and every op has shapes to measure."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import kernel_registry
from ejkernel.kernels._reference import flash_attention as reference
from ejkernel.kernels._specs import _work_attention, _work_sparse

OPS = kernel_registry.ops()


def made(op, case, dtype=jnp.float32):
    return kernel_registry.spec(op).make(case, jnp.dtype(dtype), jax.random.key(3))


def cases(op):
    """The cases of an op; those beyond the first few are slow ones."""
    # ids that name no page are clamped, so that one key may stand for several
    found = [case for case in kernel_registry.spec(op).cases() if case.name != "bad_page_ids"]
    core = [case for case in found if "core" in case.tags][:2]
    return [
        pytest.param(
            op, case, id=f"{op}-{case.name}", marks=() if case in core else pytest.mark.slow
        )
        for case in found
    ]


def oracle(op, args):
    return kernel_registry.spec(op).reference_fn()(args)[0]


def nonzeros(out):
    return int((np.asarray(out) != 0).sum())


@pytest.mark.parametrize(("op", "case"), cases("flash_attention"))
def test_pairs_of_attention_are_those_with_a_weight(op, case):
    args = made(op, case)
    plain = {"bias": None, "dropout_prob": 0.0, "alibi_slopes": None, "logits_soft_cap": None}
    args = dataclasses.replace(args, **plain, query=0 * args.query)
    weights = reference.attend(args)[2]
    assert _work_attention.visible_pairs(args) == nonzeros(weights)
    pairs, d, e = nonzeros(weights), args.query.shape[-1], args.value.shape[-1]
    work = kernel_registry.spec(op).work
    assert work.flops(args, "forward") == 2 * pairs * (d + e)
    assert work.flops(args, "backward") == 2 * pairs * (3 * d + 2 * e)


def one_hot_values(args, length, groups):
    """Values of key j are 1 in column j: the output is not zero where a key is seen."""
    eye = jnp.broadcast_to(jnp.eye(length)[None, :, None], (args.query.shape[0], length, 1, length))
    return jnp.repeat(eye, groups, axis=2)


@pytest.mark.parametrize(("op", "case"), cases("blocksparse_attention"))
def test_pairs_of_masked_blocks_are_those_that_reach_the_output(op, case):
    args = made(op, case)
    values = one_hot_values(args, *args.key.shape[1:3])
    plain = {"bias": None, "softmax_aux": None, "logits_soft_cap": None, "return_lse": False}
    args = dataclasses.replace(args, query=0 * args.query, value=values, **plain)
    assert _work_attention.visible_pairs(args) == nonzeros(oracle(op, args))


@pytest.mark.parametrize(("op", "case"), cases("apply_native_sparse_attention"))
def test_selected_pairs_are_those_that_reach_the_output(op, case):
    args = made(op, case)
    values = one_hot_values(args, *args.key.shape[1:3])
    args = dataclasses.replace(args, query=0 * args.query, value=values)
    assert _work_sparse.selected_pairs(args) == nonzeros(oracle(op, args))


@pytest.mark.parametrize("branch", ["g_slc", "g_cmp", "g_swa"])
@pytest.mark.parametrize(("op", "case"), cases("native_sparse_attention"))
def test_each_branch_counts_the_pairs_that_reach_the_output(op, case, branch):
    args = made(op, case)
    gates = dict.fromkeys(("g_cmp", "g_slc", "g_swa"))
    gates[branch] = jnp.ones(args.query.shape[:3])
    window = args.window_size or 3
    values = one_hot_values(args, *args.key.shape[1:3])
    args = dataclasses.replace(
        args, query=0 * args.query, value=values, window_size=window, **gates
    )
    out = np.asarray(oracle(op, args))
    d, e = args.query.shape[-1], values.shape[-1]
    count = nonzeros(out)
    if branch == "g_cmp":  # a mean over a block stands for its keys
        assert count % args.block_size == 0
        count //= args.block_size
    expected = 2 * count * (d + e)
    if branch == "g_slc" and args.block_indices is None:
        expected += 2 * _work_sparse._compressed_pairs(args) * d
    assert kernel_registry.spec(op).work.flops(args, "forward") == expected
    assert kernel_registry.spec(op).work.flops(args, "backward") == 2 * count * (3 * d + 2 * e)


@pytest.mark.parametrize(("op", "case"), cases("page_attention"))
def test_a_decode_over_pages_counts_the_keys_it_sees(op, case):
    args = made(op, case)
    pages, groups, size, d = args.key_cache.shape
    slots = jnp.eye(pages * size).reshape(pages, 1, size, pages * size)
    changes = dict.fromkeys(("softmax_aux", "k_scale", "v_scale", "logits_soft_cap"))
    args = dataclasses.replace(
        args,
        query=0 * args.query,
        key_cache=jnp.zeros((pages, groups, size, d)),
        value_cache=jnp.repeat(slots, groups, axis=1),
        alibi_slopes=None,
        return_lse=False,
        **changes,
    )
    pairs = nonzeros(oracle(op, args))
    assert kernel_registry.spec(op).work.flops(args, "forward") == 2 * pairs * (d + pages * size)


@pytest.mark.parametrize(("op", "case"), cases("ragged_page_attention"))
def test_mixed_sequences_count_the_keys_they_see(op, case):
    args = made(op, case)
    pages, size, double, _ = args.kv_pages.shape
    width = pages * size
    slots = jnp.eye(width).reshape(pages, size, 1, width)
    both = jnp.concatenate([0 * slots, slots], axis=2)  # keys, then values
    changes = dict.fromkeys(("softmax_aux", "k_scale", "v_scale", "logits_soft_cap"))
    args = dataclasses.replace(
        args,
        queries=jnp.zeros((*args.queries.shape[:2], width)),
        kv_pages=jnp.tile(both, (1, 1, double // 2, 1)),
        alibi_slopes=None,
        return_lse=False,
        **changes,
    )
    pairs = nonzeros(oracle(op, args))
    assert kernel_registry.spec(op).work.flops(args, "forward") == 4 * pairs * width


@pytest.mark.parametrize(("op", "case"), cases("ragged_decode_attention"))
def test_a_decode_over_rows_counts_the_keys_it_sees(op, case):
    args = made(op, case)
    length, groups, d = args.key.shape[1:]
    changes = dict.fromkeys(("softmax_aux", "k_scale", "v_scale", "logits_soft_cap"))
    args = dataclasses.replace(
        args,
        query=0 * args.query,
        key=jnp.zeros(args.key.shape),
        value=one_hot_values(args, length, groups),
        alibi_slopes=None,
        return_lse=False,
        **changes,
    )
    pairs = nonzeros(oracle(op, args))
    assert kernel_registry.spec(op).work.flops(args, "forward") == 2 * pairs * (d + length)


@pytest.mark.parametrize(("op", "case"), cases("linear_recurrence") + cases("gla"))
def test_a_recurrence_counts_its_steps(op, case):
    args = made(op, case)
    cuts = [0, args.query.shape[1]] if args.cu_seqlens is None else args.cu_seqlens.tolist()
    heads = max(x.shape[2] for x in (args.query, args.key, args.value))
    steps = args.query.shape[0] * heads * sum(b - a for a, b in itertools.pairwise(cuts))
    state = args.query.shape[-1] * args.value.shape[-1]
    work = kernel_registry.spec(op).work
    # an outer product into the state, and a product with the query
    assert work.flops(args, "forward") == steps * (2 * state + 2 * state)
    assert work.flops(args, "backward") == steps * 5 * 2 * state


@pytest.mark.parametrize(("op", "case"), cases("grouped_matmul"))
def test_a_grouped_product_counts_rows_that_have_a_matrix(op, case):
    args = made(op, case)
    ones = dataclasses.replace(
        args, lhs=jnp.ones_like(args.lhs), rhs=jnp.ones_like(args.rhs), existing_out=None
    )
    numbers = nonzeros(oracle(op, ones))
    work = kernel_registry.spec(op).work
    assert work.flops(args, "forward") == 2 * numbers * args.lhs.shape[-1]
    assert work.flops(args, "backward") == 4 * numbers * args.lhs.shape[-1]


@pytest.mark.parametrize(("op", "case"), cases("mean_pooling"))
def test_means_count_the_tokens_that_have_a_gradient(op, case):
    args = made(op, case)
    inputs = args.inputs
    gradient = jax.grad(lambda x: oracle(op, dataclasses.replace(args, inputs=x)).sum())(inputs)
    assert kernel_registry.spec(op).work.flops(args, "forward") == nonzeros(gradient)


def test_recurrent_cells_count_steps_within_lengths():
    spec = kernel_registry.spec("recurrent")
    for case in spec.cases()[:6]:
        args = made("recurrent", case)
        batch, t, i = args.inputs.shape
        count, gates, d = args.w_hh.shape
        steps = batch * t if args.lengths is None else sum(args.lengths.tolist())
        assert spec.work.flops(args, "forward") == 2 * count * steps * gates * (i + d)


def test_latent_attention_takes_the_lesser_of_two_ways():
    spec = kernel_registry.spec("mla_attention")
    (prefill, decode) = [c for c in spec.work.benchmarks() if "cpu" in c.tags]
    b, t, h, d, r, l = 1, 512, 8, 64, 32, 256
    pairs = b * h * t * (t + 1) // 2
    projected = 2 * b * t * l * h * 2 * d + 2 * pairs * (d + r + d)
    assert spec.work.flops(made("mla_attention", prefill), "forward") == projected
    b, s, h, d, r, l = 4, 2048, 16, 128, 64, 512
    absorbed = 2 * b * h * l * 2 * d + 2 * b * h * s * (l + r + l)
    assert spec.work.flops(made("mla_attention", decode), "forward") == absorbed


def test_unknown_lengths_hide_nothing():
    spec = kernel_registry.spec("page_attention")
    args = made("page_attention", spec.cases()[0])
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in args.arrays().items()}
    room = args.block_tables.size * args.key_cache.shape[2]
    heads, d = args.query.shape[1:]
    count = 2 * heads * room * (d + args.value_cache.shape[-1])
    assert spec.work.flops(args.with_arrays(shapes), "forward") == count


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_shapes_for_a_cpu_and_for_devices(op):
    spec = kernel_registry.spec(op)
    tags = [case.tags for case in spec.work.benchmarks()]
    names = [case.name for case in spec.work.benchmarks()]
    assert len(set(names)) == len(names)
    assert {"cpu", "device"} <= frozenset().union(*tags)
    for case in spec.work.benchmarks():
        make = lambda key, case=case: spec.make(case, jnp.dtype("float32"), key)
        args = jax.eval_shape(make, jax.random.key(0))
        assert spec.work.flops(args, "forward") >= 0
        assert spec.work.traffic(args, "forward") > 0
        if spec.differentiable:
            assert spec.work.flops(args, "backward") >= spec.work.flops(args, "forward")
            assert spec.work.traffic(args, "backward") >= spec.work.traffic(args, "forward")


def test_traffic_of_attention_reads_inputs_and_writes_outputs():
    spec = kernel_registry.spec("flash_attention")
    case = next(c for c in spec.work.benchmarks() if c.name == "B1 S1024 H8/2 d64 causal")
    args = made("flash_attention", case, "bfloat16")
    q, kv = 1024 * 8 * 64 * 2, 1024 * 2 * 64 * 2
    assert spec.work.traffic(args, "forward") == 2 * q + 2 * kv
    # reads q, k, v, the output and its gradient; writes three gradients
    assert spec.work.traffic(args, "backward") == 3 * q + 2 * kv + (q + 2 * kv)


def test_an_update_moves_only_tokens_that_have_a_slot():
    spec = kernel_registry.spec("update_paged_cache")
    case = next(c for c in spec.cases() if c.name == "cover00")  # 2 of 6 tokens have none
    args = made("update_paged_cache", case)
    token = (args.keys[0].size + args.values[0].size) * 4
    assert spec.work.traffic(args, "forward") == 2 * 4 * token + 6 * 4
