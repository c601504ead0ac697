"""Peers: what they compute, in which order, and what happens to those that fail."""

import contextlib
import dataclasses
import functools
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from ejkernel.bench import Workload, _peers, _peers_torch, _programs, _runner
from ejkernel.bench._public import Public
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._specs import _work_attention, _work_linear, _work_matmul, _work_paged
from ejkernel.ops.execution import benchmark

QUICK = _runner.Options(rounds=2, seconds=0.0)


def measure(*workloads, options=QUICK):
    return _runner.run(workloads, options)


def small_calls():
    qkv = (1, 16, 2, 2, 8)
    window = {"causal": True, "sliding_window": (5, 0)}
    page = (2, 16, 4, 2, 8, 4)
    steps = ((1, 1, 1), 16, 4, 2, 8, 4)
    return {
        "flash_attention": (_work_attention.qkv, (*qkv, window)),
        "page_attention": (_work_paged.page, page),
        "ragged_decode_attention": (_work_paged.decode, page[:5]),
        "ragged_page_attention": (_work_paged.ragged, steps),
        "gla": (_work_linear.gated, (1, 7, 2, 4, ("g",), {})),
        "lightning_attention": (_work_linear.gated, (1, 7, 2, 4, (), _work_linear._LAYER)),
        "recurrent": (_work_linear.cell, ("gru", 2, 3, 4, 5)),
        "mla_attention": (_work_attention.latents, (1, 5, 9, 2, 4, 4, 2, 6)),
        "mla_page_attention": (_work_paged.latent_pages, (2, 8, 2, 6, 2, 4)),
        "mean_pooling": (_work_matmul._pooled, (1, 12, 2, 3, 4)),
        "grouped_matmul": (_work_matmul.grouped, (16, 4, 5, 3)),
    }


@pytest.mark.parametrize("op", small_calls())
def test_plain_peers_compute_what_the_oracle_computes(op):
    make, sizes = small_calls()[op]
    values = lambda dtype, key: make(dtype, key, *sizes)
    call = _programs.Call.of(Workload(op, "small", values))
    (peer,) = (p for p in _peers.PEERS if op in p.ops and not p.backend)
    assert peer.why_not(call.values) is None
    spec = kernel_registry.spec(op)
    expected = spec.finish(call.args, spec.reference_fn()(call.args))
    actual = peer.run(call.values)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(a, e, atol=1e-5), jnp.abs(a - e).max()


def test_peers_refuse_what_they_do_not_have():
    values = _work_attention.qkv(jnp.float32, jax.random.key(0), 1, 8, 2, 2, 4, {"causal": True})
    (peer,) = (p for p in _peers.PEERS if p.ops == ("flash_attention",) and not p.backend)
    assert peer.why_not(values | {"logits_soft_cap": 3.0}) == "it has no logits_soft_cap"
    assert "lengths differ" in peer.why_not(values | {"query": values["query"][:, :3]})


def test_only_installed_peers_are_known():
    names = {peer.name for peer in _peers.known("flash_attention", "gpu")}
    assert {"jax.nn", "jax.nn cuDNN"} <= names
    absent = [p for p in _peers.PEERS if p.needs == ("tokamax",)]
    assert all(bool(_peers.missing(p)) != (p.name in names) for p in absent)
    assert {p.name for p in _peers.known("flash_attention", "cpu")} == {"jax.nn"}


def test_the_timer_waits_for_results_of_other_frameworks():
    waited = []

    class Result:
        def block_until_ready(self):
            waited.append(self)

    assert benchmark.measure(Result, num_warmup=1, num_iters=2).calls == 2
    assert len(waited) >= 3


class Tensor:
    """As much of a torch tensor as the peers touch."""

    def __init__(self, name):
        self.name = name

    def detach(self):
        return self

    def requires_grad_(self):
        return self


def test_gradients_of_torch_come_in_the_order_of_ours(monkeypatch):
    torch = types.ModuleType("torch")
    torch.autograd = types.SimpleNamespace(grad=lambda out, leaves, seed: leaves)
    monkeypatch.setitem(sys.modules, "torch", torch)
    values = _work_attention.qkv(jnp.float32, jax.random.key(0), 1, 8, 2, 2, 4, {"causal": True})
    names = {id(x): name for name, x in values.items()}
    monkeypatch.setattr(_peers_torch, "tensor", lambda x: Tensor(names.get(id(x), "seed")))
    seen = []

    def forward(given):
        seen.append(given)
        return Tensor("out")

    run = _peers_torch.program(forward, values, ("query", "key", "value"), "fwd+bwd", values)
    assert [t.name for t in run().tensors] == ["out", "key", "query", "value"]
    assert seen[0]["causal"] is True
    # as JAX orders ours
    assert jax.tree.leaves({"query": 2, "value": 3, "key": 1}) == [1, 2, 3]


class FakeCuda:
    """As much of `torch.cuda` as records a graph; `events` is what was done, in order."""

    def __init__(self, refusal=None):
        self.events, self.refusal = [], refusal

    def Stream(self):
        return types.SimpleNamespace(wait_stream=lambda other: self.events.append("wait"))

    current_stream = Stream

    def CUDAGraph(self):
        return types.SimpleNamespace(replay=lambda: self.events.append("replay"))

    def synchronize(self):
        self.events.append("synchronize")

    @contextlib.contextmanager
    def stream(self, stream):
        yield

    @contextlib.contextmanager
    def graph(self, graph, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.events.append("record")
        yield
        if self.refusal is not None:
            raise self.refusal

    def program(self, monkeypatch, is_cuda=True):
        torch = types.ModuleType("torch")
        torch.cuda = self
        monkeypatch.setitem(sys.modules, "torch", torch)
        made = _peers_torch.Tensors(types.SimpleNamespace(is_cuda=is_cuda))
        return made, _peers_torch.graphed(lambda: (self.events.append("run"), made)[1])


WARMED = ["run", "wait", "run", "run", "run", "wait", "synchronize", "record", "run"]


def test_many_kernels_of_torch_are_recorded_once_and_replayed(monkeypatch):
    cuda = FakeCuda()
    made, replay = cuda.program(monkeypatch)
    assert cuda.events == WARMED
    assert replay() is made
    assert cuda.events == [*WARMED, "replay"]
    assert replay.note == ""


def test_nothing_is_recorded_on_a_cpu(monkeypatch):
    cuda = FakeCuda()
    made, run = cuda.program(monkeypatch, is_cuda=False)
    assert run() is made
    assert cuda.events == ["run", "run"]
    assert run.note == ""


def test_what_torch_cannot_record_is_launched_by_python(monkeypatch):
    cuda = FakeCuda(RuntimeError("operation not permitted when\nstream is capturing"))
    made, run = cuda.program(monkeypatch)
    assert run() is made
    assert cuda.events == [*WARMED, "synchronize", "run"]
    assert run.note == ("launched by Python: operation not permitted when stream is capturing")


PUBLIC = """
import jax.numpy as jnp
def mean_pooling(x, size):
    return x.reshape(x.shape[0], -1, size, *x.shape[2:]).mean(axis=2)
"""


def test_the_public_package_is_timed_in_a_process_without_ours(tmp_path):
    package = tmp_path / "ejkernel"
    (package / "kernels" / "_triton").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.0.1"\n')
    (package / "kernels" / "__init__.py").write_text("")
    (package / "kernels" / "_triton" / "__init__.py").write_text("")
    (package / "kernels" / "_triton" / "mean_pooling.py").write_text(PUBLIC)
    made = lambda dtype, key: _work_matmul._pooled(dtype, key, 1, 128, 2, 4, 64)
    options = dataclasses.replace(QUICK, public=str(tmp_path), modes=("fwd+bwd",))
    document = measure(Workload("mean_pooling", "T128", made, known_peers=False), options=options)
    assert document.versions["public ejkernel"] == "0.0.1"
    (row,) = document.rows
    assert row.program("public").median > 0
    assert row.program("public").kind == "peer"


PUBLIC_PAGED = """
import jax.numpy as jnp
def unified_attention(queries, key, value, lens, tables, starts):
    assert key.shape == value.shape and key.shape[2] == 2
    return queries + lens[0]
"""


def test_the_public_package_serves_mixed_batches_in_a_loop(tmp_path):
    package = tmp_path / "ejkernel" / "kernels" / "_triton"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "unified_attention.py").write_text(PUBLIC_PAGED)
    made = functools.partial(_work_paged.ragged, steps=(1, 1, 5), s=16, h=4, g=2, d=8, size=4)
    options = dataclasses.replace(QUICK, public=str(tmp_path))
    mixed = Workload("ragged_page_attention", "m", made, modes=("fwd",), peers=(), repeats=3)
    (row,) = measure(mixed, options=options).rows
    assert row.program("public unified").failed == ""
    assert row.program("public unified").median > 0


def test_a_folder_without_the_public_package_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no package `ejkernel`"):
        Public(str(tmp_path))


PUBLIC_FLASH = """
import os, time
def flash_attention(query, key, value, causal=False, fwd_params=None, bwd_params=None):
    if fwd_params is None:
        os._exit(3)  # as a crash does
    if fwd_params["kv_blocksize"] == 128:
        time.sleep(60)
    return query
"""


def test_programs_of_the_public_package_that_die_or_hang_take_no_other_with_them(tmp_path):
    package = tmp_path / "ejkernel"
    (package / "kernels" / "_triton").mkdir(parents=True)
    (package / "kernels" / "__init__.py").write_text("")
    (package / "kernels" / "_triton" / "__init__.py").write_text("")
    (package / "kernels" / "_triton" / "flash_attention.py").write_text(PUBLIC_FLASH)
    (package / "__init__.py").write_text("")
    (package / "ops.py").write_text("FwdParams = BwdParams = dict\n")
    call = attention_call({"causal": True})
    public = Public(str(tmp_path), build_s=8.0)
    try:
        said = public.prepare(call, "fwd")
        assert said == {
            "public unset": "its process ended",
            "public as set": "took more than 8 s",
            "public": "",
        }
        assert public.milliseconds("public") > 0
        assert public.why_not(call) is None
        assert public.why_not(attention_call({"sliding_window": (3, 0)})) == (
            "it has no sliding_window"
        )
    finally:
        public.close()


def attention_call(options):
    made = functools.partial(_work_attention.qkv, b=1, t=16, h=2, g=2, d=8, options=options)
    return _programs.Call.of(Workload("flash_attention", "small", made))
