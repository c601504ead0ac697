"""Mean pooling in Triton beyond the generated tests: slices of long rows, configs, machine code."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel._device import Target
from ejkernel.callib import _triton_call
from ejkernel.callib._triton_compile import GpuTarget
from ejkernel.kernels._triton import mean_pooling
from ejkernel.kernels._triton.mean_pooling import bwd, config, fwd, kernels, spans
from tests.backend import BACKEND
from tests.kernels import harness, pooling_calls
from tests.kernels.pooling_calls import CALLS, SPEC, call

H200 = Target(kind="gpu", model="NVIDIA H200", capability="9.0")
interpreted = pytest.mark.skipif(BACKEND != "cpu", reason="runs in the interpreter, on a CPU")


def tile(**more):
    return config.Config(**{"block_t": 4, "block_w": 8, "slice_t": 8, "num_stages": 1} | more)


@pytest.mark.parametrize("name", ["block_t", "block_w", "slice_t"])
def test_bad_settings_are_named(name):
    with pytest.raises(ValueError, match=f"{name}=12 must be a positive power of two"):
        tile(**{name: 12})


def test_kernels_and_helpers_have_few_parameters():
    functions = [x for m in (kernels, spans) for x in vars(m).values() if hasattr(x, "arg_names")]
    assert len(functions) > 6
    for function in functions:
        most = 24 if function.__name__.endswith("_kernel") else 14
        assert len(function.arg_names) <= most, function.__name__


@pytest.mark.parametrize(
    "more", [{"shape": (0, 3, 2)}, {"shape": (1, 3, 2), "cu_seqlens": np.zeros(1, np.int32)}]
)
def test_nothing_is_refused(more):
    entry = harness.find_entry("mean_pooling", "triton/gpu")
    assert "at least one row" in entry.why_not(call(**more), H200)


@interpreted
@pytest.mark.parametrize("name", CALLS)
def test_rows_in_slices(name):
    pooling_calls.assert_right(mean_pooling, call(**CALLS[name]), tile())


def test_memory_is_read_and_written_in_16_bytes():
    shape, dout = (1, 65536, 16, 128), (1, 1024, 16, 128)

    def run(inputs, dout):
        args = SPEC.canonicalize(SPEC.complete({"inputs": inputs, "chunk_size": 64}))
        forward, backward = (config.heuristic(args, d, H200) for d in ("forward", "backward"))
        wanted = frozenset({"inputs"})
        return fwd.forward(args, forward), bwd.backward(args, backward, (), (), (dout,), wanted)

    struct = lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    jaxpr = jax.make_jaxpr(run)(struct(shape), struct(dout))
    found = {}
    for eqn in _triton_call.launches(jaxpr.jaxpr):
        launch, avals = eqn.params["launch"], [v.aval for v in eqn.invars]
        compiled = _triton_call.compile_launch(launch, avals, GpuTarget.parse("cuda:sm_90"))
        found[compiled.name] = re.findall(r"(ld|st)\.global\.([\w.]+)", compiled.asm["ptx"])
        assert launch.grid[0] >= 4 * 132
    wide = lambda name, kind: [w for k, w in found[name] if k == kind and w.startswith("v4")]
    assert len(found) == 2
    assert len(wide("mean_pooling_fwd_kernel", "ld")) == 8
    assert len(wide("mean_pooling_bwd_kernel", "st")) == 8
