"""Block-sparse attention for TPUs beside our dense attention, by the cycles of their schedules."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import kernel_registry

TOKENS, BLOCK, SIZE, DENSITY = 32768, 128, 128, 8
WORKLOAD = f"B1 S{TOKENS} H1 d{SIZE}, blocks of {BLOCK}, 1/{DENSITY} of them"
DENSE = "flash_attention pallas/tpu, no mask"


def mask():
    """As many blocks in each row, at places of its own: columns have more or fewer."""
    count, draw = TOKENS // BLOCK, np.random.default_rng(0)
    made = np.zeros((1, 1, count, count), bool)
    for row in made[0, 0]:
        row[draw.choice(count, count // DENSITY, replace=False)] = True
    return made


def _cycles(compiler, target, op, direction, known):
    spec = kernel_registry.spec(op)
    [entry] = (e for e in kernel_registry.list(op) if e.name == "pallas/tpu")
    shape = jax.ShapeDtypeStruct((1, TOKENS, 1, SIZE), jnp.bfloat16)
    values = dict.fromkeys(("query", "key", "value"), shape)
    values |= {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in known.items()}
    options = {"block_size": BLOCK} if known else {}
    make = lambda values: spec.canonicalize(spec.unpack(spec.complete(values | options)))

    def forward(values):
        args = make(values)
        return entry.fn(args, entry.heuristic(args, direction, target))

    def backward(values, lse, out, dout):
        args = make(values)
        cfg = entry.heuristic(args, direction, target)
        wanted = frozenset({"query", "key", "value"})
        return entry.backward(args, cfg, (out,), (lse,), (dout,), wanted)

    lse = jax.ShapeDtypeStruct((1, 1, TOKENS), jnp.float32)
    fn, rest = (forward, ()) if direction == "forward" else (backward, (lse, shape, shape))
    kernels = compiler.compile(fn, (values, *rest), known)["kernels"]
    if not kernels or not all(k.exact for k in kernels):
        raise RuntimeError(f"The schedule of {op}, {direction}, was not weighed.")
    return round(sum(k.cycles for k in kernels))


def measure(compiler, target):
    """Cycles of block-sparse and of dense attention, by direction."""
    calls = {"sparse": ("blocksparse_attention", {"sparsity_mask": mask()})}
    calls["dense"] = ("flash_attention", {})
    return {
        name: {way: _cycles(compiler, target, op, way, known) for way in ("forward", "backward")}
        for name, (op, known) in calls.items()
    }
