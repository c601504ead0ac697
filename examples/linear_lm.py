"""A character model of `gla` layers in plain JAX: trains, then generates with a fixed-size state.

The same function runs many tokens at once, for training, and one at a time, for generation. Stops
with an error when the loss does not halve, or when the two ways differ.
"""

import argparse
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import gla
from ejkernel.ops import policy_override

TEXT = """A river keeps no map of where it has been. It carries a little of every stream that
joined it, and forgets a little at every bend, and that is enough: the water that passes under the
bridge at noon still tells of rain that fell on the hills a week ago. A reader who keeps one page of
notes works the same way. Each new line is added to the page, old lines fade as they matter less,
and the page never grows. What is worth keeping is kept by writing it again.
"""
ALPHABET = sorted(set(TEXT))
WIDTH, HEADS, LAYERS = 64, 4, 2
BATCH, LENGTH = 8, 64
RATE, DECAY_1, DECAY_2 = 1e-2, 0.9, 0.99  # Adam

Params = dict[str, Any]
States = list[jax.Array | None]


def init(key: jax.Array) -> Params:
    keys = iter(jax.random.split(key, 2 + 7 * LAYERS))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / math.sqrt(rows)

    def layer() -> Params:
        square = {name: matrix(WIDTH, WIDTH) for name in ("q", "k", "v", "gate", "out")}
        return square | {"up": matrix(WIDTH, 2 * WIDTH), "down": matrix(2 * WIDTH, WIDTH)}

    return {
        "embed": matrix(len(ALPHABET), WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "head": matrix(WIDTH, len(ALPHABET)),
    }


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def model(params: Params, tokens: jax.Array, states: States) -> tuple[jax.Array, States]:
    """Logits [batch, tokens, characters], and the states after the last token."""
    x, after = params["embed"][tokens], []
    for layer, state in zip(params["layers"], states, strict=True):
        y = norm(x)
        q, k, v, gate = (
            (y @ layer[name]).reshape(*tokens.shape, HEADS, WIDTH // HEADS)
            for name in ("q", "k", "v", "gate")
        )
        log_gate = jax.nn.log_sigmoid(gate + 3.0)  # new models forget slowly
        mixed, last = gla(q, k, v, log_gate, initial_state=state, return_state=True)
        after.append(last)
        x = x + norm(mixed).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    return norm(x) @ params["head"], after


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of the next character."""
    logits, _ = model(params, tokens[:, :-1], [None] * LAYERS)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return -chosen.mean()


@jax.jit
def train_step(params: Params, moments: Any, step: jax.Array, tokens: jax.Array) -> Any:
    """One step of Adam."""
    value, grads = jax.value_and_grad(loss)(params, tokens)
    mean, square = moments
    mean = jax.tree.map(lambda m, g: DECAY_1 * m + (1 - DECAY_1) * g, mean, grads)
    square = jax.tree.map(lambda s, g: DECAY_2 * s + (1 - DECAY_2) * g * g, square, grads)
    size = RATE * jnp.sqrt(1 - DECAY_2**step) / (1 - DECAY_1**step)
    move = lambda p, m, s: p - size * m / (jnp.sqrt(s) + 1e-8)
    return value, jax.tree.map(move, params, mean, square), (mean, square)


def train(params: Params, text: jax.Array, steps: int) -> tuple[Params, list[float]]:
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments, losses = (zeros, zeros), []
    for step in range(1, steps + 1):
        key = jax.random.fold_in(jax.random.key(1), step)
        start = jax.random.randint(key, (BATCH, 1), 0, text.size - LENGTH)
        tokens = text[start + jnp.arange(LENGTH + 1)]
        value, params, moments = train_step(params, moments, jnp.float32(step), tokens)
        losses.append(float(value))
        if step == 1 or step % 25 == 0 or step == steps:
            print(f"step {step:4d}  loss {losses[-1]:.3f}", flush=True)
    return params, losses


@functools.partial(jax.jit, static_argnames="count")
def generate(params: Params, prompt: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The likeliest `count` characters after a prompt, token by token, and their logits."""
    logits, states = model(params, prompt, [None] * LAYERS)

    def step(carry: Any, _: None) -> Any:
        logits, states = carry
        token = jnp.argmax(logits, axis=-1)
        following, states = model(params, token[:, None], states)
        return (following[:, -1], states), (token, logits)

    _, (tokens, logits) = jax.lax.scan(step, (logits[:, -1], states), length=count)
    return tokens.swapaxes(0, 1), logits.swapaxes(0, 1)


def check_generation(params: Params, prompt: jax.Array, count: int) -> str:
    """Generates, and asserts that all tokens at once give the same."""
    tokens, logits = generate(params, prompt, count)
    whole = jnp.concatenate([prompt, tokens], axis=1)
    parallel, _ = jax.jit(model)(params, whole[:, :-1], [None] * LAYERS)
    parallel = parallel[:, prompt.shape[1] - 1 :]
    error = float(jnp.abs(parallel - logits).max())
    assert error < 1e-3, f"logits of the two ways differ by {error}"
    assert (jnp.argmax(parallel, axis=-1) == tokens).all(), "the two ways choose other characters"
    print(f"one token at a time and all at once: logits differ by {error:.1e}")
    return "".join(ALPHABET[int(i)] for i in tokens[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args(argv).steps
    text = jnp.asarray([ALPHABET.index(character) for character in TEXT])
    with policy_override(autotune=False):  # measuring would take longer than this training
        params, losses = train(init(jax.random.key(0)), text, steps)
        assert losses[-1] < losses[0] / 2, f"the loss fell from {losses[0]} to {losses[-1]} only"
        made = check_generation(params, text[None, :16], count=80)
    print(TEXT[:16] + made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
