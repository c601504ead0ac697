"""The linear recurrence for TPUs, by the cycles of its compiled schedules.

No TPU is needed: libtpu compiles for a chip and writes down what its kernels do in each cycle.
Waiting for memory does not count, and neither does what XLA does around the kernels.
"""

import argparse

import jax
import jax.numpy as jnp

from ejkernel import _device
from ejkernel.aot import _targets, _tpu
from ejkernel.kernels import kernel_registry

_TOKENS, _HEADS, _SIZE = 4096, 8, 128
_SPEC = kernel_registry.spec("linear_recurrence")
_TENSOR = (1, _TOKENS, _HEADS, _SIZE)
# gates of each kind of call, with their shapes
_CALLS = {
    "lightning": {"g_gamma": (_HEADS,)},
    "scalar": {"g": (1, _TOKENS, _HEADS)},
    "gla": {"gk": _TENSOR},
}


def measure(compiler, target, gates):
    """Kernels with their cycles and bytes of spills, forward and backward."""
    [entry] = (e for e in kernel_registry.list(_SPEC.name) if e.name == "pallas/tpu")
    shapes = dict.fromkeys(("query", "key", "value"), _TENSOR) | gates
    values = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "g_gamma" else jnp.bfloat16)
        for name, shape in shapes.items()
    }
    make = lambda values: _SPEC.canonicalize(_SPEC.unpack(_SPEC.complete(values)))

    def forward(values):
        args = make(values)
        return entry.fn(args, entry.heuristic(args, "forward", target))[0]

    def backward(values, dout):
        args = make(values)
        cfg = entry.heuristic(args, "backward", target)
        return entry.backward(args, cfg, (dout,), (), (dout,), frozenset(values))

    dout = jax.ShapeDtypeStruct(_TENSOR, jnp.bfloat16)
    for fn, inputs in ((forward, (values,)), (backward, (values, dout))):
        for kernel in compiler.compile(fn, inputs, {})["kernels"]:
            yield kernel.name, round(kernel.cycles), kernel.spill_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", default="v5e", choices=sorted(_targets.CHIPS))
    parser.add_argument("--calls", nargs="*", default=list(_CALLS), choices=list(_CALLS))
    chosen = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    compiler = _tpu.Compiler(_targets.parse(f"tpu:{chosen.chip}"), "chips")
    target = _device.Target(kind="tpu", model=_targets.CHIPS[chosen.chip].model)
    for call in chosen.calls:
        for name, cycles, spills in measure(compiler, target, _CALLS[call]):
            print(f"{chosen.chip} {call} {name}: {cycles} cycles, {spills} bytes of spills")


if __name__ == "__main__":
    main()
