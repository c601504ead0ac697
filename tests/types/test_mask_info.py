"""`MaskInfo.materialize` against one pair at a time, written from the specification."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def find(cu, token):
    """(sequence, index, length) of a packed token, or None outside every sequence."""
    for n in range(len(cu) - 1):
        if cu[n] <= token < cu[n + 1]:
            return n, token - cu[n], cu[n + 1] - cu[n]
    return None


@dataclasses.dataclass(kw_only=True)
class Slow:
    """The rules for one pair, on NumPy arrays and Python numbers."""

    b: int
    t: int
    s: int
    mask: np.ndarray | None = None
    ids: tuple | None = None
    positions: tuple = (None, None)
    lengths: tuple = (None, None)
    cu: tuple | None = None
    causal: bool = False
    windows: tuple = ()
    chunks: tuple = ()

    def placed(self, b, i, j):
        """(pos_q, pos_k), or None when lengths hide the pair."""
        if self.cu is not None:
            cu_q, cu_k = self.cu
            q, k = find(cu_q, i), find(cu_k, j)
            if q is None or k is None or q[0] != k[0]:
                return None
            pos_q, pos_k = k[2] - q[2] + q[1], k[1]
        else:
            q_lengths, kv_lengths = self.lengths
            len_q = self.t if q_lengths is None else int(q_lengths[b])
            len_k = self.s if kv_lengths is None else int(kv_lengths[b])
            if i >= len_q or j >= len_k:
                return None
            pos_q, pos_k = len_k - len_q + i, j
        if self.positions[0] is not None:
            pos_q = int(np.broadcast_to(self.positions[0], (self.b, self.t))[b, i])
        if self.positions[1] is not None:
            pos_k = int(np.broadcast_to(self.positions[1], (self.b, self.s))[b, j])
        return pos_q, pos_k

    def sees(self, b, h, i, j):
        if self.mask is not None:
            full = np.broadcast_to(self.mask, (self.b, self.heads, self.t, self.s))
            if not full[b, h, i, j]:
                return False
        if self.ids is not None:
            id_q, id_k = self.ids[0][b, i], self.ids[1][b, j]
            if id_q != id_k or id_q < 0 or id_k < 0:
                return False
        placed = self.placed(b, i, j)
        if placed is None:
            return False
        pos_q, pos_k = placed
        if self.causal and pos_k > pos_q:
            return False
        for left, right in self.windows:
            if left >= 0 and pos_k < pos_q - left:
                return False
            if right >= 0 and pos_k > pos_q + right:
                return False
        return all(pos_q // size == pos_k // size for size in self.chunks)

    @property
    def heads(self):
        return 1 if self.mask is None else self.mask.shape[1]

    def dense(self):
        out = np.zeros((self.b, self.heads, self.t, self.s), bool)
        for index in np.ndindex(out.shape):
            out[index] = self.sees(*index)
        return out


def build(slow):
    """The same mask through the public constructors."""
    if slow.cu is not None:
        info = MaskInfo.from_cu_seqlens(*map(np.array, slow.cu))
    elif slow.lengths[0] is not None:
        info = MaskInfo.from_lengths(*slow.lengths)
    elif slow.ids is not None:
        info = MaskInfo.from_segments(*slow.ids)
    elif slow.mask is not None:
        info = MaskInfo.from_attention_mask(slow.mask)
    else:
        info = MaskInfo()
    if slow.lengths[0] is None and slow.lengths[1] is not None:
        info = info.apply_kv_lengths(slow.lengths[1])
    if slow.ids is not None and info.q_segment_ids is None:
        q_ids, kv_ids = map(jnp.asarray, slow.ids)
        info = dataclasses.replace(info, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    if slow.mask is not None and info.attention_mask is None:
        info = dataclasses.replace(info, attention_mask=jnp.asarray(slow.mask))
    info = info.apply_positions(*slow.positions)
    if slow.causal:
        info = info.apply_causal()
    for window in slow.windows:
        info = info.apply_sliding_window(window)
    for size in slow.chunks:
        info = info.apply_chunked(size, q_length=slow.t, kv_length=slow.s)
    return info


RNG = np.random.default_rng(0)
Q_IDS, KV_IDS = RNG.integers(-1, 3, (2, 5)), RNG.integers(-1, 3, (2, 8))
SORTED_IDS = (np.array([[0, 0, 1, 1, -1]] * 2), np.array([[-1, 0, 0, 0, 1, 1, 1, -1]] * 2))
LENGTHS = (np.array([5, 3]), np.array([4, 8]))
CU = ((0, 3, 3, 5, 6), (0, 3, 4, 8, 8))  # an empty query side, an empty key side, tokens outside
HUGE_IDS = (np.full((2, 5), 2**31 - 1) - Q_IDS % 2, np.full((2, 8), 2**31 - 1) - KV_IDS % 2)
Q_POSITIONS = np.array([[-3, -1, 0, 4, 9], [7, 2, 2, 5, 1]])
KV_POSITIONS = np.array([[-4, -2, 0, 1, 2, 5, 9, 10]])
HEAD_MASK = RNG.integers(0, 4, (2, 3, 5, 8)) > 0
KEY_PADDING = np.array([[1, 1, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1]], bool)[:, None, None, :]

CASES = {
    "nothing": Slow(b=1, t=5, s=8),
    "causal": Slow(b=1, t=5, s=8, causal=True),
    "causal_more_queries": Slow(b=1, t=8, s=5, causal=True),
    "window": Slow(b=1, t=5, s=8, windows=((2, 1),)),
    "window_left_only": Slow(b=1, t=5, s=8, windows=((1, -1),)),
    "windows_intersect": Slow(b=1, t=5, s=8, windows=((3, 1), (1, -1), (-1, 2))),
    "causal_window": Slow(b=1, t=5, s=8, causal=True, windows=((2, 2),)),
    "segments": Slow(b=2, t=5, s=8, ids=(Q_IDS, KV_IDS)),
    "segments_causal": Slow(b=2, t=5, s=8, ids=(Q_IDS, KV_IDS), causal=True),
    "segments_kv_lengths": Slow(
        b=2, t=5, s=8, ids=SORTED_IDS, lengths=(None, LENGTHS[1]), causal=True
    ),
    "lengths": Slow(b=2, t=5, s=8, lengths=LENGTHS),
    "lengths_causal": Slow(b=2, t=5, s=8, lengths=LENGTHS, causal=True),
    "lengths_window": Slow(b=2, t=5, s=8, lengths=LENGTHS, windows=((1, 2),)),
    "no_queries": Slow(b=2, t=5, s=8, lengths=(np.array([0, 5]), np.array([8, 1])), causal=True),
    "no_keys": Slow(b=2, t=5, s=8, lengths=(np.array([5, 5]), np.array([0, 3])), causal=True),
    "kv_lengths_causal": Slow(b=2, t=2, s=8, lengths=(None, np.array([1, 6])), causal=True),
    "cu": Slow(b=1, t=7, s=9, cu=CU),
    "cu_causal": Slow(b=1, t=7, s=9, cu=CU, causal=True),
    "cu_window": Slow(b=1, t=7, s=9, cu=CU, windows=((1, 0),)),
    "cu_segments": Slow(
        b=1, t=7, s=9, cu=CU, ids=(RNG.integers(-1, 2, (1, 7)), RNG.integers(-1, 2, (1, 9)))
    ),
    "positions": Slow(b=2, t=5, s=8, positions=(Q_POSITIONS, KV_POSITIONS), causal=True),
    "positions_window": Slow(
        b=2, t=5, s=8, positions=(Q_POSITIONS, KV_POSITIONS), windows=((2, 3),)
    ),
    "positions_one_side": Slow(b=2, t=5, s=8, positions=(Q_POSITIONS, None), causal=True),
    "positions_lengths": Slow(
        b=2, t=5, s=8, positions=(None, KV_POSITIONS), lengths=LENGTHS, causal=True
    ),
    "positions_cu": Slow(
        b=1, t=7, s=9, cu=CU, positions=(RNG.integers(0, 9, (1, 7)), None), causal=True
    ),
    "head_mask": Slow(b=2, t=5, s=8, mask=HEAD_MASK, causal=True),
    "key_padding": Slow(b=2, t=5, s=8, mask=KEY_PADDING, windows=((3, 3),)),
    "mask_and_segments": Slow(b=2, t=5, s=8, mask=HEAD_MASK, ids=(Q_IDS, KV_IDS)),
    "chunk": Slow(b=1, t=5, s=8, chunks=(3,)),
    "chunk_more_queries": Slow(b=1, t=8, s=5, chunks=(2,)),
    "chunk_key_padding": Slow(b=2, t=5, s=8, mask=KEY_PADDING, chunks=(3,)),
    "chunk_causal_window": Slow(b=1, t=5, s=8, causal=True, windows=((1, 1),), chunks=(4,)),
    "chunk_segments": Slow(b=2, t=5, s=8, ids=(Q_IDS, KV_IDS), chunks=(3,)),
    "chunk_segments_causal": Slow(b=2, t=5, s=8, ids=SORTED_IDS, causal=True, chunks=(3,)),
    "chunk_huge_ids": Slow(b=2, t=5, s=8, ids=HUGE_IDS, chunks=(2,)),
    "chunk_twice": Slow(b=1, t=5, s=8, chunks=(4, 3)),
    "chunk_of_all": Slow(b=1, t=8, s=5, chunks=(2**40,)),
    "chunk_lengths": Slow(b=2, t=5, s=8, lengths=LENGTHS, causal=True, chunks=(2,)),
    "chunk_lengths_segments": Slow(b=2, t=5, s=8, lengths=LENGTHS, ids=SORTED_IDS, chunks=(3,)),
    "chunk_cu": Slow(b=1, t=7, s=9, cu=CU, chunks=(2,)),
    "chunk_cu_causal": Slow(b=1, t=7, s=9, cu=CU, causal=True, windows=((2, 2),), chunks=(3,)),
    "chunk_positions": Slow(b=2, t=5, s=8, positions=(Q_POSITIONS, KV_POSITIONS), chunks=(3,)),
}


@pytest.mark.parametrize("name", CASES)
def test_materialize_follows_the_rules(name):
    slow = CASES[name]
    got = build(slow).materialize(slow.t, slow.s)
    assert got.dtype == jnp.bool_
    np.testing.assert_array_equal(got, slow.dense())


def test_the_cases_are_not_trivial():
    ones = {name: slow.dense().mean() for name, slow in CASES.items() if name != "nothing"}
    assert all(0.0 < mean < 1.0 for mean in ones.values()), ones


@pytest.mark.parametrize(
    "name", ["cu_causal", "chunk_segments_causal", "chunk_lengths", "chunk_cu_causal"]
)
def test_traced_arrays_give_the_same_mask(name):
    slow = CASES[name]
    got = jax.jit(lambda info: info.materialize(slow.t, slow.s))(build(slow))
    np.testing.assert_array_equal(got, slow.dense())


def test_constructors_and_chunks_work_on_traced_arrays():
    @jax.jit
    def mask(cum_q, cum_k):
        info = MaskInfo.from_cu_seqlens(cum_q, cum_k).apply_causal()
        return info.apply_chunked(3, q_length=7, kv_length=9).materialize()

    slow = dataclasses.replace(CASES["chunk_cu"], causal=True, chunks=(3,))
    np.testing.assert_array_equal(mask(*map(np.array, slow.cu)), slow.dense())


def test_x64_changes_nothing():
    slow = CASES["chunk_lengths_segments"]
    with jax.enable_x64(True):
        got = jax.jit(lambda: build(slow).materialize(5, 8))()
        assert got.dtype == jnp.bool_
    np.testing.assert_array_equal(got, slow.dense())


def test_vmap_over_the_object():
    ids = jnp.asarray(Q_IDS, jnp.int32)[:, None]  # [2, 1, 5]
    masks = jax.jit(jax.vmap(lambda x: MaskInfo.from_segments(x).apply_causal().materialize()))(ids)
    expected = Slow(b=2, t=5, s=5, ids=(Q_IDS, Q_IDS), causal=True).dense()
    np.testing.assert_array_equal(masks[:, 0], expected)


def test_chunks_build_nothing_dense():
    t, s = 64, 96
    info = MaskInfo.from_segments(np.zeros((1, t), np.int32), np.zeros((1, s), np.int32))
    jaxpr = jax.make_jaxpr(lambda i: i.apply_causal().apply_chunked(8))(info)
    sizes = [v.aval.size for e in jaxpr.jaxpr.eqns for v in e.outvars]
    assert max(sizes) == t + s


def test_chunked_ids_keep_the_order_of_sorted_ids():
    ids = np.array([[0, 0, 0, 0, 3, 3, 3, -1]])
    chunked = jax.jit(lambda x: MaskInfo.from_segments(x).apply_chunked(2))(ids)
    got = np.asarray(chunked.q_segment_ids)
    assert got.dtype == np.int32
    assert (np.diff(got[0]) > 0).tolist() == [False, True, False, True, False, True, False]
    assert got[0, 7] == -1


def test_is_a_pytree_with_static_options():
    info = MaskInfo.from_segments(Q_IDS, KV_IDS).apply_causal().apply_sliding_window((3, -1))
    leaves, treedef = jax.tree.flatten(info)
    assert [leaf.shape for leaf in leaves] == [(2, 5), (2, 8)]
    back = jax.tree.unflatten(treedef, leaves)
    assert (back.causal, back.sliding_window) == (True, (3, None))
    np.testing.assert_array_equal(back.materialize(), info.materialize())
    # JAX rebuilds it with whatever it carries: specs, None, strings
    odd = jax.tree.unflatten(treedef, [object(), "spec"])
    assert odd.kv_segment_ids == "spec"
    assert jax.tree.map(lambda _: None, info).q_segment_ids is None
    assert jax.tree.structure(info.apply_causal()) == treedef
    assert jax.tree.structure(info.apply_sliding_window(1)) != treedef
    assert jax.jit(lambda x: x)(info).sliding_window == (3, None)
    shapes = jax.eval_shape(lambda x: x.apply_chunked(2), info)
    assert shapes.q_segment_ids.shape == (2, 5)
    assert hash(info) == hash(info)


def test_apply_returns_new_objects():
    info = MaskInfo()
    info.apply_causal()
    info.apply_sliding_window(2)
    info.apply_chunked(2, q_length=4, kv_length=4)
    assert (info.causal, info.sliding_window, info.q_segment_ids) == (False, None, None)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([4], (4, 4)),
        ([(4, -1)], (4, None)),
        ([(None, 0)], (None, 0)),
        ([-1], None),
        ([(-1, -1), 3], (3, 3)),
        ([(5, 2), (3, 4)], (3, 2)),
        ([(3, -1), (-1, 2)], (3, 2)),
        ([2**40], None),
        ([np.int64(2)], (2, 2)),
    ],
)
def test_windows(windows, expected):
    info = MaskInfo()
    for window in windows:
        info = info.apply_sliding_window(window)
    assert info.sliding_window == expected
    assert all(side is None or type(side) is int for side in info.sliding_window or ())


@pytest.mark.parametrize("window", [-2, (1, -3), (1, 2, 3), 1.5, True, "2"])
def test_bad_windows_are_refused(window):
    with pytest.raises(ValueError, match="`window` must be a static int"):
        MaskInfo().apply_sliding_window(window)


def test_one_cumulative_array_means_both_when_lengths_are_equal():
    slow = Slow(b=1, t=7, s=7, cu=((0, 2, 2, 5, 6), (0, 2, 2, 5, 6)), causal=True)
    info = MaskInfo.from_cu_seqlens(np.array(slow.cu[0])).apply_causal()
    np.testing.assert_array_equal(info.materialize(7, 7), slow.dense())
    only_k = MaskInfo(cum_seqlens_k=info.cum_seqlens_q, causal=True)
    np.testing.assert_array_equal(only_k.materialize(7, 7), slow.dense())
    with pytest.raises(ValueError, match="`cum_seqlens_k` is needed when T != S; got T=7, S=9"):
        info.materialize(7, 9)


def test_shorter_of_two_kv_lengths_counts():
    info = MaskInfo.from_lengths(*LENGTHS).apply_kv_lengths(np.array([6, 2])).apply_causal()
    slow = Slow(b=2, t=5, s=8, lengths=(LENGTHS[0], np.array([4, 2])), causal=True)
    np.testing.assert_array_equal(info.materialize(5, 8), slow.dense())


def test_nonzero_masks_and_default_lengths():
    mask = np.array([[[[2, 0, -1]]]])
    assert MaskInfo.from_attention_mask(mask).materialize(1).tolist() == [[[[True, False, True]]]]
    assert MaskInfo.from_lengths(np.array([2])).kv_lengths.tolist() == [2]


def test_resolve_positions():
    q_pos, kv_pos = MaskInfo.from_lengths(*LENGTHS).resolve_positions(5, 8)
    assert q_pos.tolist() == [[-1, 0, 1, 2, 3], [5, 6, 7, 8, 9]]
    assert kv_pos.tolist() == [list(range(8))]


IDS = np.zeros((2, 4), np.int32)
REFUSALS = {
    "mask rank 2": (
        lambda: MaskInfo.from_attention_mask(np.ones((2, 4), bool)),
        r"mask\[:, None, None, :\].*mask\[None, None\]",
    ),
    "mask rank 3": (lambda: MaskInfo.from_attention_mask(np.ones((2, 4, 4), int)), "rank 4"),
    "offsets from 1": (lambda: MaskInfo.from_cu_seqlens([1, 4]), "`cum_q` must start at 0; got 1"),
    "ids rank": (lambda: MaskInfo.from_segments(IDS[0]), r"`q_ids` must be \[b t\].*\(4,\)"),
    "ids batch": (lambda: MaskInfo.from_segments(IDS, np.zeros((3, 4), int)), "batch size"),
    "cu sizes": (
        lambda: MaskInfo.from_cu_seqlens(np.array([0, 1]), np.array([0, 1, 2])),
        r"got \(2,\) and \(3,\)",
    ),
    "lengths sizes": (lambda: MaskInfo.from_lengths(np.array([1]), np.array([1, 2])), "batch size"),
    "chunk size": (lambda: MaskInfo.from_segments(IDS).apply_chunked(0), "`chunk_size`.*got 0"),
    "chunk length": (lambda: MaskInfo().apply_chunked(2, q_length=3), "Pass `kv_length=`"),
    "unknown length": (
        lambda: MaskInfo.from_attention_mask(np.ones((2, 1, 1, 4), bool)).materialize(),
        "Pass `q_length=`",
    ),
    "other length": (lambda: MaskInfo.from_segments(IDS).materialize(5), "'q_length': 5"),
    "ids alone": (lambda: MaskInfo(q_segment_ids=jnp.asarray(IDS)).materialize(4, 4), "together"),
    "packed batch": (
        lambda: dataclasses.replace(
            MaskInfo.from_segments(IDS), cum_seqlens_q=jnp.array([0, 4])
        ).materialize(),
        "packed",
    ),
    "packed lengths": (
        lambda: MaskInfo.from_cu_seqlens(np.array([0, 4])).apply_kv_lengths(np.array([1])),
        "cum_seqlens_q/k",
    ),
    "both kinds of length": (
        lambda: MaskInfo(
            cum_seqlens_q=jnp.array([0, 4]), q_lengths=jnp.array([1])
        ).resolve_positions(4, 4),
        "not both",
    ),
    "lengths after chunks": (
        lambda: MaskInfo.from_segments(IDS).apply_chunked(2).apply_kv_lengths(np.array([1, 2])),
        "before `apply_chunked`",
    ),
    "positions after chunks": (
        lambda: MaskInfo.from_segments(IDS).apply_chunked(2).apply_positions(IDS),
        "before `apply_chunked`",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_to_do(name):
    call, match = REFUSALS[name]
    with pytest.raises(ValueError, match=match):
        call()


def test_float_ids_are_a_type_error():
    with pytest.raises(TypeError, match="`q_ids` must hold integers; got float32"):
        MaskInfo.from_segments(np.ones((1, 2), np.float32))


def test_visualize_draws_blocks_of_pairs():
    info = MaskInfo().apply_causal().apply_sliding_window((5, -1))
    assert info.visualize(8, 12, max_rows=4, max_cols=6).splitlines() == [
        "8 queries x 12 keys, batch 0, head 0; a character is 2 x 2: # all attend, + some, . none",
        "##+...",
        "+##+..",
        ".+##+.",
        "..+##+",
    ]


@pytest.mark.parametrize("batch", [0, 1])
def test_visualize_one_pair_a_character_is_the_mask(batch):
    mask = np.random.default_rng(0).random((2, 2, 7, 9)) < 0.8
    info = dataclasses.replace(
        MaskInfo.from_attention_mask(mask),
        q_lengths=jnp.asarray([5, 7], jnp.int32),
        kv_lengths=jnp.asarray([9, 6], jnp.int32),
        q_segment_ids=jnp.asarray([[0, 0, 0, 1, 1, 1, -1]], jnp.int32),
        kv_segment_ids=jnp.asarray([[0, 0, 1, 1, 1, 1, 1, 0, -1]], jnp.int32),
    ).apply_causal()
    expected = np.asarray(info.materialize())[batch, 1]
    _, *rows = info.visualize(batch=batch, head=1).splitlines()
    assert ["".join(".#"[x] for x in row) for row in expected.astype(int)] == rows
    assert expected.any()


def test_visualize_packed_sequences_and_long_masks():
    info = MaskInfo.from_cu_seqlens([0, 3, 3, 5]).apply_causal()
    assert info.visualize(6, 6).splitlines()[1:] == [
        "#.....",
        "##....",
        "###...",
        "...#..",
        "...##.",
        "......",
    ]
    long = MaskInfo().apply_causal().visualize(4096, 4096).splitlines()
    assert (len(long), {len(row) for row in long[1:]}) == (33, {64})
    assert long[1] == "++" + 62 * "."
    assert long[-1] == 62 * "#" + "++"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 0}, "`max_rows` must be an int >= 1; got 0"),
        ({"max_cols": 1.5}, "`max_cols` must be an int >= 1"),
        ({"batch": 2}, r"`batch` must be in \[0, 2\); got 2"),
        ({"head": -1}, "`head` must be in"),
        ({"q_length": None}, "q_length"),
    ],
)
def test_visualize_errors(options, message):
    info = MaskInfo.from_lengths([3, 4]).apply_causal()
    with pytest.raises(ValueError, match=message):
        info.visualize(**({"q_length": 4, "kv_length": 4} | options))
