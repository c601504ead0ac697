"""Attention for Hopper lowers for an H200 on a machine without a GPU, with every config and option.

tests/aot/test_mosaic.py makes its machine code, where JAX's plugin for CUDA is installed.
"""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel._device import Target
from ejkernel.kernels._pallas.gpu._blocks import probe
from ejkernel.kernels._pallas.gpu.flash_attention import config
from ejkernel.modules import ring_attention
from tests.kernels.test_pallas_gpu import ENTRY, arrays, make

pytestmark = pytest.mark.skipif(probe.why_not() is not None, reason=str(probe.why_not()))
H200 = Target("gpu", "NVIDIA H200", "9.0")
SIZES = {64: 64, 128: 128, 192: 128}
NUMBER = {64: 3, 128: 5, 192: 2}  # of candidates
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": 100},
    "cap": {"logits_soft_cap": 20.0},
    "everything": {"causal": True, "sliding_window": 100, "logits_soft_cap": 20.0, "sinks": True},
}


def mesh_of_h200s(count, kind):
    from jax._src.mesh import AbstractDevice
    from jax.sharding import AbstractMesh, AxisType

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return AbstractMesh((count,), ("x",), (AxisType[kind],), abstract_device=device)


def on_an_h200():
    return jax.sharding.use_abstract_mesh(mesh_of_h200s(1, "Explicit"))


def call(d, lengths, options):
    def values():
        t, s = lengths
        made = arrays(t, s, 4, 2, d, SIZES[d], 2) | options
        if made.pop("sinks", False):
            made["softmax_aux"] = jax.numpy.ones((4, 1))
        return make(made)

    return jax.eval_shape(values)


def assert_lowers(args, number):
    cfg = config.candidates(args, "forward", H200)[number]
    with on_an_h200():
        traced = jax.jit(lambda args: ENTRY.fn(args, cfg)).trace(args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2  # the kernel and the one that computes tiles again


def test_the_number_of_candidates():
    for d, number in NUMBER.items():
        args = call(d, (256, 256), {})
        assert len(config.candidates(args, "forward", H200)) == number


@pytest.mark.parametrize(
    ("d", "number"), [(d, i) for d, count in NUMBER.items() for i in range(count)]
)
def test_every_config_lowers(d, number):
    assert_lowers(call(d, (512, 512), OPTIONS["causal"]), number)


@pytest.mark.parametrize("options", ["window", "everything"])
def test_options_lower(options):
    assert_lowers(call(128, (203, 333), OPTIONS[options]), 0)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(512, 512), (203, 333), (333, 203), (3, 5)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("d", SIZES)
def test_every_option_lowers(d, options, lengths):
    for number in range(len(config.candidates(call(d, lengths, {}), "forward", H200))):
        assert_lowers(call(d, lengths, OPTIONS[options]), number)


def lowered_on_two(fn, arrays, spec, check_vma=True):
    """A program in a `shard_map` over two H200s."""
    mesh = mesh_of_h200s(2, "Auto")
    run = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_shard_map(check_vma, direction):
    args = call(128, (256, 256), OPTIONS["causal"])
    cfgs = [config.heuristic(args, d, H200) for d in ("forward", "backward")]
    names = tuple(args.arrays())

    def run(*xs):
        mine = args.with_arrays(dict(zip(names, xs, strict=True)))
        outputs, residuals = ENTRY.fn(mine, cfgs[0])
        if direction == "forward":
            return outputs
        wanted = frozenset(names)
        return tuple(ENTRY.backward(mine, cfgs[1], outputs, residuals, outputs, wanted).values())

    text = lowered_on_two(run, args.arrays().values(), P("x"), check_vma)
    assert text.count("mosaic_gpu") >= 2


def test_a_ring():
    """Forward and backward around keys that travel between two devices."""
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), "bfloat16")

    def loss(*xs):
        options = {"axis_name": "x", "strategy": "ring", "platform": "pallas"}
        return ring_attention(*xs, causal=True, **options).astype("float32").sum()

    text = lowered_on_two(jax.grad(loss, (0, 1, 2)), (x, x, x), P(None, "x"))
    assert "collective_permute" in text
    assert text.count("mosaic_gpu") >= 4
