"""Adapters beside the libraries themselves, on a CPU, where those are installed.

What needs a GPU to run is called with a function that only binds its arguments, or with the
library's own plain implementation of the same call.
"""

import functools
import importlib
import inspect

import jax
import pytest

from ejkernel.bench import Workload, _check, _peers, _peers_torch, _programs
from ejkernel.kernels._specs import _work_attention, _work_linear, _work_matmul, _work_paged
from ejkernel.kernels._specs._work_sparse import _nsa

MODES = ("fwd", "fwd+bwd")
QKV = {"b": 2, "t": 48, "h": 4, "d": 32}
LINEAR = {"b": 1, "t": 70, "h": 2, "d": 16}
LAYER = {"layer_idx": 3, "num_layers": 12}


def call_of(op, make, dtype="float32", grads=None, **sizes):
    return _programs.Call.of(
        Workload(op, "small", functools.partial(make, **sizes), dtype=dtype, grads=grads)
    )


def expected(call, mode):
    public = type(_programs.kernel_of(call.op)).function
    return _programs.pure(call, lambda values: public(**values, platform="xla"), mode)()


def named(name, op, peers=_peers.PEERS):
    (peer,) = (p for p in peers if p.name == name and op in p.ops)
    return peer


def assert_same(actual, call, mode, peer):
    assert peer.why_not(call.values) is None
    assert _check.disagreement(actual, expected(call, mode), peer.tolerance) is None


# torch


@pytest.fixture
def with_torch():
    pytest.importorskip("torch")


def run_torch(peer, call, mode):
    return peer.build(call.values, call.grads, mode, call.cotangent)().arrays()


@pytest.mark.usefixtures("with_torch")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("causal", "groups", "dtype"), [(True, 4, "bfloat16"), (False, 2, "float32")]
)
def test_torch_attention(mode, causal, groups, dtype):
    make = functools.partial(_work_attention.qkv, g=groups, options={"causal": causal})
    call = call_of("flash_attention", make, dtype, **QKV)
    peer = named("torch FA2", "flash_attention", _peers_torch.PEERS)
    expected(call, mode)  # draws the cotangent
    assert_same(run_torch(peer, call, mode), call, mode, peer)


@pytest.mark.usefixtures("with_torch")
def test_torch_attention_over_pages():
    call = call_of("page_attention", _work_paged.page, b=2, s=16, h=4, g=2, d=8, size=4)
    peer = named("torch, gathered", "page_attention", _peers_torch.PEERS)
    assert_same(run_torch(peer, call, "fwd"), call, "fwd", peer)


@pytest.mark.usefixtures("with_torch")
@pytest.mark.parametrize("mode", MODES)
def test_torch_grouped_products(mode):
    call = call_of("grouped_matmul", _work_matmul.grouped, "bfloat16", m=48, k=32, n=64, g=3)
    peer = named("torch", "grouped_matmul", _peers_torch.PEERS)
    expected(call, mode)
    assert_same(run_torch(peer, call, mode), call, mode, peer)


@pytest.mark.usefixtures("with_torch")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cell_type", ["lstm", "gru"])
def test_torch_cells(cell_type, mode):
    make = functools.partial(_work_linear.cell, cell_type=cell_type)
    call = call_of("recurrent", make, grads=("inputs", "hidden", "weights"), b=3, t=5, i=4, d=6)
    peer = named("torch cuDNN", "recurrent", _peers_torch.PEERS)
    told = expected(call, mode)
    actual = run_torch(peer, call, mode)
    assert _check.disagreement(actual, told, 2e-5) is None


def fla_calls():
    gated, pooled = _work_linear.gated, _work_matmul._pooled
    return {
        "gla": (functools.partial(gated, gates=("g",), more={}), LINEAR),
        "lightning_attention": (functools.partial(gated, gates=(), more=LAYER), LINEAR),
        "mean_pooling": (pooled, {"b": 1, "t": 128, "h": 2, "d": 16, "chunk": 64}),
        "native_sparse_attention": (
            _nsa,
            {"t": 128, "h": 16, "g": 1, "d": 16, "count": 2, "gates": True},
        ),
    }


@pytest.mark.usefixtures("with_torch")
@pytest.mark.filterwarnings("ignore")  # FLA's own: it finds no GPU, and uses what torch retires
@pytest.mark.parametrize("op", fla_calls())
def test_fla_takes_these_arguments(op, monkeypatch):
    pytest.importorskip("fla")
    bound = {}

    class Module:
        def __init__(self, name):
            self._real = importlib.import_module(f"fla.ops.{name}")

        def __getattr__(self, name):
            def bind(*args, **kwargs):
                found = inspect.signature(getattr(self._real, name)).bind(*args, **kwargs)
                bound.update(found.arguments)
                return (args[0], None)

            return bind

    monkeypatch.setattr(_peers_torch, "_fla", Module)
    monkeypatch.setattr(_peers_torch, "graphed", lambda run: run)  # what is bound makes no tensors
    make, sizes = fla_calls()[op]
    call = call_of(op, make, **sizes)
    peer = named("FLA", op, _peers_torch.PEERS)
    assert peer.why_not(call.values) is None
    peer.build(call.values, call.grads, "fwd", None)()
    assert len(bound) >= 2


# Other libraries of JAX


def import_tokamax():
    if not _peers._is_installed("tokamax"):
        pytest.skip("needs tokamax, a peer that is no requirement of the tests")
    return _peers._import_tokamax()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, (5, 0)])
def test_tokamax_attention(mode, window, monkeypatch):
    tokamax = import_tokamax()
    plain = tokamax.dot_product_attention
    monkeypatch.setattr(
        tokamax,
        "dot_product_attention",
        lambda *args, implementation, **more: plain(*args, implementation="xla", **more),
    )
    options = {"causal": True} | ({} if window is None else {"sliding_window": window})
    make = functools.partial(_work_attention.qkv, g=2, options=options)
    call, peer = call_of("flash_attention", make, **QKV), named("tokamax", "flash_attention")
    assert_same(_programs.pure(call, peer.run, mode)(), call, mode, peer)


@pytest.mark.parametrize("mode", MODES)
def test_tokamax_grouped_products(mode, monkeypatch):
    tokamax = import_tokamax()
    plain = tokamax.ragged_dot
    monkeypatch.setattr(
        tokamax,
        "ragged_dot",
        lambda *args, implementation, **more: plain(*args, implementation="xla", **more),
    )
    call = call_of("grouped_matmul", _work_matmul.grouped, m=48, k=32, n=64, g=3)
    peer = named("tokamax", "grouped_matmul")
    assert_same(_programs.pure(call, peer.run, mode)(), call, mode, peer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["gla", "lightning_attention"])
def test_jla_recurrences(op, mode, monkeypatch):
    ops = pytest.importorskip("jla.ops")
    plain = ops.linear_attention
    monkeypatch.setattr(
        ops, "linear_attention", lambda *args, impl, **more: plain(*args, impl="reference", **more)
    )
    make, sizes = fla_calls()[op]
    call, peer = call_of(op, make, **sizes), named("jla", op)
    assert_same(_programs.pure(call, peer.run, mode)(), call, mode, peer)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": (5, 0)},
        {"sliding_window": (5, 0), "q_segment_ids": True, "kv_segment_ids": True},
    ],
)
def test_jla_attention_takes_these_arguments(options, monkeypatch):
    module = pytest.importorskip("jla.ops.mosaic_gpu.attention")
    signature, seen = inspect.signature(module.flash_attention), {}

    def bind(*args, **kwargs):
        seen.update(signature.bind(*args, **kwargs).arguments)
        return args[0]

    monkeypatch.setattr(module, "flash_attention", bind)
    make = functools.partial(_work_attention.qkv, g=2, options={"causal": True})
    values = call_of("flash_attention", make, **QKV).values
    ids = jax.numpy.zeros((2, 48), "int32")
    values |= {n: ids if x is True else x for n, x in options.items()}
    peer = named("jla", "flash_attention")
    assert peer.why_not(values) is None
    peer.run(values)
    assert seen.get("sliding_window") == (6 if options else None)
    assert ("segment_ids" in seen) == ("q_segment_ids" in options)
    assert seen.get("backward", "ranged") == ("ranged" if options else "fused")
