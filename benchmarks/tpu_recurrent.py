"""Recurrent layers for TPUs beside our XLA entry, by the cycles of their compiled schedules.

No TPU is needed: libtpu compiles for a chip and writes down what its kernels do in each cycle.
Waiting for memory does not count. Both programs are whole: projections before the steps and
products after them are XLA's in either. Fusions that are alike have one schedule and count once, so
that what XLA takes is a lower bound.
"""

import argparse

import jax
import jax.numpy as jnp
import tpu_linear

from ejkernel import _device
from ejkernel.aot import _targets, _tpu
from ejkernel.kernels import kernel_registry

_SPEC = kernel_registry.spec("recurrent")
# cell, batch, steps, features of inputs and of the state
CALLS = {
    "LSTM B64 T512 1024": ("lstm", 64, 512, 1024),
    "GRU B64 T512 1024": ("gru", 64, 512, 1024),
    "LSTM B16 T256 256": ("lstm", 16, 256, 256),
}
_GATES = {"lstm": 4, "gru": 3}


def programs(entry, target, call):
    """Functions and inputs of forward, and of forward and backward in one program."""
    cell_type, batch, steps, d = call
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    state, m = struct(batch, d), _GATES[cell_type] * d
    shapes = {"w_ih": (m, d), "w_hh": (m, d), "b_ih": (m,), "b_hh": (m,)}
    values = {
        "inputs": struct(batch, steps, d),
        "hidden": (state, state) if cell_type == "lstm" else state,
        "weights": {name: struct(*shape) for name, shape in shapes.items()},
    }

    def make(values):
        complete = _SPEC.complete(values | {"cell_type": cell_type})
        return _SPEC.canonicalize(_SPEC.unpack(complete))

    def forward(values):
        args = make(values)
        return entry.fn(args, entry.heuristic(args, "forward", target))

    def both(values, cotangents):
        args, (outputs, residuals) = make(values), forward(values)
        cfg = entry.heuristic(args, "backward", target)
        wanted = _SPEC.differentiable & args.arrays().keys()
        return outputs, entry.backward(args, cfg, outputs, residuals, cotangents, wanted)

    outputs, _ = jax.eval_shape(forward, values)
    yield "fwd", lambda values: forward(values)[0], (values,)
    yield "fwd+bwd", both, (values, outputs)


def cycles(compiler, fn, inputs):
    """Of a whole program; and of our kernels in it, with bytes of VMEM and spills."""
    traced, compiled, folder = compiler.build(fn, inputs)
    kernels = compiler.kernels(traced, folder, [None] * len(jax.tree.leaves(inputs)))
    if unknown := [k.name for k in kernels if not k.exact]:
        raise RuntimeError(f"The schedule does not tell how often loops of {unknown} run.")
    # what a kernel takes is known better than its schedule alone tells
    lines = [x for x in compiled.as_text().splitlines() if " custom-call(" not in x]
    rest = tpu_linear.program_cycles("\n".join(lines), folder)
    return rest + round(sum(k.cycles for k in kernels)), kernels


def measure(compiler, target, names=tuple(CALLS), others=("pallas/tpu", "xla/any")):
    """Cycles by call, entry and mode."""
    found = {}
    for name in names:
        for entry in (e for e in kernel_registry.list("recurrent") if e.name in others):
            for mode, fn, inputs in programs(entry, target, CALLS[name]):
                total, kernels = cycles(compiler, fn, inputs)
                found.setdefault(name, {}).setdefault(entry.name, {})[mode] = total
                told = "; ".join(
                    f"{k.name} {k.cycles:.0f}, VMEM {k.vmem_bytes}, spills {k.spill_bytes}"
                    for k in kernels
                )
                print(f"{name}, {entry.name}, {mode}: {total} cycles. {told}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", default="v5e", choices=sorted(_targets.CHIPS))
    parser.add_argument("--calls", nargs="*", default=list(CALLS), choices=list(CALLS))
    chosen = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    compiler = _tpu.Compiler(_targets.parse(f"tpu:{chosen.chip}"), "chips")
    target = _device.Target(kind="tpu", model=_targets.CHIPS[chosen.chip].model)
    measure(compiler, target, chosen.calls)


if __name__ == "__main__":
    main()
