"""`jit` over sharded arrays with kernels that XLA cannot look into: nothing is gathered."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import _device
from ejkernel.aot import _targets, _xla_gpu
from ejkernel.callib import _pallas, _triton_call
from ejkernel.callib._triton_compile import GpuTarget
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.modules import FlashAttention, MLAAttention, flash_attention, mla_attention
from ejkernel.ops import Executor
from ejkernel.ops.core import sharding
from ejkernel.ops.core.kernel import Implementation
from tests import host
from tests.distributed import partitioned
from tests.kernels.harness import QUICK

QKV = ("query", "key", "value")


def make_mesh():
    types = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=types, devices=jax.devices()[:4])


def arrays(groups=2, t=20, batch=4):
    keys = jax.random.split(jax.random.key(0), 6)
    return {
        "query": jax.random.normal(keys[0], (batch, t, 4, 8)),
        "key": jax.random.normal(keys[1], (batch, t, groups, 8)),
        "value": jax.random.normal(keys[2], (batch, t, groups, 12)),
        "bias": jax.random.normal(keys[3], (1, 4, t, t)),
        "softmax_aux": jax.random.normal(keys[4], (4, 2)),
    }


def place(xs, specs):
    mesh = make_mesh()
    return {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in xs.items()}


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = np.abs(np.where(np.isfinite(e), e, 0)).max()
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5 * scale)


def gathered(program, *given):
    """The shapes that a compiled program gathers."""
    text = program.lower(*given).compile().as_text()
    return re.findall(r"= (\S+) all-gather", text)


ROWS, HEADS = P("data"), P(None, None, "model")
BOTH = P("data", None, "model")
EVERY = P(None, None, ("data", "model"))
SPLITS = {
    "rows": dict.fromkeys(QKV, ROWS),
    "heads": dict.fromkeys(QKV, HEADS) | {"softmax_aux": P("model")},
    "both": dict.fromkeys(QKV, BOTH) | {"bias": P(None, "model")},
    # two devices share each of the two key heads, of which some hold one and some both
    "shared_key_heads": {"query": EVERY, "key": P(None, None, "data")},
    "one_key_head": {"query": EVERY},
    "tokens": dict.fromkeys(QKV, P(None, "data", "model")),
    "queries_alone": {"query": BOTH},
}
OPTIONS = {
    "rows": {"causal": True, "cum_seqlens_q": host.asarray([0, 20, 27, 40, 53])},
    "both": {"dropout_prob": 0.3, "dropout_seed": 5, "return_lse": True},
    "tokens": {"causal": True, "sliding_window": 7},
}
FREE = {
    "rows",
    "heads",
    "both",
    "shared_key_heads",
    "one_key_head",
}  # nothing moves but sums of gradients


QUICKLY = ("both", "shared_key_heads", "tokens")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICKLY else pytest.mark.slow) for n in SPLITS]
)
def test_values_and_gradients(name):
    options = host.to_jax(OPTIONS.get(name, {}))
    xs = arrays(groups=1 if name == "one_key_head" else 2)
    wanted = (*QKV, "bias", "softmax_aux") if name in ("heads", "both") else QKV
    xs = {n: xs[n] for n in wanted}
    made = partitioned.kernel_of("flash_attention")
    through = lambda xs: partitioned.call(made, "flash_attention", xs, **options)

    def plain(xs):
        out = flash_attention(**xs, **options)
        return out if isinstance(out, tuple) else (out,)

    run = jax.jit(
        functools.partial(partitioned.answers, through, wanted=wanted), compiler_options=QUICK
    )
    expected = jax.jit(
        functools.partial(partitioned.answers, plain, wanted=wanted), compiler_options=QUICK
    )(xs)
    placed = place(xs, SPLITS[name])
    actual = run(placed)
    assert_close(actual, expected)
    if name in FREE:
        assert not gathered(run, placed)
        assert actual[0][0].sharding.is_equivalent_to(placed["query"].sharding, 4)


@pytest.mark.parametrize("axes", [(0, 0, 0), pytest.param((1, None, 0), marks=pytest.mark.slow)])
def test_vmap_adds_an_axis_that_may_be_split(axes):
    lanes = 2
    xs = [arrays(batch=2)[n] for n in QKV]
    stacked = [x if a is None else jnp.stack([x, 2 * x], a) for x, a in zip(xs, axes, strict=True)]
    made = partitioned.kernel_of("flash_attention")

    def gradient(call):
        loss = lambda q, k, v: (call(q, k, v) ** 2).sum()
        return jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1, 2)), axes))

    through = gradient(
        lambda *xs: partitioned.call(made, "flash_attention", dict(zip(QKV, xs, strict=True)))[0]
    )
    plain = gradient(flash_attention)
    mesh = make_mesh()
    placed = []
    for x, axis in zip(stacked, axes, strict=True):
        spec = [None, None, "model", None] if axis is None else ["model", None, None]
        if axis is not None:
            spec.insert(axis, "data")
        placed.append(jax.device_put(x, NamedSharding(mesh, P(*spec))))
    assert_close(through(*placed), plain(*stacked))
    if None not in axes:  # lanes and rows are all that is split
        assert not gathered(through, *placed)
    assert lanes == placed[0].shape[axes[0]]


@pytest.mark.slow
def test_checkpoints_inside_a_loop():
    xs = {n: arrays(groups=4, t=12)[n][..., :8] for n in QKV}
    made = partitioned.kernel_of("flash_attention")
    through = lambda **xs: partitioned.call(made, "flash_attention", xs, causal=True)[0]

    def gradients(attend, xs):
        @jax.checkpoint
        def layer(query, _):
            return query + attend(query=query, key=xs["key"], value=xs["value"]), None

        return (jax.lax.scan(layer, xs["query"], length=2)[0] ** 2).sum()

    program = jax.jit(jax.grad(functools.partial(gradients, through)), compiler_options=QUICK)
    plain = functools.partial(flash_attention, causal=True)
    expected = jax.jit(jax.grad(functools.partial(gradients, plain)), compiler_options=QUICK)(xs)
    placed = place(xs, dict.fromkeys(QKV, BOTH))
    assert_close(program(placed), expected)
    assert not gathered(program, placed)


def test_a_latent_is_shared_by_the_heads_that_devices_split():
    keys = jax.random.split(jax.random.key(1), 6)
    xs = {
        "query": jax.random.normal(keys[0], (2, 12, 4, 8)),
        "key_value": jax.random.normal(keys[1], (2, 12, 6)),
        "w_kc": jax.random.normal(keys[2], (6, 4, 8)),
        "w_vc": jax.random.normal(keys[3], (6, 4, 5)),
        "b_q": jax.random.normal(keys[4], (2, 12, 4, 3)),
        "b_k": jax.random.normal(keys[5], (2, 12, 3)),
    }
    weights = P(None, "model")
    specs = {"query": BOTH, "b_q": BOTH, "key_value": ROWS, "b_k": ROWS}
    placed = place(xs, specs | {"w_kc": weights, "w_vc": weights})
    made = partitioned.kernel_of("mla_attention", "xla/any@-1")
    answer = lambda run: jax.jit(
        functools.partial(partitioned.answers, run, wanted=tuple(xs)), compiler_options=QUICK
    )
    through = answer(lambda xs: partitioned.call(made, "mla_attention", xs, causal=True))
    expected = answer(lambda xs: (mla_attention(**xs, causal=True),))(xs)
    assert_close(through(placed), expected)
    assert not gathered(through, placed)


# Every op, by its spec alone


def stand_in(op):
    """Results of the right shapes that depend on every operand, of no kernel."""
    entry = next(e for e in kernel_registry.list(op) if e.name == "xla/any")

    def filled(shapes, operands):
        total = sum(x.ravel()[0].astype(jnp.float32) for x in jax.tree.leaves(operands) if x.size)
        return jax.tree.map(lambda s: jnp.full(s.shape, total).astype(s.dtype), shapes)

    def forward(args, cfg):
        shapes = jax.eval_shape(lambda args: entry.fn(args, entry.heuristic(args)), args)
        return filled(shapes, args.arrays())

    def backward(args, cfg, outputs, residuals, cotangents, wanted):
        shapes = {n: args.arrays()[n] for n in wanted}
        return filled(shapes, (args.arrays(), outputs, residuals, cotangents))

    made = Implementation(name="cuda/gpu", forward=forward, backward=backward)
    return made, entry.backward is not None


# ops that a mesh alone splits nowhere: no axis of theirs is one of batch or heads
WHOLE = {"sampled_matmul", "sparse_matmul", "update_latent_pages"}


def divisible(op, mesh):
    """The first case of an op that two devices split, and how."""
    spec = kernel_registry.spec(op)
    for case in (case for case in spec.cases() if "core" in case.tags):
        args = spec.make(case, jnp.float32, jax.random.key(0))
        layout = spec.layout(args)
        try:
            split = sharding._spread(op, layout, args, mesh)
        except ValueError:
            continue
        if split := {a: over for a, over in split.items() if a in (layout.batch, layout.heads)}:
            return args, layout, split
    return None


def marked():
    """Ops; `make test` looks at those that have kernels for GPUs."""
    for op in kernel_registry.ops():
        late = not any(entry.backend == "gpu" for entry in kernel_registry.list(op))
        yield pytest.param(op, marks=[pytest.mark.slow] if late else [])


@pytest.mark.parametrize("op", list(marked()))
def test_every_op_inherits_the_rule(op):
    mesh = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    if op == "ring_attention":
        pytest.skip("a schedule of its own, in a shard_map")
    found = divisible(op, mesh)
    assert (found is None) == (op in WHOLE)
    if found is None:
        return
    args, layout, split = found
    made, differentiable = stand_in(op)
    names = args.arrays().keys() & kernel_registry.spec(op).differentiable
    specs = {
        n: sharding._spec(x.shape, layout.arrays[n], layout, split)
        for n, x in args.arrays().items()
    }
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in args.arrays().items()}

    @jax.jit
    def program(xs):
        run = lambda xs: partitioned.outputs_of(made, op, args.with_arrays(xs))
        if not (differentiable and names):
            return run(xs)
        return partitioned.answers(run, xs, sorted(names))

    assert any(over for spec in specs.values() for over in spec)
    assert "CustomSPMDPartitioning" in program.lower(placed).as_text()
    assert not gathered(program, placed)


# Through the executor


@pytest.fixture
def gpu(monkeypatch):
    """Calls are for a GPU; its kernels are compiled as numbers of the right shape, for no run."""
    pytest.importorskip("triton")
    monkeypatch.setattr(_device, "of_arrays", lambda leaves: partitioned.GPU)
    monkeypatch.setattr(_device, "find", lambda mesh=None: partitioned.GPU)
    launched = []

    def numbers(*arrays, launch):
        launched.append(launch)
        total = sum(x.ravel()[0].astype(jnp.float32) for x in arrays)
        return [jnp.full(shape, total).astype(dtype) for shape, dtype in launch.results()]

    primitive = _triton_call.triton_call_p
    mlir.register_lowering(primitive, mlir.lower_fun(numbers, True), platform="cpu")
    yield launched
    again = mlir.lower_fun(_triton_call._interpret, True)
    mlir.register_lowering(primitive, again, platform="cpu")


@pytest.mark.parametrize("name", ["both", "shared_key_heads"])
def test_tritons_kernels_are_cut(gpu, name):
    xs = {n: arrays()[n] for n in QKV}
    placed = place(xs, SPLITS[name])

    @jax.jit
    def program(xs):
        run = lambda xs: Executor()(FlashAttention(), **xs, causal=True, platform="triton")
        return jax.value_and_grad(lambda xs: run(xs).sum())(xs)

    assert not gathered(program, placed)
    # each device has a quarter of the programs: of 4 rows, 4 heads and one block of queries
    forward = [x for x in gpu if x.kernel.fn.__name__ == "flash_attention_fwd_kernel"]
    assert {np.prod(launch.grid) for launch in forward} == {4}


@pytest.mark.parametrize("name", ["flash_attention", "mla_attention"])
def test_one_device_needs_no_rule(gpu, name):
    case = next(c for c in kernel_registry.spec(name).cases() if c.name == "plain")
    values = case.values(jnp.float32, jax.random.key(0))
    xs = {n: x for n, x in values.items() if isinstance(x, jax.Array)}
    kernel = {"flash_attention": FlashAttention, "mla_attention": MLAAttention}[name]
    run = lambda xs: Executor()(kernel(), **xs, platform="triton")
    text = jax.jit(run).lower(xs).as_text()
    assert "CustomSPMDPartitioning" not in text
    assert gpu


def triton_ops():
    return [
        op
        for op in kernel_registry.ops()
        if op not in WHOLE | {"ring_attention"}
        and any(entry.name == "triton/gpu" for entry in kernel_registry.list(op))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("op", triton_ops())
def test_xla_cuts_tritons_kernels_for_gpus(op, without_jax_cache):
    """As XLA compiles them for two H200s, where JAX's plugin for CUDA is installed."""
    pytest.importorskip("triton")
    if reason := _xla_gpu.why_not(_targets.parse("cuda:sm_90"), "programs are"):
        pytest.skip(reason)
    mesh = Mesh(np.array(_xla_gpu.devices(2)), ("ring",), axis_types=(AxisType.Auto,))
    args, layout, split = divisible(op, mesh)
    entry = next(e for e in kernel_registry.list(op) if e.name == "triton/gpu")
    if reason := entry.why_not(args):
        pytest.skip(f"the first case that two devices split: {reason}")
    placed = {
        n: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(mesh, sharding._spec(x.shape, layout.arrays[n], layout, split)),
        )
        for n, x in args.arrays().items()
    }
    names = sorted(args.arrays().keys() & kernel_registry.spec(op).differentiable)
    made = entry.implementation(partitioned.GPU)

    def program(xs):
        run = lambda xs: partitioned.outputs_of(made, op, args.with_arrays(xs))
        if entry.backward is None:
            return run(xs)
        return partitioned.answers(run, xs, names)

    # a partition is lowered when the program is compiled
    with _triton_call.lower_for(GpuTarget("cuda", 90)):
        lowered = jax.jit(program).trace(placed).lower(lowering_platforms=("cuda",))
        text = lowered.compile().as_text()
    assert "triton_kernel_call" in text
    assert not re.findall(r"= (\S+) all-gather", text)


def tpus():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    types = (AxisType.Auto,) * 2
    return Mesh(np.array(devices).reshape(2, 2), ("data", "model"), axis_types=types)


def lowered_for_tpus(**options):
    """A program over sharded arrays of four TPUs."""
    mesh = tpus()
    sharding = NamedSharding(mesh, BOTH)
    x = jax.ShapeDtypeStruct((4, 128, 4, 128), jnp.bfloat16, sharding=sharding)
    with jax.set_mesh(mesh), _pallas.compile_for_tpu():
        run = lambda q, k, v: flash_attention(q, k, v, causal=True, **options)
        return jax.jit(run).lower(x, x, x).as_text()


def test_a_tpu_takes_no_rule():
    with pytest.raises(UnsupportedError, match=r"(?s)`mesh=`.*`shard_map`.*Explicit.*'auto'"):
        lowered_for_tpus(platform="pallas")
    assert "tpu_custom_call" not in lowered_for_tpus()
    assert "tpu_custom_call" in lowered_for_tpus(platform="pallas", mesh=tpus())
