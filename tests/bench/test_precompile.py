"""Kernels compiled for a GPU that is not here, and what a benchmark will take there."""

import functools
import pathlib
import shutil

import pytest

from ejkernel import _device, _settings, cli
from ejkernel.bench import Workload, _estimate, _precompile, _runner
from ejkernel.callib import _triton_compile
from ejkernel.kernels._specs import _work_matmul

H200 = _device.Target("gpu", "NVIDIA H200", "9.0")
FILE = """
from tests.bench.test_precompile import POOL
WORKLOADS = [POOL]
"""
POOL = Workload(
    "mean_pooling",
    "T256",
    functools.partial(_work_matmul._pooled, b=1, t=256, h=2, d=64, chunk=64),
    dtype="bfloat16",
)


def compile_pool(folder):
    """Launches, and how many kernels were compiled and found."""
    _triton_compile.compile_kernel.cache_clear()
    before = dict(_triton_compile.counts)
    with _settings.override(cache_dir=str(folder)):
        (done,) = _precompile.workloads([POOL], ("fwd", "fwd+bwd"), H200, candidates=False)
    assert done.failed == []
    return done.kernels, {n: x - before[n] for n, x in _triton_compile.counts.items()}


def test_kernels_are_found_in_a_cache_that_was_carried(tmp_path):
    pytest.importorskip("triton")
    here, there = tmp_path / "here", tmp_path / "there" / "deeper"
    kernels, counts = compile_pool(here)
    assert kernels >= 2
    assert counts["compiled"] >= 2
    shutil.copytree(here, there)
    shutil.rmtree(here)
    again, counts = compile_pool(there)
    assert (again, counts["compiled"]) == (kernels, 0)
    assert counts["found"] >= 2


def test_an_estimate_counts_programs_and_calls(tmp_path, capsys):
    plain, tuned = (
        list(_estimate.rows([POOL], H200, _runner.Options(tune_s=tune_s), cached=True))
        for tune_s in (0.0, 5.0)
    )
    assert [row.mode for row in plain] == ["fwd", "fwd+bwd"]
    assert {row.peers for row in plain} == {2}  # jnp.mean and FLA
    assert all(row.ours >= 2 and row.candidates == 0 for row in plain)
    assert sum(row.candidates for row in tuned) > 0
    assert sum(row.seconds for row in tuned) > sum(row.seconds for row in plain)
    total, calls = _estimate.whole(plain, 1e9)
    assert calls == 1
    assert _estimate.whole(plain, 1.0)[1] == len(plain)
    file = tmp_path / "w.py"
    file.write_text(FILE)
    command = ["bench", "--workloads", str(file), "--compile", "cuda:sm_90", "--list"]
    assert cli.main(command) == 0
    assert f"about {total:.0f} s: 1 calls of at most 540 s" in capsys.readouterr().out


def test_only_a_gpu_is_compiled_for(capsys):
    assert cli.main(["bench", "mean_pooling", "--compile", "tpu:v5e"]) == 2
    assert "--compile takes a GPU, such as cuda:sm_90" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(pathlib.Path("benchmarks").glob("gpu_*.py")), ids=str)
@pytest.mark.slow
def test_every_gpu_file_can_be_estimated(path):
    from ejkernel.bench import _workloads

    if "WORKLOADS" not in path.read_text():
        return
    found = list(_estimate.rows(_workloads.load(str(path)), H200, _runner.Options(), cached=True))
    assert found
    assert all(row.ours for row in found)
