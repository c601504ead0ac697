"""A serving step: where tokens go, what attention sees of them, whose memory the pages take."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _settings
from ejkernel.errors import EjkernelWarning, UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.modules import (
    RaggedPageAttentionV3,
    create_default_executor,
    flash_attention,
    ragged_page_attention,
    ragged_page_attention_v3,
)

W, BLOCKS, HEADS, GROUPS, D = 4, 3, 4, 2, 8
ROOM = W * BLOCKS
# (queries, length after them): decode at lengths 1, page - 1, page, page + 1 and full; prefill of
# nothing, one and a whole table; mixed, within a page and over several
STEPS = [(1, 1), (1, W - 1), (1, W), (1, W + 1), (1, ROOM)]
STEPS += [(0, 0), (1, 1), (ROOM, ROOM), (2, 7), (6, 11)]
COUNTS, LENS = (np.array(x, np.int32) for x in zip(*STEPS, strict=True))
COUNT = len(STEPS)
STARTS = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)
TOKENS = int(STARTS[-1]) + 3  # three belong to nobody
PAGES = COUNT * BLOCKS + 3
DISTRIBUTION = np.array([5, 8, COUNT], np.int32)

run = jax.jit(ragged_page_attention_v3, static_argnames=("return_lse", "sliding_window"))


def setup(fill=np.nan):
    """Arguments of a step, with garbage beyond lengths, and dense keys and values."""
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(2, COUNT, ROOM, GROUPS, D)).astype(np.float32)
    tables = rng.permutation(PAGES)[: COUNT * BLOCKS].reshape(COUNT, BLOCKS)
    pages = np.full((PAGES, W, 2 * GROUPS, D), fill, np.float32)
    new = np.full((2, TOKENS, GROUPS, D), np.nan, np.float32)
    for i, (count, length) in enumerate(STEPS):
        for j in range(length):
            if j < length - count:
                pages[tables[i, j // W], j % W, 0::2] = dense[0, i, j]
                pages[tables[i, j // W], j % W, 1::2] = dense[1, i, j]
            else:
                new[:, STARTS[i] + j - (length - count)] = dense[:, i, j]
    junk = np.array([-1, 10**9, -(2**31)])
    tables = np.where(np.arange(BLOCKS)[None] * W >= LENS[:, None], junk[None], tables)
    queries = rng.normal(size=(TOKENS, HEADS, D)).astype(np.float32)
    call = (queries, *new, pages, LENS, tables.astype(np.int32), STARTS, DISTRIBUTION)
    return [jnp.asarray(x) for x in call], dense


def test_equals_dense_attention_over_all_keys():
    call, (keys, values) = setup()
    out, _, lse = run(*call, return_lse=True)
    expected, expected_lse = flash_attention(
        call[0][None],
        jnp.concatenate([keys[i, :n] for i, n in enumerate(LENS)])[None],
        jnp.concatenate([values[i, :n] for i, n in enumerate(LENS)])[None],
        causal=True,
        cum_seqlens_q=jnp.asarray(STARTS),
        cum_seqlens_k=jnp.asarray(np.concatenate([[0], np.cumsum(LENS)])),
        return_lse=True,
    )
    mine = slice(0, STARTS[-1])
    np.testing.assert_allclose(out[mine], expected[0, mine], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse[mine], expected_lse[0].T[mine], rtol=2e-5, atol=2e-6)
    assert (out[STARTS[-1] :] == 0).all()
    assert np.isneginf(lse[STARTS[-1] :]).all()


def test_tokens_are_in_their_pages_and_nothing_else_changes():
    call, dense = setup(fill=7.0)
    _, pages = run(*call)
    expected = np.array(call[3])
    tables = np.asarray(call[5])
    for i, (count, length) in enumerate(STEPS):
        for j in range(length - count, length):
            expected[tables[i, j // W], j % W, 0::2] = dense[0, i, j]
            expected[tables[i, j // W], j % W, 1::2] = dense[1, i, j]
    np.testing.assert_array_equal(pages, expected)


def test_a_step_is_a_write_and_ragged_page_attention():
    call, _ = setup()
    queries, _, _, _, lens, tables, starts, _ = call
    out, pages = run(*call, sliding_window=5)
    again = ragged_page_attention(queries, pages, lens, tables, starts, COUNT, sliding_window=5)
    np.testing.assert_allclose(out, again, rtol=1e-6, atol=1e-6)


def test_steps_one_after_another_equal_one():
    """Twelve tokens at once, and in steps of 1, 5 and 6."""
    call, _ = setup(fill=0.0)
    row, tokens = 7, np.arange(STARTS[7], STARTS[8])
    queries, keys, values = (x[tokens] for x in call[:3])
    table, cache = call[5][row : row + 1], jnp.full_like(call[3], jnp.nan)
    outs = []
    for begin, end in ((0, 1), (1, 6), (6, 12)):
        pad = lambda x, b=begin, e=end: jnp.pad(x[b:e], ((0, 6 - (e - b)), (0, 0), (0, 0)))
        starts, ends = jnp.asarray([0, end - begin]), jnp.asarray([0, 0, 1])
        out, cache = run(
            *map(pad, (queries, keys, values)), cache, jnp.asarray([end]), table, starts, ends
        )
        outs.append(out[: end - begin])
    np.testing.assert_allclose(jnp.concatenate(outs), run(*call)[0][tokens], rtol=2e-5, atol=2e-6)


def test_sequences_that_do_not_count_are_not_touched():
    call, _ = setup(fill=0.0)
    full, _ = run(*call)
    call[7] = jnp.asarray([3, 3, 3])
    call[6] = call[6].at[4:].set(jnp.asarray([0, -5, 99, 3, 1, 2, 7]))  # may be anything
    out, pages = run(*call)
    np.testing.assert_array_equal(out[:3], full[:3])
    assert (out[3:] == 0).all()
    changed = np.unique(np.nonzero(np.asarray(pages != call[3]))[0])
    assert set(changed) == {int(call[5][i, (LENS[i] - 1) // W]) for i in range(3)}
    out, pages = run(*call[:7], jnp.asarray([0, 0, 0]))
    np.testing.assert_array_equal(pages, call[3])
    assert (out == 0).all()


def test_what_nobody_sees_changes_no_bit():
    results = [run(*setup(fill)[0], sliding_window=6)[0] for fill in (0.0, np.nan, np.inf)]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_pages_that_do_not_exist_are_not_written():
    call, _ = setup(fill=1.0)
    for bad in (-1, PAGES, 2**31 - 1, -(2**31)):
        tables = call[5].at[4, BLOCKS - 1].set(bad).at[7].set(bad)
        out, pages = run(*call[:5], tables, *call[6:])
        own = set(np.asarray(call[5])[[4, 7]].ravel().tolist())
        untouched = np.array(sorted(own))
        np.testing.assert_array_equal(pages[untouched], call[3][untouched])
        assert np.isfinite(out).all()


def test_surplus_queries_write_and_see_nothing():
    call, _ = setup(fill=0.0)
    call[4] = call[4].at[7].set(5)  # twelve queries: the last five are positions 0 to 4
    out, pages = run(*call)
    assert (out[STARTS[7] : STARTS[8] - 5] == 0).all()
    table = np.asarray(call[5])[7]
    np.testing.assert_array_equal(pages[table[1], 0, 0::2], call[1][STARTS[8] - 1])
    np.testing.assert_array_equal(pages[table[1], 1:], call[3][table[1], 1:])
    assert np.isfinite(out).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_narrow_pages_hold_tokens_divided_by_their_scale(dtype):
    call, _ = setup(fill=0.0)
    k_scale, v_scale = 0.05, jnp.asarray([0.02, 0.004])
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    call[1:3] = [jnp.nan_to_num(x) for x in call[1:3]]
    call[3] = (call[3] * 20).astype(dtype)
    out, pages = jax.jit(ragged_page_attention_v3)(*call, **scales)
    limit = 127 if dtype == "int8" else 448
    keys = np.clip(np.asarray(call[1]) / np.float32(k_scale), -limit - (dtype == "int8"), limit)
    values = np.clip(
        np.asarray(call[2]) / np.asarray(v_scale)[:, None], -limit - (dtype == "int8"), limit
    )
    if dtype == "int8":
        keys, values = np.rint(keys), np.rint(values)
        assert np.abs(values).max() >= 127  # some do not fit
    tables, token = np.asarray(call[5]), STARTS[7]
    stored = np.asarray(pages[tables[7, 0], 0].astype(jnp.float32))
    expected = (jnp.asarray(x[token]).astype(dtype).astype(jnp.float32) for x in (keys, values))
    for a, e in zip((stored[0::2], stored[1::2]), expected, strict=True):
        np.testing.assert_array_equal(a, e)
    queries, _, _, _, lens, tables, starts, _ = call
    again = ragged_page_attention(queries, pages, lens, tables, starts, COUNT, **scales)
    np.testing.assert_allclose(out, again, rtol=1e-6, atol=1e-6)
    assert out.dtype == jnp.float32
    assert np.isfinite(out).all()


# Memory


def copies_of(compiled, shape):
    """Instructions of a program that copy an array of a shape."""
    result = re.compile(rf" = f32\[{','.join(map(str, shape))}\]\S* (copy|copy-start)\(")
    return [line for line in compiled.as_text().splitlines() if result.search(line)]


def assert_in_place(compiled, shape):
    assert "input_output_alias={" in compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * np.prod(shape)
    assert not copies_of(compiled, shape)


def test_donated_pages_are_not_copied():
    call, _ = setup()
    step = jax.jit(ragged_page_attention_v3, donate_argnums=3)
    assert_in_place(step.lower(*call).compile(), call[3].shape)

    def layers(queries, keys, values, first, second, *rest):
        out, first = ragged_page_attention_v3(queries, keys, values, first, *rest)
        out, second = ragged_page_attention_v3(out, keys, values, second, *rest)
        return out, first, second

    both = jax.jit(layers, donate_argnums=(3, 4))
    compiled = both.lower(*call[:4], call[3] + 1, *call[4:]).compile()
    assert_in_place(compiled, call[3].shape)
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * call[3].nbytes


def test_the_search_for_copies_finds_them():
    call, _ = setup()
    assert copies_of(run.lower(*call).compile(), call[3].shape)


def test_eager_calls_copy_with_a_warning_or_give_away():
    call, _ = setup(fill=0.0)
    expected = run(*call)
    entry = kernel_registry.get("ragged_page_attention_v3")
    for function in (ragged_page_attention_v3, entry):
        with pytest.warns(EjkernelWarning, match="donate_cache=True"):
            eager = function(*call)
        assert not call[3].is_deleted()
        cache = call[3] + 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            given = function(*call[:3], cache, *call[4:], donate_cache=True)
        assert cache.is_deleted()
        for actual in (eager, given):
            for a, e in zip(actual, expected, strict=True):
                np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="an executor does not give arrays away"):
        create_default_executor()(RaggedPageAttentionV3(), *call, donate_cache=True)


def test_temporaries_do_not_grow_with_the_context():
    count, heads, groups, d, size = 4, 8, 2, 64, 16
    shape = jax.ShapeDtypeStruct

    def temporaries(blocks, tokens):
        call = (
            shape((tokens, heads, d), jnp.float32),
            shape((tokens, groups, d), jnp.float32),
            shape((tokens, groups, d), jnp.float32),
            shape((count * blocks, size, 2 * groups, d), jnp.float32),
            shape((count,), jnp.int32),
            shape((count, blocks), jnp.int32),
            shape((count + 1,), jnp.int32),
            shape((3,), jnp.int32),
        )
        step = jax.jit(ragged_page_attention_v3, donate_argnums=3)
        return step.lower(*call).compile().memory_analysis().temp_size_in_bytes

    step = count * 512 * 2 * groups * d * 4  # keys and values of one step
    assert temporaries(256, count) < 3 * step
    assert temporaries(2048, count) < temporaries(256, count) + 4 * 4 * count * 2048


# Errors


def test_errors_say_what_to_do():
    call, _ = setup()
    cases = {
        1: (call[1].astype(jnp.bfloat16), TypeError, "`keys` must have the dtype of `queries`"),
        3: (call[3].astype(jnp.bfloat16), TypeError, "`kv_pages` must have the dtype"),
        6: (call[6][1:], ValueError, "`query_start_loc` must be .11., one more than `kv_lens`"),
        7: (call[7][:2], ValueError, "`distribution` must be .3."),
    }
    for place, (bad, error, words) in cases.items():
        with pytest.raises(error, match=words):
            run(*call[:place], bad, *call[place + 1 :])
    with pytest.raises(ValueError, match="`kv_pages` must have 4 heads, keys and values"):
        run(*call[:3], call[3][:, :, :2], *call[4:])
    with pytest.raises(UnsupportedError, match="no derivative with respect to `queries`"):
        jax.grad(lambda q: run(q, *call[1:])[0].sum())(call[0])


def test_debug_names_the_sequence():
    call, _ = setup()
    cases = [
        (4, call[4].at[8].set(ROOM + 1), "`kv_lens` must be in .0, 12.*got 13 for sequence 8"),
        (5, call[5].at[4, 1].set(-3), "must name pages.*got -3 at place 1 of sequence 4"),
        (6, call[6].at[9].set(2), "`query_start_loc` must not decrease.*to 2 for sequence 8"),
        (4, call[4].at[9].set(3), "more queries than `kv_lens`; got 6 queries.*3 for sequence 9"),
        (7, jnp.asarray([6, 8, COUNT]), "must have one query; got 0 for sequence 5"),
        (7, jnp.asarray([5, 4, COUNT]), "`distribution` must not decrease"),
        (5, call[5].at[3, 1].set(call[5][4, 2]).at[4, 2].set(call[5][3, 1]), ""),
        (5, call[5].at[8, 1].set(call[5][9, 1]), "written by sequences 8 and 9"),
    ]
    with _settings.override(debug=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", EjkernelWarning)
        for place, bad, words in cases:
            arguments = (*call[:place], bad, *call[place + 1 :])
            if not words:
                assert ragged_page_attention_v3(*arguments)[0].shape == call[0].shape
                continue
            with pytest.raises(ValueError, match=words):
                ragged_page_attention_v3(*arguments)
