"""Peers in torch: its own kernels and those of FLA, on the arrays of the call, without a copy."""

# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ejkernel.bench import _workloads
from ejkernel.bench._workloads import BOTH, FWD, Peer

_TORCH = ("torch",)
_FLA = ("torch", "fla")


class Tensors:
    """Results of torch, which the one timer waits for as it waits for arrays of JAX."""

    def __init__(self, *tensors: Any):
        self.tensors = tensors

    def block_until_ready(self) -> "Tensors":
        import torch

        torch.cuda.synchronize()
        return self

    def arrays(self) -> list[jax.Array]:
        """The same memory as arrays of JAX, for the comparison."""
        return [jax.dlpack.from_dlpack(x.detach().contiguous()) for x in self.tensors]


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


def graphed(run: Callable[[], Tensors]) -> Callable[[], Tensors]:
    """The program replayed from a CUDA graph: it launches no kernel from the host.

    Our own programs are graphs of XLA's; without this, many short kernels would be compared by
    what Python costs.
    """
    import torch

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # kernels are compiled and tuned before they are recorded
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()

    def replay() -> Tensors:
        graph.replay()
        return made

    return replay


def _peer(
    name: str,
    op: str,
    forward: Callable[[dict[str, Any]], Any],
    graph: bool = False,
    **more: Any,
) -> Peer:
    def build(values: dict[str, Any], grads: Any, mode: str, cotangent: Any) -> Any:
        made = program(forward, values, grads, mode, cotangent)
        return graphed(made) if graph else made

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


def _cells(values: dict[str, Any], grads: Any, mode: str, cotangent: Any) -> Any:
    """LSTM or GRU of cuDNN; gradients of inputs and weights."""
    import torch

    weights, lstm = values["weights"], values["cell_type"] == "lstm"
    inputs, hidden = tensor(values["inputs"]), values["hidden"]
    states = tuple(tensor(x)[None] for x in (hidden if lstm else (hidden,)))
    kind = torch.nn.LSTM if lstm else torch.nn.GRU
    features = weights["w_ih"].shape[1]
    module = kind(features, weights["w_hh"].shape[1], batch_first=True)
    module = module.to(inputs.device, inputs.dtype)
    names = {"w_ih": "weight_ih_l0", "w_hh": "weight_hh_l0", "b_ih": "bias_ih_l0"}
    names["b_hh"] = "bias_hh_l0"
    with torch.no_grad():
        for ours, theirs in names.items():
            getattr(module, theirs).copy_(tensor(weights[ours]))
    module.flatten_parameters()
    if mode == FWD:

        def run() -> Tensors:
            with torch.no_grad():
                return Tensors(module(inputs, states if lstm else states[0])[0])

        return run
    seed, x = tensor(cotangent[0]), inputs.detach().requires_grad_()
    wanted = [x, *module.parameters()]

    def both() -> Tensors:
        out = module(x, states if lstm else states[0])[0]
        return Tensors(out, *torch.autograd.grad(out, wanted, seed))

    return both


def _fla_gla(values: dict[str, Any]) -> Any:
    from fla.ops.gla import chunk_gla

    return chunk_gla(*(values[name] for name in ("query", "key", "value", "g")))[0]


def _fla_lightning(values: dict[str, Any]) -> Any:
    from fla.ops.lightning_attn import chunk_lightning_attn

    q, k, v = (values[name] for name in ("query", "key", "value"))
    return chunk_lightning_attn(q, k, v, values["layer_idx"], values["num_layers"])[0]


def _fla_means(values: dict[str, Any]) -> Any:
    from fla.ops.utils.pooling import mean_pooling

    return mean_pooling(values["inputs"], values["chunk_size"], None)


def _means_why_not(values: dict[str, Any]) -> str | None:
    from ejkernel.bench import _peers

    if values.get("chunk_size") is None:
        return "it takes chunks"
    return _peers.only(values, "inputs", "chunk_size")


def _fla_nsa(values: dict[str, Any]) -> Any:
    from fla.ops.nsa import parallel_nsa

    q, k, v = (values[name] for name in ("query", "key", "value"))
    sizes = {"block_counts": values["block_counts"], "block_size": values["block_size"]}
    gates = {"g_cmp": values.get("g_cmp"), "g_slc": values.get("g_slc")}
    return parallel_nsa(q, k, v, **gates, **sizes, window_size=0)


def _nsa_why_not(values: dict[str, Any]) -> str | None:
    if values.get("g_cmp") is None:
        return "it selects blocks only with a compressed branch"
    return None


PEERS: Sequence[Peer] = (
    _peer("torch cuDNN", "flash_attention", _sdpa("CUDNN_ATTENTION"), why_not=_attention_why_not),
    _peer("torch FA2", "flash_attention", _sdpa("FLASH_ATTENTION"), why_not=_attention_why_not),
    _peer("torch, gathered", "page_attention", _gathered, why_not=_full_tables, modes=(FWD,)),
    _peer("torch", "grouped_matmul", _grouped, why_not=_groups_why_not),
    Peer(
        "torch cuDNN",
        ("recurrent",),
        build=_cells,
        needs=_TORCH,
        backend="gpu",
        agrees=False,  # it has no gradient of the final state in common with ours
    ),
    _peer("FLA", "gla", _fla_gla, graph=True, needs=_FLA, tolerance=0.05),
    _peer("FLA", "lightning_attention", _fla_lightning, graph=True, needs=_FLA, tolerance=0.05),
    _peer("FLA", "mean_pooling", _fla_means, needs=_FLA, why_not=_means_why_not),
    _peer(
        "FLA",
        "native_sparse_attention",
        _fla_nsa,
        needs=_FLA,
        why_not=_nsa_why_not,
        modes=(FWD, BOTH),
        agrees=False,  # blocks that are about as important may be chosen otherwise
    ),
)
