"""A small GPT in Equinox whose attention layers call `flash_attention`; trains on a CPU.

Needs: pip install ejkernel equinox optax matplotlib
"""

import sys
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import training
from linear_lm import ALPHABET

from ejkernel.modules import flash_attention
from ejkernel.ops import policy_override


class Attention(eqx.Module):
    """Causal self-attention in which `kv_heads` key heads serve `heads` query heads."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    size: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, kv_heads: int, *, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.size = width // heads
        self.query = eqx.nn.Linear(width, width, key=keys[0])
        self.key = eqx.nn.Linear(width, kv_heads * self.size, key=keys[1])
        self.value = eqx.nn.Linear(width, kv_heads * self.size, key=keys[2])
        self.out = eqx.nn.Linear(width, width, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` is one sequence, [tokens, width]; batches are made by `jax.vmap`."""
        # flash_attention has a batch axis: [1, tokens, heads, size]
        q, k, v = (
            jax.vmap(project)(x).reshape(1, len(x), -1, self.size)
            for project in (self.query, self.key, self.value)
        )
        out = flash_attention(q, k, v, causal=True)
        return jax.vmap(self.out)(out.reshape(x.shape))


class Block(eqx.Module):
    norm_1: eqx.nn.LayerNorm
    attention: Attention
    norm_2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, kv_heads: int, *, key: jax.Array):
        keys = jax.random.split(key, 2)
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = Attention(width, heads, kv_heads, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(jax.vmap(self.norm_1)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm_2)(x))


class GPT(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array):
        width, keys = training.WIDTH, jax.random.split(key, 3 + training.LAYERS)
        self.tokens = eqx.nn.Embedding(len(ALPHABET), width, key=keys[0])
        self.positions = eqx.nn.Embedding(training.LENGTH, width, key=keys[1])
        self.head = eqx.nn.Linear(width, len(ALPHABET), key=keys[2])
        self.norm = eqx.nn.LayerNorm(width)
        self.blocks = [Block(width, training.HEADS, training.KV_HEADS, key=k) for k in keys[3:]]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [tokens, characters] of one sequence."""
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(jnp.arange(len(tokens)))
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


class Trainer:
    """A model with its optimizer; `step` changes both."""

    def __init__(self, model: GPT):
        self.model, self.optimizer = model, optax.adamw(3e-3)
        self.state = self.optimizer.init(eqx.filter(model, eqx.is_array))

    def step(self, tokens: jax.Array) -> jax.Array:
        value, self.model, self.state = _step(self.model, self.state, tokens, self.optimizer)
        return value


@eqx.filter_jit
def _step(model, state, tokens, optimizer):
    def loss(model):
        return training.next_character_loss(jax.vmap(model)(tokens[:, :-1]), tokens)

    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
    return value, eqx.apply_updates(model, updates), state


def main(argv: Sequence[str] | None = None) -> int:
    with policy_override(autotune=False):  # measuring would take longer than this training
        training.run(argv, "GPT in Equinox", Trainer(GPT(key=jax.random.key(0))).step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
