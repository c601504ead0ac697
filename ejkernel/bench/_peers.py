"""Peers in JAX: what JAX itself offers, plain code as one writes it down, and other libraries."""

# pyright: reportMissingImports=false

import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.bench._workloads import Peer, Workload

_FLASH = ("flash_attention",)
_LINEAR = ("gla", "lightning_attention", "linear_recurrence")


def known(op: str, device_kind: str) -> list[Peer]:
    """The peers of an op that are installed here and run on this kind of device."""
    from ejkernel.bench import _peers_torch

    return [
        peer
        for peer in (*PEERS, *_peers_torch.PEERS)
        if op in peer.ops and peer.backend in ("", device_kind) and not missing(peer)
    ]


def of(workload: Workload, device_kind: str, wanted: Sequence[str] | None) -> list[Peer]:
    """A workload's own peers and the known ones, those that are wanted."""
    every = [*workload.peers, *(known(workload.op, device_kind) if workload.known_peers else ())]
    return [peer for peer in every if wanted is None or peer.name in wanted]


def missing(peer: Peer) -> list[str]:
    """Modules that a peer needs and that are not installed."""
    return [name for name in peer.needs if not _is_installed(name)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def only(values: dict[str, Any], *allowed: str) -> str | None:
    """Which arguments a peer does not have, of those that a call sets."""
    given = {n for n, x in values.items() if x is not None and x is not False}
    unknown = sorted(given - {"query", "key", "value", *allowed})
    return f"it has no {', '.join(unknown)}" if unknown else None


def square(values: dict[str, Any], *allowed: str) -> str | None:
    """As `only`, for a peer whose causal mask begins at the first key instead of the last."""
    if values["query"].shape[1] != values["key"].shape[1]:
        return "its causal mask means something else where lengths differ"
    return only(values, "causal", *allowed)


# jax.nn


def _jax_nn(implementation: Any) -> Any:
    def run(values: dict[str, Any]) -> Any:
        return jax.nn.dot_product_attention(
            values["query"],
            values["key"],
            values["value"],
            is_causal=values.get("causal", False),
            local_window_size=values.get("sliding_window"),
            implementation=implementation,
        )

    return run


def _jax_nn_why_not(values: dict[str, Any]) -> str | None:
    return square(values, "sliding_window")


def _gathered(values: dict[str, Any]) -> Any:
    """Keys of a table's pages copied side by side, then `jax.nn`."""
    tables = values["block_tables"]
    rows = (tables.shape[0], -1)
    k, v = (
        values[name][tables].swapaxes(2, 3).reshape(*rows, *values[name].shape[1::2])
        for name in ("key_cache", "value_cache")
    )
    query, lens = values["query"][:, None], values["context_lens"]
    return jax.nn.dot_product_attention(query, k, v, key_value_seq_lengths=lens)[:, 0]


def _contiguous(values: dict[str, Any]) -> Any:
    query, lens = values["query"][:, None], values["sequence_end"]
    k, v = values["key"], values["value"]
    return jax.nn.dot_product_attention(query, k, v, key_value_seq_lengths=lens)[:, 0]


def _whole_rows(values: dict[str, Any]) -> str | None:
    allowed = ("key_cache", "value_cache", "context_lens", "block_tables")
    reason = only(values, *allowed, "sequence_start", "sequence_end")
    if reason is None and np.asarray(values.get("sequence_start", 0)).any():
        return "it reads from the first key on"
    return reason


def _gathered_ragged(values: dict[str, Any]) -> Any:
    """One query a sequence over pages of keys and values in turns."""
    pages, tables = values["kv_pages"], values["block_tables"]
    rows = pages[tables].reshape(tables.shape[0], -1, *pages.shape[2:])
    query, lens = values["queries"][:, None], values["context_lens"]
    k, v = rows[:, :, ::2], rows[:, :, 1::2]
    return jax.nn.dot_product_attention(query, k, v, key_value_seq_lengths=lens)[:, 0]


def _decodes(values: dict[str, Any]) -> str | None:
    if values["queries"].shape[0] != values["block_tables"].shape[0]:
        return "it takes one query a sequence"
    allowed = ("queries", "kv_pages", "context_lens", "block_tables", "query_start_loc", "num_seqs")
    return only(values, *allowed)


# Plain code


def _scan(values: dict[str, Any]) -> Any:
    """A linear recurrence, one token at a time."""
    q, k, v = (values[name] for name in ("query", "key", "value"))
    batch, _, heads, d = q.shape
    gates = values.get("g", values.get("gk"))
    if gates is None:
        from ejkernel.modules import lightning_decay

        decay = lightning_decay(heads, values["layer_idx"], values["num_layers"])
        gates = jnp.broadcast_to(decay[:, None], (*q.shape[:3], 1))

    def step(h: jax.Array, x: Any) -> Any:
        q, k, v, g = (y.astype(jnp.float32) for y in x)
        h = jnp.exp(g)[..., None] * h + k[..., None] * v[..., None, :]
        return h, jnp.einsum("bhd,bhde->bhe", q * d**-0.5, h).astype(values["query"].dtype)

    start = jnp.zeros((batch, heads, d, v.shape[-1]))
    tokens = [x.swapaxes(0, 1) for x in (q, k, v, gates)]
    return jax.lax.scan(step, start, tokens)[1].swapaxes(0, 1)


def _scan_why_not(values: dict[str, Any]) -> str | None:
    if len({values[name].shape[2] for name in ("query", "key", "value")}) > 1:
        return "it has one number of heads"
    return only(values, "g", "gk", "layer_idx", "num_layers")


def _cell(values: dict[str, Any]) -> Any:
    """An LSTM or GRU that projects each step's input inside the scan."""
    weights, lstm = values["weights"], values["cell_type"] == "lstm"
    start = values["hidden"] if lstm else (values["hidden"],)

    def lstm_step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        i, f, g, o = jnp.split(x + y, 4, axis=-1)
        c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def gru_step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        (xr, xz, xn), (yr, yz, yn) = jnp.split(x, 3, axis=-1), jnp.split(y, 3, axis=-1)
        r, z = jax.nn.sigmoid(xr + yr), jax.nn.sigmoid(xz + yz)
        return ((1 - z) * jnp.tanh(xn + r * yn) + z * state[0],)

    def step(state: Any, x: jax.Array) -> Any:
        x = x @ weights["w_ih"].T + weights["b_ih"]
        y = state[0] @ weights["w_hh"].T + weights["b_hh"]
        state = (lstm_step if lstm else gru_step)(state, x, y)
        return state, state[0]

    state, out = jax.lax.scan(step, start, values["inputs"].swapaxes(0, 1))
    return out.swapaxes(0, 1), state if lstm else state[0]


def _cell_why_not(values: dict[str, Any]) -> str | None:
    return only(values, "inputs", "hidden", "weights", "cell_type")


def _all_heads(values: dict[str, Any]) -> Any:
    """Latent attention over keys and values of all heads."""
    latent, rope = values["key_value"], values["b_k"]
    k, v = (jnp.einsum("bsl,lhd->bshd", latent, values[n]) for n in ("w_kc", "w_vc"))
    k = jnp.concatenate([k, jnp.broadcast_to(rope[:, :, None], (*k.shape[:3], rope.shape[-1]))], -1)
    q = jnp.concatenate([values["query"], values["b_q"]], -1)
    t, s = q.shape[1], k.shape[1]
    x = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(s)[None] <= jnp.arange(t)[:, None] + s - t
    weights = jax.nn.softmax(jnp.where(seen, x * q.shape[-1] ** -0.5, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v)


def _latent_rows(values: dict[str, Any]) -> Any:
    """One query a sequence over latent vectors copied side by side."""
    pages, tables = values["kv_pages"], values["block_tables"]
    rows = pages[tables].reshape(tables.shape[0], -1, pages.shape[-1])
    q = jnp.concatenate([values["q_nope"], values["q_pe"]], -1)
    x = jnp.einsum("bhd,bsd->bhs", q, rows, preferred_element_type=jnp.float32)
    seen = (jnp.arange(rows.shape[1])[None] < values["context_lens"][:, None])[:, None]
    weights = jax.nn.softmax(jnp.where(seen, x * values["softmax_scale"], -jnp.inf), axis=-1)
    latent = rows[..., : values["q_nope"].shape[-1]]
    return jnp.einsum("bhs,bsl->bhl", weights.astype(rows.dtype), latent)


def _means(values: dict[str, Any]) -> Any:
    x, size = values["inputs"], values["chunk_size"]
    return x.reshape(x.shape[0], -1, size, *x.shape[2:]).mean(axis=2)


def _means_why_not(values: dict[str, Any]) -> str | None:
    size = values.get("chunk_size")
    if size is None or values["inputs"].shape[1] % size:
        return "it takes whole chunks"
    return only(values, "inputs", "chunk_size")


def _ragged_dot(values: dict[str, Any]) -> Any:
    return jax.lax.ragged_dot(values["lhs"], values["rhs"], values["group_sizes"])


def _groups_why_not(values: dict[str, Any]) -> str | None:
    return only(values, "lhs", "rhs", "group_sizes")


# Other libraries


def _import_tokamax() -> Any:
    """Tokamax without its profiler where that is not installed, and without pages of warnings."""
    if "tokamax" not in sys.modules and not _is_installed(
        "xprof"
    ):  # it is imported for benchmarks that nobody starts here
        tools = types.ModuleType("xprof.cli.tools")
        tools.__dict__["get_kernel_stats_tool"] = None
        packages = {name: types.ModuleType(name) for name in ("xprof", "xprof.cli")}
        sys.modules.update(packages | {tools.__name__: tools})
    logging.getLogger("absl").setLevel(logging.ERROR)  # every call that its cache has not seen
    return importlib.import_module("tokamax")


def _tokamax_attention(values: dict[str, Any]) -> Any:
    tokamax = _import_tokamax()
    q, k, v = (values[name] for name in ("query", "key", "value"))
    options = {"is_causal": values.get("causal", False), "implementation": "mosaic_gpu"}
    if (window := values.get("sliding_window")) is not None:
        options["local_window_size"] = window
    return tokamax.dot_product_attention(q, k, v, **options)


def _tokamax_ragged_dot(values: dict[str, Any]) -> Any:
    tokamax = _import_tokamax()
    arrays = (values["lhs"], values["rhs"], values["group_sizes"])
    return tokamax.ragged_dot(*arrays, implementation="mosaic_gpu")


def _jla_attention(values: dict[str, Any]) -> Any:
    from jla.ops.mosaic_gpu.attention import flash_attention

    options: dict[str, Any] = {}
    if (window := values.get("sliding_window")) is not None:
        options["sliding_window"] = window[0] + 1  # it counts the own key
    if (ids := values.get("q_segment_ids")) is not None:
        options["segment_ids"] = ids
    options = options or {"backward": "fused"}  # the faster one, where all blocks are visited
    return flash_attention(*(values[name] for name in ("query", "key", "value")), **options)


def _jla_attention_why_not(values: dict[str, Any]) -> str | None:
    if not values.get("causal"):
        return "it is causal always"
    return square(values, "sliding_window", "q_segment_ids", "kv_segment_ids")


def _jla_linear(values: dict[str, Any]) -> Any:
    from jla import ops

    q, k, v = (values[name] for name in ("query", "key", "value"))
    gates, kind = values.get("g", values.get("gk")), "gla"
    if gates is None:
        from ejkernel.modules import lightning_decay

        decay = lightning_decay(q.shape[2], values["layer_idx"], values["num_layers"])
        gates, kind = jnp.broadcast_to(decay, q.shape[:3]).astype(jnp.float32), "simple_gla"
    return ops.linear_attention(kind, q, k, v, g=gates, impl="mosaic_gpu")[0]


def _jla_ragged_dot(values: dict[str, Any]) -> Any:
    from jla.ops.mosaic_gpu import ragged_dot

    return ragged_dot.ragged_dot(values["lhs"], values["rhs"], values["group_sizes"])


PEERS: Sequence[Peer] = (
    Peer("jax.nn", _FLASH, _jax_nn("xla"), why_not=_jax_nn_why_not),
    Peer("jax.nn cuDNN", _FLASH, _jax_nn("cudnn"), why_not=_jax_nn_why_not, backend="gpu"),
    Peer("jax.nn, gathered", ("page_attention",), _gathered, why_not=_whole_rows),
    Peer("jax.nn", ("ragged_decode_attention",), _contiguous, why_not=_whole_rows),
    Peer("jax.nn, gathered", ("ragged_page_attention",), _gathered_ragged, why_not=_decodes),
    Peer("lax.scan", _LINEAR, _scan, why_not=_scan_why_not),
    Peer("lax.scan", ("recurrent",), _cell, why_not=_cell_why_not, tolerance=5e-5),
    Peer("plain, all heads", ("mla_attention",), _all_heads),
    Peer("plain, gathered", ("mla_page_attention",), _latent_rows),
    Peer("jnp.mean", ("mean_pooling",), _means, why_not=_means_why_not),
    Peer("lax.ragged_dot", ("grouped_matmul",), _ragged_dot, why_not=_groups_why_not),
    Peer(
        "tokamax",
        _FLASH,
        _tokamax_attention,
        needs=("tokamax",),
        backend="gpu",
        why_not=_jax_nn_why_not,
    ),
    Peer(
        "tokamax",
        ("grouped_matmul",),
        _tokamax_ragged_dot,
        needs=("tokamax",),
        backend="gpu",
        why_not=_groups_why_not,
    ),
    Peer(
        "jla",
        _FLASH,
        _jla_attention,
        needs=("jla",),
        backend="gpu",
        why_not=_jla_attention_why_not,
    ),
    Peer("jla", _LINEAR, _jla_linear, needs=("jla",), backend="gpu", why_not=_scan_why_not),
    Peer(
        "jla",
        ("grouped_matmul",),
        _jla_ragged_dot,
        needs=("jla",),
        backend="gpu",
        why_not=_groups_why_not,
    ),
)
