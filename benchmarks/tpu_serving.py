"""Serving kernels for TPUs: the cycles of their compiled schedules beside those of their copies.

No TPU is needed: libtpu compiles for a chip and writes down what its kernels do in each cycle.
Waiting for memory does not count; the time of the copies alone is bytes of keys and values over the
chip's bandwidth. What XLA does around the kernels does not count either.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _device
from ejkernel.aot import _targets, _tpu
from ejkernel.kernels import kernel_registry

_HEADS, _GROUPS, _SIZE, _CONTEXT = 32, 8, 128, 4096
_BANDWIDTH = {"v4": 1228e9, "v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9}  # bytes a second


def decode(page, batch=64):
    """`page_attention`, and a decoding step of `ragged_page_attention`, of equal sequences."""
    blocks = _CONTEXT // page
    lengths = {"context_lens": np.full(batch, _CONTEXT)}
    ids = {"block_tables": np.zeros((batch, blocks))}
    pages = (batch * blocks, _GROUPS, page, _SIZE)
    query = (batch, _HEADS, _SIZE)
    return "page_attention", {
        "query": query, "key_cache": pages, "value_cache": pages,
    } | lengths | ids  # fmt: skip


def mixed(page, counts):
    """`ragged_page_attention` of sequences with so many queries."""
    batch, blocks = len(counts), _CONTEXT // page
    starts = np.concatenate([[0], np.cumsum(counts)])
    return "ragged_page_attention", {
        "queries": (int(starts[-1]), _HEADS, _SIZE),
        "kv_pages": (batch * blocks, page, 2 * _GROUPS, _SIZE),
        "context_lens": np.full(batch, _CONTEXT),
        "block_tables": np.zeros((batch, blocks)),
        "query_start_loc": starts,
        "num_seqs": np.asarray([batch]),
    }


def rows(batch=64):
    """`ragged_decode_attention` over whole rows."""
    keys = (batch, _CONTEXT, _GROUPS, _SIZE)
    return "ragged_decode_attention", {
        "query": (batch, _HEADS, _SIZE), "key": keys, "value": keys,
        "sequence_start": np.zeros(batch), "sequence_end": np.full(batch, _CONTEXT),
    }  # fmt: skip


_CALLS = {
    "decode, pages of 128": decode(128),
    "decode, pages of 16": decode(16),
    "ragged decode, pages of 128": mixed(128, [1] * 64),
    "ragged decode, pages of 16": mixed(16, [1] * 64),
    "60 decodes and 4 x 1024 queries": mixed(128, [1] * 60 + [1024] * 4),
    "decode, rows": rows(),
}


def measure(compiler, target, op, inputs):
    """The kernels of a call."""
    spec = kernel_registry.spec(op)
    [entry] = (e for e in kernel_registry.list(op) if e.name == "pallas/tpu")
    known = {n: x.astype(np.int32) for n, x in inputs.items() if isinstance(x, np.ndarray)}
    values = {
        n: jax.ShapeDtypeStruct(known[n].shape, jnp.int32)
        if n in known
        else jax.ShapeDtypeStruct(x, jnp.bfloat16)
        for n, x in inputs.items()
    }

    def forward(values):
        args = spec.canonicalize(spec.unpack(spec.complete(values)))
        return entry.fn(args, entry.heuristic(args, "forward", target))[0]

    return compiler.compile(forward, (values,), known)["kernels"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", default="v5e", choices=sorted(_BANDWIDTH))
    parser.add_argument("--calls", nargs="*", default=list(_CALLS), choices=list(_CALLS))
    chosen = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    chip = _targets.CHIPS[chosen.chip]
    compiler = _tpu.Compiler(_targets.parse(f"tpu:{chosen.chip}"), "chips")
    target = _device.Target(kind="tpu", model=chip.model)
    for name in chosen.calls:
        op, inputs = _CALLS[name]
        batch = len(inputs.get("context_lens", inputs.get("sequence_end")))
        read = batch * _CONTEXT * 2 * _GROUPS * _SIZE * 2
        copies = read / _BANDWIDTH[chosen.chip] * chip.clock_hz
        print(f"{chosen.chip} {name}: keys and values once are {copies:.0f} cycles of copies")
        for kernel in measure(compiler, target, op, inputs):
            exact = "" if kernel.exact else " (not every branch weighed)"
            spills = f"{kernel.spill_bytes} bytes of spills"
            print(f"  {kernel.name}: {kernel.cycles:.0f} cycles{exact}, {spills}")


if __name__ == "__main__":
    main()
