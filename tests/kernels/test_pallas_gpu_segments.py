"""Segment ids and lengths in attention for Hopper: blocks, numbers, padding, and lowering."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _oracle
from ejkernel.kernels._pallas.gpu.flash_attention import config
from tests.backend import BACKEND
from tests.kernels import harness
from tests.kernels.test_pallas_gpu import (
    ENTRY,
    H200,
    SPEC,
    arrays,
    interpreted,
    make,
)
from tests.kernels.test_pallas_gpu_backward import late, lower, lowered
from tests.kernels.test_pallas_gpu_lowers import assert_lowers

pytestmark = pytest.mark.usefixtures("usable_mosaic_interpreter")


def ids(length, *runs, batch=1):
    """Runs of ids from 0 on, then padding; a negative run is padding."""
    row = np.full(length, -1, np.int32)
    at = 0
    for i, count in enumerate(runs):
        row[at : at + abs(count)] = i if count > 0 else -1
        at += abs(count)
    return np.stack([np.roll(row, 7 * b) for b in range(batch)])


def segments(q_ids, k_ids=None):
    k_ids = q_ids if k_ids is None else k_ids
    return {"q_segment_ids": np.int32(q_ids), "kv_segment_ids": np.int32(k_ids)}


def packed(q, k):
    return {"cum_seqlens_q": np.int32(q), "cum_seqlens_k": np.int32(k)}


# lengths, heads, key heads, head sizes and batch; options
CASES = {
    # forward: a masked block, one that all rows see, one of two segments
    "segments": ((240, 240), {"causal": True} | segments(ids(240, 30, 190))),
    # backward: masked blocks before and behind those that all keys meet; an empty sequence
    "packed": ((200, 300, 1, 1, 128, 128), packed([0, 10, 10, 200], [0, 20, 20, 290])),
}
INDEX = np.arange(200)[None]
SLOW = {
    "packed_causal": (
        (300, 200, 2, 1),
        {"causal": True, "sinks": 1.0} | packed([3, 60, 290], [0, 90, 180]),
    ),
    "packed_window": (
        (200, 260),
        {"sliding_window": (40, 9)} | packed([0, 150, 200], [0, 130, 250]),
    ),
    "rows": (
        (130, 200, 2, 1, 64, 64, 3),
        {"causal": True} | packed([0, 130, 130, 220], [0, 100, 100, 300]),
    ),
    "unordered": ((200, 200), segments(INDEX * 7 // 100 % 3 - (INDEX > 190))),
    "shuffled": (
        (200, 150, 2, 1),
        {"causal": True} | segments(INDEX * 13 % 5 - 1, INDEX[:, :150] * 7 % 4 - 1),
    ),
    "both": (
        (260, 260, 1, 1, 128, 128),
        {"causal": True, "sliding_window": 90}
        | packed([0, 100, 250], [0, 100, 250])
        | segments(ids(260, 50, -5, 150)),
    ),
    "rows_and_segments": (
        (140, 140, 1, 1, 64, 64, 2),
        packed([0, 140, 200], [0, 120, 180]) | segments(ids(140, 70, 60, batch=2)),
    ),
    "cap": ((200, 200), {"causal": True, "logits_soft_cap": 3.0} | segments(ids(200, 150, 30))),
    "nothing": ((70, 70), segments(np.full((1, 70), -1))),
    "long": ((520, 520, 1, 1, 128, 128), {"causal": True} | segments(ids(520, 128, 130, 255))),
    "full": ((400, 520), segments(ids(400, 180, 200), ids(520, 260, 250))),
    "values": (
        (130, 200, 1, 1, 192, 128),
        {"causal": True} | segments(ids(130, 60, 60), ids(200, 99, 99)),
    ),
}


def values_of(case):
    sizes, options = case
    made = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    made |= {
        n: x.astype(jnp.int32) for n, x in made.items() if n in ("q_segment_ids", "kv_segment_ids")
    }
    made = arrays(*sizes) | made
    if (sink := made.pop("sinks", None)) is not None:
        made["softmax_aux"] = jnp.full((made["query"].shape[2], 1), sink)
    return made


def is_padding(args):
    """Of queries and of keys, [b, t] and [b, s]."""
    from ejkernel.xla_utils import positions

    batch = args.query.shape[0]
    pairs = positions.of_attention(args).ids
    for side in range(2):
        real = np.all([np.broadcast_to(p[side] >= 0, (batch, p[side].shape[1])) for p in pairs], 0)
        yield jnp.asarray(~real)


def spoiled(made):
    """The call with nan in everything that belongs to padding, cotangents of outputs as well."""
    queries, keys = (x[:, :, None, None] for x in is_padding(made.args))
    put = lambda x, where: jnp.where(where, jnp.nan, x).astype(x.dtype)
    args = made.args
    changed = {"query": put(args.query, queries)}
    changed |= {"key": put(args.key, keys), "value": put(args.value, keys)}
    dout, *rest = made.cotangents
    return dataclasses.replace(
        made, args=args.with_arrays(changed), cotangents=(put(dout, queries), *rest)
    )


def check(case, kind="testing"):
    made = harness.solve(SPEC, make(values_of(case)))
    cfg = harness.configs(ENTRY, made.args, kind)
    with jax.numpy_rank_promotion("raise"):
        actual = harness.run_entry(ENTRY, spoiled(made), cfg, compiler_options=harness.QUICK)
    if not actual.gradients:
        made = dataclasses.replace(made, oracle=dataclasses.replace(made.oracle, gradients={}))
    harness.assert_close_to_oracle(actual, made)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    """Forward and gradients, with nan in padding."""
    check(CASES[name])


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("name", [*CASES, "rows_and_segments", "values"])
def test_numbers_as_users_get_them(name):
    """Warpgroups take and give registers by the configuration: an interpreter has none."""
    check((CASES | SLOW)[name], "heuristic")


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_numbers(name):
    check(SLOW[name])


@interpreted
@pytest.mark.slow
def test_rows_whose_reference_is_in_a_later_block():
    """Keys of the first visited block belong to others; their scores are far below."""
    sizes, options = (128, 256), segments(np.zeros((1, 128), int), ids(256, 250))
    values = values_of((sizes, options))
    near = jnp.where(jnp.arange(256) < 190, 1.0, 40.0)[None, :, None, None]
    values["key"] = (values["key"] * near).astype(jnp.bfloat16)
    args = make(values)
    made = _oracle.solve(SPEC, args, (), harness.QUICK)
    outputs, _ = jax.jit(lambda args: ENTRY.fn(args, config.testing(args, "forward")))(args)
    harness.assert_close_to_oracle(_oracle.answer(SPEC, args, outputs, {}), made)


@interpreted
@pytest.mark.slow
@pytest.mark.skipif(BACKEND == "gpu", reason="the interpreter finds races")
def test_no_races():
    from ejkernel import _contexts

    with _contexts.detect_races(True):
        check(CASES["segments"])
        check(CASES["packed"])


@interpreted
@pytest.mark.slow
def test_vmap():
    """Packed sequences of each call stay its own."""
    values = {n: x for n, x in arrays(70, 70, batch=3).items() if n != "return_lse"}
    cum = jnp.asarray([[0, 20, 70], [0, 60, 64], [5, 5, 9]], jnp.int32)
    one = lambda cum, *xs: make(
        dict(zip(values, (x[None] for x in xs), strict=True))
        | {"cum_seqlens_q": cum, "cum_seqlens_k": cum, "causal": True, "return_lse": True}
    )

    cfg = config.testing(one(cum[0], *(x[0] for x in values.values())), "forward")
    kernel = lambda *given: ENTRY.fn(one(*given), cfg)[0]
    found = jax.jit(jax.vmap(kernel))(cum, *values.values())
    for i in range(3):
        expected = SPEC.reference_fn()(one(cum[i], *(x[i] for x in values.values())))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.float32(x[i]), np.float32(y), atol=0.03)


# Lowering

FORMS = {
    "segments": segments(ids(300, 100, 100, batch=2), ids(333, 40, 200, batch=2)),
    "rows": packed([0, 300, 500], [0, 200, 533]),
    "both": packed([0, 300, 500], [0, 200, 533])
    | segments(ids(300, 100, 100, batch=2), ids(333, 40, 200, batch=2)),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "everything": {"causal": True, "sliding_window": 100, "logits_soft_cap": 20.0, "sinks": 1.0},
}


def shapes(d, form, options):
    e = min(d, 128)
    case = ((300, 333, 4, 2, d, e, 2), FORMS[form] | OPTIONS[options])
    return jax.eval_shape(lambda: make(values_of(case)))


@lowered
def test_forward_lowers():
    assert_lowers(shapes(128, "both", "everything"), 0)


@lowered
@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [64, 128, 192])
def test_forward_of_every_form_lowers(d, form, options):
    args = shapes(d, form, options)
    for number in range(len(config.candidates(args, "forward", H200))):
        assert_lowers(args, number)


@lowered
@pytest.mark.parametrize(
    "name", late([f"{f}-{o}" for f in FORMS for o in OPTIONS], ("both-causal",))
)
def test_backward_lowers(name):
    for d in (128,) if name == "both-causal" else (64, 128):
        args = shapes(d, *name.split("-"))
        for cfg in config.candidates(args, "backward", H200)[:1]:
            assert lower(args, cfg).count("mosaic_gpu") >= 2


def test_positions_are_refused():
    values = arrays(64, 64) | {"q_positions": jnp.arange(64)[None]}
    assert "does not honour" in str(ENTRY.why_not(make(values), H200))


@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_program_asks_for_registers_that_it_does_not_have(direction, d):
    """A program has 64,512 registers with three warpgroups; for more it would wait for ever."""
    values = arrays(256, 256, d=d, e=min(d, 128)) | segments(ids(256, 100, 100))
    made = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in values.items()}
    found = config.candidates(make(made), direction, H200)
    warpgroups = lambda cfg: 2 if direction == "backward" else cfg.warpgroups
    assert found
    for cfg in found:
        assert cfg.load_registers >= (24 if direction == "backward" else 32)
        assert cfg.lacks_registers(warpgroups(cfg)) is None
    short = dataclasses.replace(found[-1], block_q=64, registers=240, load_registers=32)
    if direction == "backward" and d == 128:
        assert "a program has 64512" in config.misfit(make(made), direction, short, H200)
