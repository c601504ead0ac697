"""A small GPT in Flax NNX whose attention layers call `flash_attention`; trains on a CPU.

Needs: pip install ejkernel flax optax matplotlib
"""

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
import training
from flax import nnx
from linear_lm import ALPHABET

from ejkernel.modules import flash_attention
from ejkernel.ops import policy_override


class Attention(nnx.Module):
    """Causal self-attention in which `kv_heads` key heads serve `heads` query heads."""

    def __init__(self, width: int, heads: int, kv_heads: int, *, rngs: nnx.Rngs):
        size = width // heads
        self.query = nnx.LinearGeneral(width, (heads, size), rngs=rngs)
        self.key = nnx.LinearGeneral(width, (kv_heads, size), rngs=rngs)
        self.value = nnx.LinearGeneral(width, (kv_heads, size), rngs=rngs)
        self.out = nnx.LinearGeneral((heads, size), width, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        out = flash_attention(self.query(x), self.key(x), self.value(x), causal=True)
        return self.out(out)


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, *, rngs: nnx.Rngs):
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, heads, kv_heads, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        width, heads = training.WIDTH, training.HEADS
        self.tokens = nnx.Embed(len(ALPHABET), width, rngs=rngs)
        self.positions = nnx.Embed(training.LENGTH, width, rngs=rngs)
        blocks = [Block(width, heads, training.KV_HEADS, rngs=rngs) for _ in range(training.LAYERS)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, len(ALPHABET), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss(model: GPT) -> jax.Array:
        return training.next_character_loss(model(tokens[:, :-1]), tokens)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main(argv: Sequence[str] | None = None) -> int:
    model = GPT(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    with policy_override(autotune=False):  # measuring would take longer than this training
        training.run(argv, "GPT in Flax NNX", lambda tokens: train_step(model, optimizer, tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
