"""`ring_attention` over several devices: what `flash_attention` gives on the gathered arrays."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import _settings
from ejkernel.aot import _targets, _xla_gpu
from ejkernel.callib import _pallas, _triton_call
from ejkernel.callib._triton_compile import GpuTarget
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._cudnn.flash_attention import private
from ejkernel.kernels._ring import gather, schedule
from ejkernel.modules import flash_attention, from_zigzag, ring_attention, to_zigzag
from tests import host
from tests.kernels.harness import QUICK

HEADS, GROUPS, TOKENS = 4, 2, 48
RING = P(None, "ring")


def make_mesh(devices, kind=AxisType.Auto):
    return jax.make_mesh((devices,), ("ring",), axis_types=(kind,), devices=jax.devices()[:devices])


def arrays(t=TOKENS, s=TOKENS, groups=GROUPS, batch=2):
    keys = jax.random.split(jax.random.key(3), 5)
    return {
        "query": jax.random.normal(keys[0], (batch, t, HEADS, 8)),
        "key": jax.random.normal(keys[1], (batch, s, groups, 8)),
        "value": jax.random.normal(keys[2], (batch, s, groups, 12)),
        "bias": jax.random.normal(keys[3], (batch, HEADS, t, s)),
        "softmax_aux": jax.random.normal(keys[4], (HEADS, 2)),
    }


def segments(length=TOKENS):
    ids = np.repeat([[0, 1, 2, -1], [0, 0, 3, 4]], length // 4, axis=1)
    return ids.astype(np.int32)


@dataclasses.dataclass
class Split:
    """A call over the devices of a mesh, with arrays in their own order outside."""

    devices: int
    layout: str = "contiguous"
    strategy: str = "ring"

    def move(self, f, xs):
        axes = {"query": 1, "key": 1, "value": 1, "q_segment_ids": 1, "kv_segment_ids": 1}
        axes |= {"bias": 2, "attention_mask": 2, "out": 1, "lse": 2}
        return {
            n: f(x, self.devices, axes[n]) if n in axes and x.shape[axes[n]] > 1 else x
            for n, x in xs.items()
        }

    def __call__(self, xs, **options):
        zigzag = self.layout == "zigzag"
        xs = self.move(to_zigzag, xs) if zigzag else xs
        lse = options.get("return_lse", False)
        out = ring_attention(
            **xs,
            **options,
            strategy=self.strategy,
            layout=self.layout,
            mesh=make_mesh(self.devices),
            in_specs=(RING,) * 3,
            out_specs=(RING, P(None, None, "ring")) if lse else RING,
        )
        named = dict(zip(("out", "lse"), out if lse else (out,), strict=False))
        return self.move(from_zigzag, named) if zigzag else named


def whole(xs, **options):
    out = flash_attention(**xs, **options)
    return dict(zip(("out", "lse"), out if options.get("return_lse") else (out,), strict=False))


def answers(fn, xs, wanted, **options):
    """Outputs, and gradients of what is wanted, in one program."""

    def run(given, rest):
        outs = fn(given | rest, **options)
        return sum((jnp.where(jnp.isfinite(x), x, 0) ** 2).sum() for x in outs.values()), outs

    given = {n: x for n, x in xs.items() if n in wanted}
    rest = {n: x for n, x in xs.items() if n not in wanted}
    program = jax.jit(jax.value_and_grad(run, has_aux=True), compiler_options=QUICK)
    (_, outs), grads = program(given, rest)
    return outs | {f"d{n}": x for n, x in grads.items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        seen = np.isfinite(e)
        np.testing.assert_array_equal(np.isneginf(actual[name]), np.isneginf(e), name)
        error = np.abs(np.where(seen, actual[name] - e, 0)).max()
        assert error <= 3e-6 * max(np.abs(np.where(seen, e, 0)).max(), 1.0), (name, error)


QKV = ("query", "key", "value")
MASKED = np.arange(TOKENS)[None, None, None] % 5 != 2
CASES = {
    "causal": (Split(4), QKV, {"causal": True}),
    "zigzag_everything": (
        Split(4, "zigzag"),
        (*QKV, "bias", "softmax_aux"),
        {"causal": True, "return_lse": True, "logits_soft_cap": 4.0, "q_segment_ids": segments()},
    ),
    "zigzag_window": (
        Split(2, "zigzag"),
        (*QKV, "softmax_aux"),
        {"causal": False, "sliding_window": (9, 5), "q_segment_ids": segments()},
    ),
    "short_window_shared_bias": (
        Split(3),
        (*QKV, "bias"),
        {"causal": True, "sliding_window": 7, "return_lse": True},
    ),
    "eight_devices": (Split(8, "zigzag"), ("query",), {"causal": True, "return_lse": True}),
    "longer_keys_alibi": (
        Split(4),
        (*QKV, "bias"),
        {
            "causal": True,
            "attention_mask": MASKED,
            "alibi_slopes": host.asarray(np.linspace(0.1, 0.4, HEADS)),
        },
    ),
    "ulysses": (
        Split(4, "zigzag", "ulysses"),  # more devices than key heads
        (*QKV, "bias", "softmax_aux"),
        {"causal": True, "return_lse": True, "sliding_window": 9, "q_segment_ids": segments()},
    ),
    "ulysses_dropout": (
        Split(2, "zigzag", "auto"),
        QKV,
        {"causal": True, "dropout_prob": 0.3, "dropout_seed": 5},
    ),
    "allgather": (
        Split(4, "zigzag", "allgather"),
        (*QKV, "bias", "softmax_aux"),
        {"causal": True, "return_lse": True, "q_segment_ids": segments()},
    ),
}


# what others have too, in another mix
MIXED = ("zigzag_window", "longer_keys_alibi", "allgather")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in MIXED else []) for n in CASES]
)
def test_equals_flash_attention_on_the_gathered_arrays(name):
    split, wanted, options = host.to_jax(CASES[name])
    xs = arrays(t=24) if name == "longer_keys_alibi" else arrays()
    if name == "short_window_shared_bias":
        xs["bias"] = xs["bias"][:1, :, :1]
    arrays_given = {n: xs[n] for n in (*QKV, *wanted)}
    arrays_given |= {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in options.items() if n not in arrays_given}
    actual = answers(split, arrays_given, wanted, **static)
    assert_same(actual, answers(whole, arrays_given, wanted, **static))


INTERPRETED = {
    "contiguous": (Split(2), {"causal": True, "return_lse": True}),
    "zigzag_segments_window": (
        Split(2, "zigzag"),
        {"causal": True, "sliding_window": 9, "q_segment_ids": segments()},
    ),
    "ulysses": (Split(2, "contiguous", "ulysses"), {"causal": True, "logits_soft_cap": 4.0}),
    "allgather": (Split(2, "zigzag", "allgather"), {"causal": True}),
    "four_devices": (Split(4, "zigzag"), {"causal": True, "return_lse": True}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n == "four_devices" else []) for n in INTERPRETED],
)
def test_tritons_attention_inside_a_ring(name):
    pytest.importorskip("triton")
    split, options = host.to_jax(INTERPRETED[name])
    xs, wanted = arrays(), (*QKV, "softmax_aux")
    given = {n: xs[n] for n in wanted}
    given |= {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in options.items() if n not in given}
    expected = answers(whole, given, wanted, **static)
    with _settings.override(interpret=True):
        assert_same(answers(split, given, wanted, **static, platform="triton"), expected)


# A TPU's kernels in a ring: JAX's interpreter that watches memory waits for all devices wherever a
# kernel runs, and a ring skips pairs that other devices compute. The plain one takes no arrays that
# differ over a mesh by their type, so `check_vma` is off.
ON_TPU = {
    "contiguous": (2, {"causal": True}),
    "zigzag_segments_window": (
        2,
        {"causal": True, "layout": "zigzag", "sliding_window": 9, "q_segment_ids": segments()},
    ),
    "ulysses": (2, {"causal": True, "strategy": "ulysses", "logits_soft_cap": 4.0}),
    "allgather": (2, {"causal": True, "strategy": "allgather", "layout": "zigzag"}),
    "four_devices": (4, {"causal": False, "layout": "zigzag"}),
}


def local_answers(devices, options, platform, xs):
    """Outputs and gradients from inside a shard_map of the user's; sinks are those of all."""
    options = {"strategy": "ring", "layout": "contiguous"} | options
    zigzag, tokens = options["layout"] == "zigzag", dict.fromkeys((*QKV, "q_segment_ids"), 1)
    order = lambda f, xs: {
        n: f(x, devices, tokens[n]) if zigzag and n in tokens else x for n, x in xs.items()
    }
    ids = options.pop("q_segment_ids", None)
    xs = order(to_zigzag, xs | ({} if ids is None else {"q_segment_ids": ids}))
    specs = {n: RING if n in tokens else P() for n in xs}

    def local(xs):
        rest = {n: x for n, x in xs.items() if n == "q_segment_ids"}

        def loss(given):
            out = ring_attention(**given, **rest, **options, platform=platform)
            return (out**2).sum(), out

        given = {n: x for n, x in xs.items() if n not in rest}
        (_, out), grads = jax.value_and_grad(loss, has_aux=True)(given)
        grads["softmax_aux"] = jax.lax.psum(grads["softmax_aux"], "ring")
        return {"query": out}, grads

    out_specs = ({"query": RING}, {n: s for n, s in specs.items() if n != "q_segment_ids"})
    mapped = jax.shard_map(
        local, mesh=make_mesh(devices), in_specs=(specs,), out_specs=out_specs, check_vma=False
    )
    outs, grads = jax.jit(mapped, compiler_options=QUICK)(xs)
    found = order(from_zigzag, grads)
    return {"out": order(from_zigzag, outs)["query"]} | {f"d{n}": x for n, x in found.items()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "contiguous" else pytest.mark.slow) for n in ON_TPU],
)
def test_a_tpus_attention_inside_a_ring(name):
    devices, options = host.to_jax(ON_TPU[name])
    wanted = (*QKV, "softmax_aux")
    xs = {n: arrays()[n] for n in wanted}
    ids = {n: x for n, x in options.items() if n == "q_segment_ids"}
    static = {n: x for n, x in options.items() if n not in ("strategy", "layout", *ids)}
    expected = answers(whole, xs | ids, wanted, **static)
    with _settings.override(interpret=True):
        assert_same(local_answers(devices, options, "pallas", xs), expected)


@pytest.mark.parametrize("layout", ["contiguous", pytest.param("zigzag", marks=pytest.mark.slow)])
def test_a_ring_of_four_tpus_compiles(layout, without_jax_cache):
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(devices), ("ring",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16, sharding=NamedSharding(mesh, RING))

    def loss(*xs):
        options = {"strategy": "ring", "layout": layout, "platform": "pallas", "mesh": mesh}
        return ring_attention(*xs, causal=True, **options).astype(jnp.float32).sum()

    with jax.set_mesh(mesh), _pallas.compile_for_tpu():
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile().as_text()
    assert "collective-permute" in program
    assert "all-gather" not in program
    # one kernel forward and two backward, of pairs on the diagonal and of whole ones, at the first
    # step, in the loop, and at the last step
    assert program.count('custom_call_target="tpu_custom_call"') >= 6


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["triton", "pallas"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_ring_of_four_gpus_compiles(layout, platform, without_jax_cache):
    """By XLA for H200s, where JAX's plugin for CUDA is installed."""
    pytest.importorskip("triton")
    if reason := _xla_gpu.why_not(_targets.parse("cuda:sm_90"), "programs are"):
        pytest.skip(reason)
    mesh = Mesh(np.array(_xla_gpu.devices(4)), ("ring",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16, sharding=NamedSharding(mesh, RING))

    def loss(*xs):
        options = {"strategy": "ring", "layout": layout, "platform": platform, "mesh": mesh}
        return ring_attention(*xs, causal=True, **options).astype(jnp.float32).sum()

    with jax.set_mesh(mesh), _triton_call.lower_for(GpuTarget("cuda", 90)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x)
        program = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    assert "collective-permute" in program
    assert "all-gather" not in program
    name = {"triton": "triton_kernel_call", "pallas": "mosaic_gpu"}[platform]
    assert program.count(name) >= 4
    transfers = re.findall(
        r"(collective-permute-start\S*) = (.*?) collective-permute-done\(", program, re.DOTALL
    )
    assert transfers
    # each is under way while a block is computed: XLA has one at a time
    for name, meanwhile in transfers:
        assert re.search(r" (while|conditional|custom-call)\(", meanwhile), name


# cuDNN, which only a GPU has: the schedule around a stand-in for its two primitives


@pytest.fixture
def dense_cudnn(monkeypatch):
    def attend(xs, options):
        q, k, v = xs[:3]
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        x = jnp.einsum("bthd,bshd->bhts", q, k) * options["scale"]
        if options["mask_type"] == private.library().MaskType.CAUSAL:
            assert q.shape[1] == k.shape[1]
            x = jnp.where(np.tri(q.shape[1], dtype=bool), x, -jnp.inf)
        return x, v

    def forward(xs, options):
        x, v = attend(xs, options)
        return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(x, -1), v), jax.nn.logsumexp(x, -1)

    def backward(xs, lse, out, dout, options):
        # weights by the lse that is given, as cuDNN makes them
        stop = jax.lax.stop_gradient

        def parts(q, k, v):
            # the values in the scores' part are constants
            x, wide = attend((q, k, v), options)
            weights = stop(jnp.exp(x - lse[..., None]))
            delta = (out * dout).sum(-1).transpose(0, 2, 1)[..., None]
            dots = stop(jnp.einsum("bthe,bshe->bhts", dout, wide) - delta)
            seen = jnp.where(weights > 0, x, 0.0)
            made = jnp.einsum("bhts,bshe->bthe", weights, wide)
            return (weights * dots * seen).sum() + (made * dout).sum()

        return jax.grad(parts, (0, 1, 2))(*xs[:3])

    monkeypatch.setattr(private, "forward", forward)
    monkeypatch.setattr(private, "backward", backward)
    found = kernel_registry.list("ring_attention", "cudnn")
    return next(entry for entry in found if entry.name == "cudnn/gpu")


@pytest.mark.parametrize(
    ("devices", "layout"), [pytest.param(2, "contiguous", marks=pytest.mark.slow), (4, "zigzag")]
)
def test_cudnns_attention_inside_a_ring(dense_cudnn, devices, layout):
    spec, xs = kernel_registry.spec("ring_attention"), {n: arrays()[n] for n in QKV}

    def local(*blocks):
        given = dict(zip(QKV, blocks, strict=True)) | {"layout": layout, "strategy": "ring"}
        args = spec.canonicalize(spec.complete(given | {"causal": True}))
        assert "needs bfloat16 or float16" in dense_cudnn.why_not(args)  # and nothing before it
        outputs, residuals = dense_cudnn.fn(args, None)
        cotangents = tuple(2 * x for x in outputs)
        wanted = frozenset(QKV)
        grads = dense_cudnn.backward(args, None, outputs, residuals, cotangents, wanted)
        return outputs[0], *(grads[n] for n in QKV)

    mapped = jax.shard_map(local, mesh=make_mesh(devices), in_specs=RING, out_specs=RING)
    order = layout == "zigzag"
    stored = [to_zigzag(x, devices) if order else x for x in xs.values()]
    found = jax.jit(mapped, compiler_options=QUICK)(*stored)
    found = [from_zigzag(x, devices) if order else x for x in found]
    names = ("out", *(f"d{n}" for n in QKV))
    expected = answers(whole, xs, QKV, causal=True)
    assert_same(dict(zip(names, found, strict=True)), expected)


def test_what_cudnn_cannot_do_is_refused_by_reason():
    entry = next(e for e in kernel_registry.list("ring_attention", "cudnn"))
    spec = kernel_registry.spec("ring_attention")
    xs = {n: arrays()[n].astype(jnp.bfloat16) for n in QKV}
    values = xs | {"value": xs["value"][..., :8]}

    def why_not(direction="forward", **options):
        args = spec.canonicalize(spec.complete(values | options))
        return entry.why_not(args, direction=direction)

    assert why_not(causal=True) is None
    sinks = {"softmax_aux": arrays()["softmax_aux"].astype(jnp.bfloat16)}
    assert why_not(**sinks) is None  # the schedule counts them
    assert "softmax_aux" in why_not(**sinks, strategy="ulysses")
    assert "q_segment_ids" in why_not(q_segment_ids=jnp.asarray(segments()))
    assert "window" in why_not(causal=False, sliding_window=(2, 3))
    assert why_not(return_lse=True) is None
    assert "logsumexp" in why_not("backward", return_lse=True)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [("zigzag", "ring"), ("contiguous", "ulysses"), ("contiguous", "allgather")],
)
def test_equal_scores_average_what_was_seen(layout, strategy):
    value = jnp.arange(16.0).reshape(1, 16, 1, 1) * jnp.ones((1, 1, 2, 1))
    xs = {"query": jnp.zeros((1, 16, 2, 4)), "key": jnp.ones((1, 16, 2, 4)), "value": value}
    out = Split(2, layout, strategy)(xs, causal=True)["out"]
    np.testing.assert_allclose(out[0, :, 1, 0], np.arange(16) / 2, rtol=1e-6)


def test_half_precision_sums_in_float32():
    xs = {n: x.astype(jnp.float16) for n, x in arrays().items() if n in QKV}
    wide = answers(whole, {n: x.astype(jnp.float32) for n, x in xs.items()}, QKV, causal=True)
    actual = answers(Split(4), xs, QKV, causal=True)
    narrow = answers(whole, xs, QKV, causal=True)
    for name, expected in wide.items():
        error, allowed = (np.abs(np.float32(x[name]) - expected) for x in (actual, narrow))
        assert error.max() <= 2 * allowed.max() + 2**-11
        assert actual[name].dtype == jnp.float16


@pytest.mark.parametrize("checked", [True, False])
def test_inside_the_users_shard_map(checked):
    """Tokens, rows and heads are split; sinks are not, and their gradient is summed."""
    shape, names = (2, 2, 2), ("data", "ring", "model")
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 3)
    spec, sinks = P("data", "ring", "model"), P("model")
    xs = {n: x for n, x in arrays().items() if n != "bias"}
    specs = dict.fromkeys(QKV, spec) | {"softmax_aux": sinks}
    call = functools.partial(ring_attention, strategy="ring", sliding_window=30)

    def local(xs):
        def loss(xs):
            return jax.lax.psum((call(**xs) ** 2).sum(), names)

        return jax.value_and_grad(loss)(xs) if checked else loss(xs)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(P(), specs) if checked else P(),
        check_vma=checked,
    )
    actual = jax.jit(mapped, compiler_options=QUICK)(xs)

    def expected(xs):
        return (flash_attention(**xs, causal=True, sliding_window=30) ** 2).sum()

    if not checked:
        np.testing.assert_allclose(actual, expected(xs), rtol=1e-6)
        return
    value, grads = jax.value_and_grad(expected)(xs)
    np.testing.assert_allclose(actual[0], value, rtol=1e-6)
    assert_same(actual[1], grads)


def test_types_that_say_how_tokens_are_split():
    mesh = make_mesh(4, AxisType.Explicit)
    xs = {n: x for n, x in arrays().items() if n in QKV}
    placed = {n: jax.device_put(x, NamedSharding(mesh, RING)) for n, x in xs.items()}
    with jax.set_mesh(mesh):
        out = ring_attention(**placed, strategy="ring")
    assert jax.typeof(out).sharding.spec[1] in ("ring", ("ring",))
    assert_same({"out": out}, whole(xs, causal=True))


@pytest.mark.slow
def test_the_number_of_devices_is_part_of_the_program():
    """Blocks of one shape, on rings of one, two and four devices."""
    for devices in (1, 2, 4):
        xs = {n: x for n, x in arrays(t=8 * devices, s=8 * devices).items() if n in QKV}
        mapped = jax.shard_map(
            ring_attention, mesh=make_mesh(devices), in_specs=RING, out_specs=RING
        )
        out = jax.block_until_ready(jax.jit(mapped, compiler_options=QUICK)(*xs.values()))
        assert_same({"out": out}, whole(xs, causal=True))


def test_forward_mode():
    xs = {n: x for n, x in arrays().items() if n in QKV}
    moved = {n: x[::-1] for n, x in xs.items()}
    actual, expected = (
        jax.jit(
            lambda xs, moved, fn=fn: jax.jvp(lambda xs: fn(xs, causal=True), (xs,), (moved,))[1],
            compiler_options=QUICK,
        )(xs, moved)
        for fn in (Split(2, "zigzag"), whole)
    )
    assert_same(actual, expected)


# What is sent, computed and kept


def compiled(split, shape, **options):
    xs = dict.fromkeys(QKV, jax.ShapeDtypeStruct(shape, jnp.float32))
    return jax.jit(lambda xs: split(xs, **options)).lower(xs).compile()


def collectives(split, **options):
    text = compiled(split, (1, 32, 4, 8), **options).as_text()
    names = ("collective-permute", "all-to-all", "all-gather")
    lines = [line.split(" = ")[1] for line in text.splitlines() if " = " in line]
    return {n: [x for x in lines if f" {n}(" in x or f" {n}-start(" in x] for n in names}


def test_a_ring_sends_blocks_of_keys_and_values_and_nothing_else():
    sent = collectives(Split(4), causal=True)
    # keys and values before the loop, and in it
    assert len(sent["collective-permute"]) == 4
    assert all("f32[1,8,4,8]" in line for line in sent["collective-permute"])
    assert not sent["all-gather"] + sent["all-to-all"]


def test_a_window_shortens_the_way():
    # the window reaches into the block before, so keys and values make one hop
    assert len(collectives(Split(4), causal=True, sliding_window=8)["collective-permute"]) == 2
    assert not collectives(Split(4), causal=True, sliding_window=0)["collective-permute"]


def test_other_strategies_send_what_they_say():
    sent = collectives(Split(4, strategy="ulysses"), causal=True)
    assert sent["all-to-all"]
    assert not sent["collective-permute"]
    sent = collectives(Split(4, strategy="allgather"), causal=True)
    assert sent["all-gather"]
    assert not sent["collective-permute"]


COUNTS = {
    # pairs of blocks that a mask leaves, of 16 or, in zigzag order, of 64
    "causal": ("contiguous", {"causal": True}, 10),
    "window": ("contiguous", {"causal": True, "sliding_window": 8}, 7),
    "both_sides": ("contiguous", {"causal": False, "sliding_window": 3}, 10),
    "all": ("contiguous", {"causal": False}, 16),
    "zigzag": ("zigzag", {"causal": True}, 36),
}


@pytest.mark.parametrize(
    ("name", "direction"),
    [*((name, "forward") for name in COUNTS), ("causal", "backward"), ("zigzag", "backward")],
)
def test_empty_pairs_of_blocks_are_not_computed(name, direction):
    layout, options, expected = COUNTS[name]
    spec, calls = kernel_registry.spec("ring_attention"), []
    found = next(e for e in kernel_registry.list("flash_attention") if e.platform == "xla")

    def counted(fn):
        def run(args, *rest):
            jax.debug.callback(lambda: calls.append(1))
            return fn(args, *rest)

        return run

    field = "fn" if direction == "forward" else "backward"
    inner = dataclasses.replace(found, **{field: counted(getattr(found, field))})

    def local(query, key, value):
        given = {"query": query, "key": key, "value": value, "layout": layout}
        args = spec.canonicalize(spec.complete(given | options))
        cfg = found.config.testing(args, direction)
        outputs, residuals = schedule.forward(args, cfg, inner)
        if direction == "forward":
            return outputs[0]
        grads = schedule.backward(args, cfg, inner, outputs, residuals, outputs, frozenset({"key"}))
        return grads["key"]

    xs = [x[:, :32] for n, x in arrays().items() if n in QKV]
    mapped = jax.shard_map(local, mesh=make_mesh(4), in_specs=RING, out_specs=RING)
    jax.block_until_ready(jax.jit(mapped, compiler_options=QUICK)(*xs))
    jax.effects_barrier()
    assert len(calls) == expected


def test_memory_is_a_few_blocks():
    """A device's scores would take 128 MiB; its own queries are 0.5 MiB."""
    split = Split(4)

    def loss(xs):
        return split(xs, causal=True)["out"].sum()

    xs = dict.fromkeys(QKV, jax.ShapeDtypeStruct((1, 16384, 2, 16), jnp.float32))
    program = jax.jit(jax.grad(loss)).lower(xs).compile()
    assert program.memory_analysis().temp_size_in_bytes < 16 * 2**20


# Errors


def test_an_axis_that_is_not_bound_is_refused_by_name():
    xs = [x for n, x in arrays().items() if n in QKV]
    mapped = jax.shard_map(
        lambda *xs: ring_attention(*xs, axis_name="sequence"),
        mesh=make_mesh(2),
        in_specs=RING,
        out_specs=RING,
    )
    with pytest.raises(ValueError, match=r"`axis_name`.*one of \('ring',\); got 'sequence'"):
        mapped(*xs)


def run_split(strategy="ring", layout="contiguous", devices=4, size=None, **options):
    xs = {n: x[:, :size] for n, x in arrays(groups=options.pop("groups", 2)).items() if n in QKV}
    specs = {"mesh": make_mesh(devices), "in_specs": (RING,) * 3, "out_specs": RING}
    return ring_attention(**xs, **specs | {"strategy": strategy, "layout": layout} | options)


BAD = {
    "heads": ({"strategy": "ulysses", "devices": 8}, "multiple of 8.*Use 'ring'"),
    "odd_chunks": ({"layout": "zigzag", "size": 12}, "zigzag.*3 queries.*multiple of 8"),
    "tokens": ({"size": 30}, "4 devices do not divide the 30 elements"),
    "one_token": ({"size": 1}, "one token"),
    "other_axis": ({"axis_name": "sequence"}, r"over \('ring',\); only \('sequence',\)"),
    "columns": ({"bias": host.zeros((1, 1, 1, 47))}, "`bias` must have 1 or 48 columns"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_devices_cannot_share_is_refused(name):
    options, words = host.to_jax(BAD[name])
    with pytest.raises(ValueError, match=words):
        run_split(**options)


@pytest.mark.parametrize("strategy", ["ring", "allgather"])
def test_dropout_needs_indices_of_the_whole_sequence(strategy):
    with pytest.raises(UnsupportedError, match="strategy='ulysses'"):
        run_split(strategy=strategy, dropout_prob=0.5, dropout_seed=1)


def test_views_of_one_device_are_the_call_itself():
    spec = kernel_registry.spec("ring_attention")
    xs = {n: x for n, x in arrays().items() if n in QKV}
    for strategy in ("ulysses", "allgather"):
        args = spec.canonicalize(spec.complete(xs | {"strategy": strategy, "layout": "zigzag"}))
        made = gather.view_of(args).spread(args)
        assert made.key is args.key
        assert made.q_positions is None
