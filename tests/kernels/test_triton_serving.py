"""What serving asks of the Triton kernels over cached keys, in Triton's interpreter.

They read nothing outside of their arrays, whatever tables and lengths say, and no page that nobody
sees; and the bits of a sequence depend on that sequence alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter

from ejkernel import _device, _settings
from ejkernel.callib import _triton_call
from ejkernel.kernels import kernel_registry
from tests.backend import BACKEND
from tests.kernels import harness

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="looks into the interpreter, on a CPU")
SIZE, BLOCKS, PAGES = 4, 10, 24
HEADS, GROUPS, D = 4, 2, 8
OPS = ("page_attention", "ragged_page_attention", "ragged_decode_attention")
LENS = (40, 31, 1)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def values(op, heads=HEADS, groups=GROUPS, lens=LENS, **options):
    """Arguments of a call with 40, 31 and 1 keys; the ragged ones have 12, 3 and 1 queries."""
    batch = len(lens)
    lens = jnp.asarray(lens, jnp.int32)
    tables = np.random.default_rng(0).permutation(PAGES - 4)[: 2 * BLOCKS] + 2
    tables = jnp.asarray(np.resize(tables, (batch, BLOCKS)), jnp.int32)
    if op == "page_attention":
        return options | {
            "query": normal(1, batch, heads, D),
            "key_cache": normal(2, PAGES, groups, SIZE, D),
            "value_cache": normal(3, PAGES, groups, SIZE, 2 * D),
            "context_lens": lens,
            "block_tables": tables,
        }
    if op == "ragged_decode_attention":
        length = BLOCKS * SIZE
        return options | {
            "query": normal(1, batch, heads, D),
            "key": normal(2, batch, length, groups, D),
            "value": normal(3, batch, length, groups, 2 * D),
            "sequence_start": jnp.zeros(batch, jnp.int32),
            "sequence_end": lens,
        }
    starts = np.concatenate([[0], np.cumsum([12, 3, 1][:batch])])
    return options | {
        "queries": normal(1, 18, heads, D),
        "kv_pages": normal(2, PAGES, SIZE, 2 * groups, D),
        "context_lens": lens,
        "block_tables": tables,
        "query_start_loc": jnp.asarray(starts, jnp.int32),
        "num_seqs": batch,
    }


def make(op, given):
    spec = kernel_registry.spec(op)
    return spec.canonicalize(spec.unpack(spec.complete(given)))


def run(op, given, **settings):
    """Outputs of the Triton entry, as NumPy arrays."""
    args, entry = make(op, given), harness.find_entry(op, "triton/gpu")
    cfg = dataclasses.replace(entry.config.testing(args, "forward"), **settings)
    with _settings.override(interpret=True):
        return [np.asarray(x) for x in entry.fn(args, cfg)[0]]


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def cache_of(given):
    return [n for n in ("key_cache", "value_cache", "kv_pages", "key", "value") if n in given]


# What is read


@pytest.fixture
def reads(monkeypatch):
    """Bytes that kernels read, as {array: offsets}; a read outside of all arrays fails."""
    known, found = [], []
    load = interpreter.InterpreterBuilder.create_masked_load
    on_host = _triton_call._run_on_host

    def checked(self, ptrs, mask, *rest):
        at = np.asarray(ptrs.data).astype(np.int64)[np.asarray(mask.data)]
        inside = np.zeros(at.shape, bool)
        for array in known:
            first = array.ctypes.data
            mine = (at >= first) & (at < first + array.nbytes)
            found.extend((array.shape, offset) for offset in np.unique(at[mine] - first))
            inside |= mine
        assert inside.all(), "a kernel reads outside of its arrays"
        return load(self, ptrs, mask, *rest)

    def launched(arrays, launch):
        known[:] = arrays
        return on_host(arrays, launch)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", checked)
    monkeypatch.setattr(_triton_call, "_run_on_host", launched)
    return found


@pytest.mark.parametrize("op", OPS)
def test_bad_tables_and_lengths_never_read_outside_the_arrays(op, reads):
    given = values(op, lens=(10**6, -5, 2**31 - 1), return_lse=True)
    if "block_tables" in given:
        bad = [2**31 - 1, -(2**31), PAGES, -1, 2**30]
        given["block_tables"] = jnp.asarray(np.resize(bad, (3, BLOCKS)), jnp.int32)
    if op == "ragged_page_attention":
        given["query_start_loc"] = jnp.asarray([-3, 14, 2**30, 5], jnp.int32)
    if op == "ragged_decode_attention":
        given["sequence_start"] = jnp.asarray([-(10**6), 7, 5], jnp.int32)
    out, _ = run(op, given)
    assert np.isfinite(out).all()
    assert reads


@pytest.mark.parametrize("op", ["page_attention", "ragged_page_attention"])
@pytest.mark.parametrize("missing", ["blocks", "pages"])
def test_without_a_table_or_a_page_there_is_nothing_to_read(op, missing, reads):
    given = values(op, return_lse=True)
    if missing == "blocks":
        given["block_tables"] = given["block_tables"][:, :0]
    else:
        given |= {name: given[name][:0] for name in cache_of(given)}
    out, lse = run(op, given)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("op", ["page_attention", "ragged_page_attention"])
def test_pages_that_nobody_sees_are_not_read(op, reads):
    """A window of 9 keys before the query, and lengths that end inside of tables."""
    given = values(op, sliding_window=9)
    run(op, given)
    tables, queries = np.asarray(given["block_tables"]), (12, 3, 1)
    if op == "page_attention":
        queries = (1, 1, 1)
    seen = set()
    for row, (length, count) in enumerate(zip(LENS, queries, strict=True)):
        first = max(length - count - 9, 0)
        seen |= set(tables[row, first // SIZE : (length - 1) // SIZE + 1].tolist())
    for name in cache_of(given):
        array = given[name]
        page = array.nbytes // PAGES
        assert {int(offset) // page for shape, offset in reads if shape == array.shape} == seen


# Bits


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("splits", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_bits_of_a_sequence_are_its_own(op, splits):
    """Neither the places of its pages, nor what unused ones hold, nor its neighbours matter."""
    given = values(op, return_lse=True, num_splits=splits, sliding_window=30)
    expected = run(op, given)
    changed = dict(given)
    if "block_tables" in given:
        order = np.random.default_rng(5).permutation(PAGES)
        tables = np.asarray(given["block_tables"])
        used = np.zeros((PAGES, SIZE), bool)
        for row, length in enumerate(LENS):
            for j in range(length):
                used[tables[row, j // SIZE], j % SIZE] = True
        axis = 2 if op == "page_attention" else 1
        for name in cache_of(given):
            shape = [PAGES, *(1,) * 3]
            shape[axis] = SIZE
            poisoned = jnp.where(used.reshape(shape), given[name], jnp.nan)
            changed[name] = jnp.zeros_like(poisoned).at[order].set(poisoned)
        changed["block_tables"] = jnp.asarray(order[tables], jnp.int32)
    else:
        real = np.arange(BLOCKS * SIZE) < np.asarray(LENS)[:, None]
        for name in cache_of(given):
            changed[name] = jnp.where(real[:, :, None, None], given[name], jnp.nan)
    assert_same_bits(run(op, changed), expected)
    alone = values(op, lens=LENS[:1], return_lse=True, num_splits=splits, sliding_window=30)
    rows = 12 if op == "ragged_page_attention" else 1
    for name in alone.keys() & {"key", "value", "query"}:
        alone[name] = given[name][:1]
    alone |= {"block_tables": given["block_tables"][:1]} if "block_tables" in given else {}
    assert_same_bits([x[:rows] for x in run(op, alone)], [x[:rows] for x in expected])


@pytest.mark.parametrize("op", OPS)
def test_splits_are_those_asked_for_and_change_little(op):
    options = {"return_lse": True, "softmax_aux": jnp.asarray([[1.0, 0.5]]), "v_scale": 2.0}
    args = {n: make(op, values(op, num_splits=n, **options)) for n in (1, 3)}
    entry = harness.find_entry(op, "triton/gpu")
    cfg = entry.config.testing(args[1], "forward")
    found = {}
    for n, call in args.items():
        made = jax.make_jaxpr(lambda call: entry.fn(call, cfg)[0])(call)
        kernels = [e.params["launch"] for e in _triton_call.launches(made.jaxpr)]
        assert len(kernels) == (n > 1) + (2 if op == "ragged_page_attention" else 1)
        assert kernels[0].grid == (len(LENS) * GROUPS * n,)
        with _settings.override(interpret=True):
            found[n] = entry.fn(call, cfg)[0]
    for a, b in zip(found[1], found[3], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


# Tiles of heads, and narrow pages


@pytest.mark.parametrize(
    "op", [pytest.param("page_attention", marks=pytest.mark.slow), "ragged_page_attention"]
)
def test_many_heads_of_one_key_head_make_several_tiles(op):
    args = make(op, values(op, heads=80, groups=1, return_lse=True))
    entry, spec = harness.find_entry(op, "triton/gpu"), kernel_registry.spec(op)
    made = harness.solve(spec, args)
    cfg = harness.configs(entry, args, "testing")
    harness.assert_close_to_oracle(harness.run_entry(entry, made, cfg), made)


@pytest.mark.parametrize("size", [pytest.param(1e-30, marks=pytest.mark.slow), 1e30])
def test_queries_of_any_size_meet_float8_pages(size):
    """They are multiplied in float16, which has no numbers of this size."""
    given = values("page_attention", return_lse=True)
    for name in cache_of(given):
        given[name] = given[name].astype(jnp.float8_e4m3fn)
    given["query"] = (given["query"] * size).astype(jnp.bfloat16)
    args = make("page_attention", given | {"softmax_scale": 1.0 / size})
    entry = harness.find_entry("page_attention", "triton/gpu")
    made = harness.solve(kernel_registry.spec("page_attention"), args)
    cfg = harness.configs(entry, args, "testing")
    harness.assert_close_to_oracle(harness.run_entry(entry, made, cfg), made)


@pytest.mark.parametrize("op", OPS)
def test_devices_without_float8_refuse_it(op):
    given = values(op)
    for name in cache_of(given):
        given[name] = given[name].astype(jnp.float8_e4m3fn)
    args, entry = make(op, given), harness.find_entry(op, "triton/gpu")
    target = lambda capability: _device.Target("gpu", "some", capability)
    assert "float8_e4m3fn" in entry.why_not(args, target("8.0"))
    assert entry.why_not(args, target("9.0")) is None
    assert entry.why_not(args, target("gfx942")) is None
    for name in cache_of(given):
        given[name] = given[name].astype(jnp.float8_e4m3fnuz)
    assert "float8_e4m3fnuz" in entry.why_not(make(op, given), target("9.0"))
