"""Mosaic GPU kernels compiled without a GPU, where JAX's plugin for CUDA is installed."""

import importlib.util
import os

import jax
import numpy as np
import pytest

from ejkernel import aot
from ejkernel.aot import _mosaic, _targets
from ejkernel.kernels._pallas.gpu._blocks import probe

H200 = _targets.parse("cuda:sm_90")
WHY_NOT = _mosaic.why_not(H200) or probe.why_not()
SAID = """
ptxas info    : Function properties for anonymous_mosaic_gpu_kernel
    160 bytes stack frame, 168 bytes spill stores, 260 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 160 bytes cumulative stack size, 1 bytes smem
"""


def test_it_says_why_not(monkeypatch):
    assert "cuda:sm_90 alone" in str(_mosaic.why_not(_targets.parse("cuda:sm_80")))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'jax[cuda13]'" in str(_mosaic.why_not(H200))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin")
    assert _mosaic.why_not(H200) is None


def test_what_compilers_print():
    with _mosaic._printed() as said:
        os.write(1, b"to one\n")
        os.write(2, SAID.encode())
        text = said()
    assert text.startswith("to one\n")
    harmless = "ptxas info    : (C7519) warpgroup.arrive is injected in around line 422 by compiler"
    (kernel,) = _mosaic.reports(f"{harmless}\n{text}")
    assert (kernel.registers, kernel.spill_bytes) == (168, 160)
    for note in ("C7512", "C7513"):
        with pytest.raises(RuntimeError, match=f"serialises.*{note}"):
            _mosaic.reports(f"ptxas info : ({note}) Potential Performance Loss")


@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (192, 128)])
def test_attention_hardly_spills(d, e):
    query, value = (jax.ShapeDtypeStruct((1, 512, 2, x), "bfloat16") for x in (d, e))
    call = {"query": query, "key": query, "value": value, "causal": True, "deterministic": True}
    reports = aot.compile(
        "flash_attention", targets=["cuda:sm_90"], call=call, entries=["pallas/gpu"]
    )
    # dk and dv with exact weights, which rarely run, keep two values of a thread in memory
    most = {"forward": [0, 0], "backward": [0, 0, 8, 0, 0]}
    assert {r.direction for r in reports} == most.keys()
    for report in reports:
        assert report.status == "compiled", report.reason
        found = [kernel.spill_bytes for kernel in report.kernels]
        assert np.less_equal(found, most[report.direction]).all(), found


@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize("d", [64, 128])
def test_attention_with_segments_spills_little(d):
    """A few words that no loop touches; products stay parallel, else it does not compile."""
    query = jax.ShapeDtypeStruct((1, 512, 2, d), "bfloat16")
    ids = jax.ShapeDtypeStruct((1, 512), "int32")
    (report,) = aot.compile(
        "flash_attention",
        targets=["cuda:sm_90"],
        call={"query": query, "key": query, "value": query, "causal": True, "q_segment_ids": ids},
        entries=["pallas/gpu"],
        directions=["forward"],
    )
    assert report.status == "compiled", report.reason
    assert all(kernel.spill_bytes <= 64 for kernel in report.kernels)


@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_do_not_spill(transposed):
    shape = lambda *sizes, dtype="bfloat16": jax.ShapeDtypeStruct(sizes, dtype)
    reports = aot.compile(
        "grouped_matmul",
        targets=["cuda:sm_90"],
        call={
            "lhs": shape(4096, 1024),
            "rhs": shape(8, 512, 1024) if transposed else shape(8, 1024, 512),
            "group_sizes": shape(8, dtype="int32"),
            "transpose_rhs": transposed,
        },
        entries=["pallas/gpu"],
        configs="all",
    )
    assert {r.direction for r in reports} == {"forward", "backward"}
    for report in reports:
        assert report.status == "compiled", report.reason
        assert report.kernels
        assert not any(kernel.spill_bytes for kernel in report.kernels)
