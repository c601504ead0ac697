"""A mixture of experts in plain JAX: each token goes to its best two of eight experts.

Tokens are sorted by expert, so that `grouped_matmul` multiplies each one by the matrices of its own
expert and by no others. The layer learns eight linear maps, one for each cluster of tokens. Stops
with an error when the loss does not halve, or when outputs or gradients differ from those of a
plain loop over the experts, or of the layer with its experts on four devices.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.modules import grouped_matmul
from ejkernel.ops import policy_override

EXPERTS, TOP, DEVICES = 8, 2, 4
TOKENS, WIDTH, HIDDEN = 256, 16, 32
RATE, DECAY_1, DECAY_2 = 2e-2, 0.9, 0.99  # Adam

Params = dict[str, jax.Array]
Mixture = Callable[[Params, jax.Array], jax.Array]


def init(key: jax.Array) -> Params:
    keys = jax.random.split(key, 3)
    shapes = {"router": (WIDTH, EXPERTS)}
    shapes |= {"w_in": (EXPERTS, WIDTH, HIDDEN), "w_out": (EXPERTS, HIDDEN, WIDTH)}
    return {
        name: jax.random.normal(k, shape) / math.sqrt(shape[-2])
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def route(router: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights and numbers of each token's experts, [tokens, TOP]."""
    logits, chosen = jax.lax.top_k(tokens @ router, TOP)
    return jax.nn.softmax(logits), chosen


def mixture(params: Params, tokens: jax.Array, first: Any = None) -> jax.Array:
    """The layer; with `first`, the part of it that the experts from that one on contribute."""
    weights, chosen = route(params["router"], tokens)
    pairs = chosen.reshape(-1)  # a token and one of its experts
    order = jnp.argsort(pairs, stable=True)
    sizes = jnp.bincount(pairs, length=EXPERTS)
    multiply = functools.partial(grouped_matmul, group_sizes=sizes, group_offset=first)
    # rows of experts that are elsewhere are 0 after either product
    hidden = jax.nn.silu(multiply(tokens[order // TOP], params["w_in"]))
    out = multiply(hidden, params["w_out"]) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(tokens).at[order // TOP].add(out)


def dense(params: Params, tokens: jax.Array) -> jax.Array:
    """The same as a loop in which every expert sees every token."""
    weights, chosen = route(params["router"], tokens)
    out = jnp.zeros_like(tokens)
    for i in range(EXPERTS):
        weight = jnp.where(chosen == i, weights, 0.0).sum(axis=1)[:, None]
        out += weight * (jax.nn.silu(tokens @ params["w_in"][i]) @ params["w_out"][i])
    return out


def sharded() -> Mixture:
    """The layer with two experts on each of four devices; tokens are everywhere."""
    mesh = Mesh(np.asarray(jax.devices()[:DEVICES]), ("experts",))
    specs = {"router": P(), "w_in": P("experts"), "w_out": P("experts")}

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P()), out_specs=P())
    def run(params: Params, tokens: jax.Array) -> jax.Array:
        first = jax.lax.axis_index("experts") * (EXPERTS // DEVICES)
        return jax.lax.psum(mixture(params, tokens, first), "experts")

    return run


@jax.jit
def make_data(step: Any) -> tuple[jax.Array, jax.Array]:
    """Tokens around eight centres, and each one's product with the matrix of its centre."""
    keys = jax.random.split(jax.random.key(1), 2)
    centres = jax.random.normal(keys[0], (EXPERTS, WIDTH))
    maps = jax.random.normal(keys[1], (EXPERTS, WIDTH, WIDTH)) / math.sqrt(WIDTH)
    which, noise = jax.random.split(jax.random.fold_in(jax.random.key(2), step))
    owner = jax.random.randint(which, (TOKENS,), 0, EXPERTS)
    tokens = centres[owner] + 0.3 * jax.random.normal(noise, (TOKENS, WIDTH))
    return tokens, jnp.einsum("nd,nde->ne", tokens, maps[owner])


def loss(params: Params, tokens: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.mean((mixture(params, tokens) - wanted) ** 2)


@jax.jit
def train_step(params: Params, moments: Any, step: jax.Array, *data: jax.Array) -> Any:
    """One step of Adam."""
    value, grads = jax.value_and_grad(loss)(params, *data)
    mean, square = moments
    mean = jax.tree.map(lambda m, g: DECAY_1 * m + (1 - DECAY_1) * g, mean, grads)
    square = jax.tree.map(lambda s, g: DECAY_2 * s + (1 - DECAY_2) * g * g, square, grads)
    size = RATE * jnp.sqrt(1 - DECAY_2**step) / (1 - DECAY_1**step)
    move = lambda p, m, s: p - size * m / (jnp.sqrt(s) + 1e-8)
    return value, jax.tree.map(move, params, mean, square), (mean, square)


def train(params: Params, steps: int) -> tuple[Params, list[float]]:
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments, losses = (zeros, zeros), []
    for step in range(1, steps + 1):
        data = make_data(step)
        value, params, moments = train_step(params, moments, jnp.float32(step), *data)
        losses.append(float(value))
        if step == 1 or step % 50 == 0 or step == steps:
            print(f"step {step:4d}  loss {losses[-1]:.3f}", flush=True)
    return params, losses


def check(params: Params, others: dict[str, Mixture]) -> None:
    """Asserts that outputs and gradients of the layer equal those of other forms of it."""
    keys = jax.random.split(jax.random.key(3), 2)
    data = [jax.random.normal(k, (TOKENS, WIDTH)) for k in keys]

    def both(layer: Mixture) -> list[np.ndarray]:
        def run(params: Params) -> tuple[jax.Array, jax.Array]:
            out = layer(params, data[0])
            return jnp.mean((out - data[1]) ** 2), out

        (_, out), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
        return [np.asarray(x) for x in jax.tree.leaves((out, grads))]

    ours = both(mixture)
    for name, other in others.items():
        pairs = zip(ours, both(other), strict=True)
        error = max(float(np.abs(a - b).max()) for a, b in pairs)
        assert error < 1e-4, f"the grouped layer and {name} differ by {error}"
        print(f"outputs and gradients differ from {name} by {error:.1e}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args(argv).steps
    if len(jax.devices()) < DEVICES:
        parser.error(f"needs {DEVICES} devices; there are {len(jax.devices())}")
    with policy_override(autotune=False):  # measuring would take longer than this training
        params, losses = train(init(jax.random.key(0)), steps)
        assert losses[-1] < losses[0] / 2, f"the loss fell from {losses[0]} to {losses[-1]} only"
        others = {"a loop over the experts": dense, f"experts on {DEVICES} devices": sharded()}
        check(params, others)
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sys.exit(main())
