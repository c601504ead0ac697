"""Peers in torch: its own kernels and those of FLA, on the arrays of the call, without a copy."""

# pyright: reportMissingImports=false

import concurrent.futures
import functools
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ejkernel.bench import _workloads
from ejkernel.bench._workloads import FWD, Peer
from ejkernel.errors import EjkernelWarning

_TORCH = ("torch",)
_FLA = ("torch", "fla")
_THREADS = 16  # that compile configurations of a kernel together


class Tensors:
    """Results of torch, which the one timer waits for as it waits for arrays of JAX."""

    def __init__(self, *tensors: Any):
        self.tensors = tensors

    def block_until_ready(self) -> "Tensors":
        import torch

        if any(x.is_cuda for x in self.tensors):
            torch.cuda.synchronize()
        return self

    def arrays(self) -> list[jax.Array]:
        """The same memory as arrays of JAX, for the comparison."""
        return [jax.dlpack.from_dlpack(x.detach().contiguous()) for x in self.tensors]


class Replayed:
    """A program of torch that is replayed from a CUDA graph; `note` says why, if it is not."""

    def __init__(self, run: Callable[[], Tensors], note: str = ""):
        self._run, self.note = run, note

    def __call__(self) -> Tensors:
        return self._run()


def tensor(value: Any) -> Any:
    """An array of JAX as a torch tensor, in the same memory."""
    import torch

    return torch.from_dlpack(value)


def program(
    forward: Callable[[dict[str, Any]], Any],
    values: dict[str, Any],
    grads: Sequence[str],
    mode: str,
    cotangent: Any,
) -> Callable[[], Tensors]:
    """Outputs, and gradients by autograd where the mode has them, in the order of their names.

    That is the order in which JAX flattens the gradients of our own program.
    """
    import torch

    traced, static = _workloads.split(values)
    tensors = {name: tensor(x) for name, x in traced.items()}
    if mode == FWD:

        def run() -> Tensors:
            with torch.no_grad():
                return Tensors(forward({**static, **tensors}))

        return run
    leaves = {name: tensors[name].detach().requires_grad_() for name in sorted(grads)}
    seed = tensor(cotangent)

    def both() -> Tensors:
        out = forward({**static, **tensors, **leaves})
        return Tensors(out, *torch.autograd.grad(out, list(leaves.values()), seed))

    return both


def graphed(run: Callable[[], Tensors]) -> Replayed:
    """The program replayed from a CUDA graph: it launches no kernel from the host.

    Our own programs are graphs of XLA's; without this, many short kernels would be compared by
    what Python costs. What cannot be recorded is launched by Python, and its row says so. On a CPU
    there are no graphs.
    """
    import torch

    if not any(x.is_cuda for x in run().tensors):
        return Replayed(run)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # kernels are compiled and tuned before they are recorded
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # other threads of this process, such as XLA's, may do what this one must not meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = run()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return Replayed(run, f"launched by Python: {' '.join(str(error).split())[:120]}")

    def replay() -> Tensors:
        graph.replay()
        return made

    return Replayed(replay)


def release() -> None:
    """Gives back the memory of programs that are gone, where torch was used."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _peer(name: str, op: str, forward: Callable[[dict[str, Any]], Any], **more: Any) -> Peer:
    def build(values: dict[str, Any], grads: Any, mode: str, cotangent: Any) -> Any:
        return graphed(program(forward, values, grads, mode, cotangent))

    more = {"needs": _TORCH, "backend": "gpu"} | more
    return Peer(name, (op,), build=build, **more)


def _sdpa(backend: str) -> Callable[[dict[str, Any]], Any]:
    """Attention of torch, which takes heads before tokens."""

    def forward(values: dict[str, Any]) -> Any:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (values[name].transpose(1, 2) for name in ("query", "key", "value"))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=values.get("causal", False),
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out.transpose(1, 2)

    return forward


def _attention_why_not(values: dict[str, Any]) -> str | None:
    from ejkernel.bench import _peers

    return _peers.square(values)


def _gathered(values: dict[str, Any]) -> Any:
    """What plain torch does with a page table: it copies the pages, then attends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tables = values["block_tables"].long()
    k, v = (
        values[name][tables].transpose(1, 2).flatten(2, 3) for name in ("key_cache", "value_cache")
    )
    query = values["query"][:, :, None]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, k, v, enable_gqa=query.shape[1] != k.shape[1])[:, :, 0]


def _full_tables(values: dict[str, Any]) -> str | None:
    from ejkernel.bench import _peers

    room = values["block_tables"].shape[1] * values["key_cache"].shape[2]
    if int(values["context_lens"].min()) != room:
        return "it takes sequences of one length"
    return _peers.only(values, "key_cache", "value_cache", "context_lens", "block_tables")


def _grouped(values: dict[str, Any]) -> Any:
    import torch

    ends = values["group_sizes"].cumsum(0).to(torch.int32)
    return torch._grouped_mm(values["lhs"], values["rhs"], offs=ends)


def _groups_why_not(values: dict[str, Any]) -> str | None:
    from ejkernel.bench import _peers

    return _peers.only(values, "lhs", "rhs", "group_sizes")


_CELL_NAMES = {
    "b_hh": "bias_hh_l0",
    "b_ih": "bias_ih_l0",
    "w_hh": "weight_hh_l0",
    "w_ih": "weight_ih_l0",
}


def _cells(values: dict[str, Any], grads: Any, mode: str, cotangent: Any) -> Any:
    """LSTM or GRU of cuDNN: the outputs, the last states, and gradients in the order of ours."""
    import torch

    weights, lstm = values["weights"], values["cell_type"] == "lstm"
    inputs, hidden = tensor(values["inputs"]), values["hidden"]
    states = [tensor(x) for x in (hidden if lstm else (hidden,))]
    kind = torch.nn.LSTM if lstm else torch.nn.GRU
    features = weights["w_ih"].shape[1]
    module = kind(features, weights["w_hh"].shape[1], batch_first=True)
    module = module.to(inputs.device, inputs.dtype)
    with torch.no_grad():
        for ours, theirs in _CELL_NAMES.items():
            getattr(module, theirs).copy_(tensor(weights[ours]))
    module.flatten_parameters()

    def forward(inputs: Any, states: list[Any]) -> list[Any]:
        first = [x[None] for x in states]  # one layer
        out, last = module(inputs, tuple(first) if lstm else first[0])
        return [out, *(x[0] for x in (last if lstm else (last,)))]

    if mode == FWD:

        def run() -> Tensors:
            with torch.no_grad():
                return Tensors(*forward(inputs, states))

        return graphed(run)
    inputs, *states = (x.detach().requires_grad_() for x in (inputs, *states))
    found = {"hidden": states, "inputs": [inputs]}
    found["weights"] = [getattr(module, theirs) for theirs in _CELL_NAMES.values()]
    wanted = [x for name in sorted(grads) for x in found[name]]
    seeds = [tensor(x) for x in jax.tree.leaves(cotangent)]

    def both() -> Tensors:
        outputs = forward(inputs, states)
        return Tensors(*outputs, *torch.autograd.grad(outputs, wanted, seeds))

    return graphed(both)


@functools.cache
def _tune_quickly() -> None:
    """Makes Triton's own tuner, which FLA uses, compile all configurations of a kernel at once.

    FLA tries 266 for the forward and backward of one call of `gla`, at about a second each. It
    also times each for 30 ms instead of 125, of kernels that take a millisecond or less.
    """
    from triton.runtime import autotuner
    from triton.testing import do_bench

    pruned = autotuner.Autotuner.prune_configs

    def quick(self: Any) -> Any:
        return lambda call, quantiles: do_bench(call, warmup=5, rep=25, quantiles=quantiles)

    def compiled(self: Any, kwargs: dict[str, Any]) -> Any:
        configs = pruned(self, kwargs)
        options = {name: x for name, x in kwargs.items() if name != "warmup"}
        # It only saves time: Triton's tuner compiles again what is missing here, and raises there
        # what is wrong with a kernel. Compilers and versions of Triton raise errors of any type.
        try:
            _compile_together(self.fn, tuple(self.nargs.values()), options, configs)
        except Exception as error:  # noqa: BLE001 - the peer runs all the same, with a warning
            text = f"configurations of a peer are compiled one by one: {error}"
            warnings.warn(text, EjkernelWarning, stacklevel=2)
        return configs

    autotuner.Autotuner.do_bench = property(quick)
    autotuner.Autotuner.prune_configs = compiled


def _compile_together(kernel: Any, args: tuple[Any, ...], kwargs: Any, configs: Any) -> None:
    """Compiles a kernel with every configuration, in threads; most of it is not Python's work."""
    from triton.runtime import _async_compile

    with (
        concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, _THREADS)) as pool,
        # what fails to compile fails once more, and is passed over, when it is timed
        _async_compile.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for config in configs:
            kernel.warmup(*args, **kwargs, **config.all_kwargs())


def _fla(module: str) -> Any:
    """A module of FLA's."""
    _tune_quickly()
    return importlib.import_module(f"fla.ops.{module}")


def _fla_gla(values: dict[str, Any]) -> Any:
    chunk_gla = _fla("gla").chunk_gla
    return chunk_gla(*(values[name] for name in ("query", "key", "value", "g")))[0]


def _fla_lightning(values: dict[str, Any]) -> Any:
    chunk_lightning_attn = _fla("lightning_attn").chunk_lightning_attn
    q, k, v = (values[name] for name in ("query", "key", "value"))
    return chunk_lightning_attn(q, k, v, values["layer_idx"], values["num_layers"])[0]


def _fla_means(values: dict[str, Any]) -> Any:
    return _fla("utils.pooling").mean_pooling(values["inputs"], values["chunk_size"], None)


def _means_why_not(values: dict[str, Any]) -> str | None:
    from ejkernel.bench import _peers

    if values.get("chunk_size") is None:
        return "it takes chunks"
    return _peers.only(values, "inputs", "chunk_size")


def _fla_nsa(values: dict[str, Any]) -> Any:
    q, k, v = (values[name] for name in ("query", "key", "value"))
    sizes = {"block_counts": values["block_counts"], "block_size": values["block_size"]}
    gates = {"g_cmp": values.get("g_cmp"), "g_slc": values.get("g_slc")}
    return _fla("nsa").parallel_nsa(q, k, v, **gates, **sizes, window_size=0)


def _nsa_why_not(values: dict[str, Any]) -> str | None:
    if values.get("g_cmp") is None:
        return "it selects blocks only with a compressed branch"
    return None


PEERS: Sequence[Peer] = (
    _peer("torch cuDNN", "flash_attention", _sdpa("CUDNN_ATTENTION"), why_not=_attention_why_not),
    _peer("torch FA2", "flash_attention", _sdpa("FLASH_ATTENTION"), why_not=_attention_why_not),
    _peer(
        "torch",
        "flash_attention",
        _sdpa("FLASH_ATTENTION"),
        why_not=_attention_why_not,
        backend="cpu",
    ),
    _peer(
        "torch, gathered",
        "page_attention",
        _gathered,
        why_not=_full_tables,
        modes=(FWD,),
        backend="",
    ),
    _peer("torch", "grouped_matmul", _grouped, why_not=_groups_why_not, backend=""),
    Peer("torch", ("recurrent",), build=_cells, needs=_TORCH, backend="cpu", tolerance=5e-5),
    Peer(
        "torch cuDNN",
        ("recurrent",),
        build=_cells,
        needs=_TORCH,
        backend="gpu",
        # it rounds its states to bfloat16 at every step: a gradient was 4 % off after 256 of them
        tolerance=0.1,
    ),
    _peer("FLA", "gla", _fla_gla, needs=_FLA, tolerance=0.05),
    _peer("FLA", "lightning_attention", _fla_lightning, needs=_FLA, tolerance=0.05),
    _peer("FLA", "mean_pooling", _fla_means, needs=_FLA, why_not=_means_why_not),
    _peer(
        "FLA",
        "native_sparse_attention",
        _fla_nsa,
        needs=_FLA,
        why_not=_nsa_why_not,
        agrees=False,  # blocks that are about as important may be chosen otherwise
    ),
)
