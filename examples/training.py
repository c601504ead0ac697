"""What the two GPT examples share: text, batches, the loss and the picture of the loss.

Needs: pip install ejkernel optax matplotlib
"""

import argparse
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import optax
from linear_lm import ALPHABET, TEXT

BATCH, LENGTH = 8, 64
WIDTH, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2


def batches(steps: int) -> Iterator[jax.Array]:
    """Pieces of the text as [BATCH, LENGTH + 1] character numbers, one batch a step."""
    text = jnp.asarray([ALPHABET.index(character) for character in TEXT])
    for step in range(steps):
        key = jax.random.fold_in(jax.random.key(1), step)
        start = jax.random.randint(key, (BATCH, 1), 0, text.size - LENGTH)
        yield text[start + jnp.arange(LENGTH + 1)]


def next_character_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of logits [b, t, characters] for tokens[:, 1:]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def save_curve(losses: Sequence[float], path: pathlib.Path, title: str) -> None:
    """Draws the loss of each step as a PNG."""
    from matplotlib.figure import Figure  # without pyplot, so that no window system is needed

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss", title=title)
    figure.savefig(path, dpi=120)


def run(
    argv: Sequence[str] | None, title: str, train_step: Callable[[jax.Array], jax.Array]
) -> list[float]:
    """Trains for `--steps`, prints and draws the loss, and asserts that it fell."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--curve", type=pathlib.Path, default=pathlib.Path("loss.png"))
    options = parser.parse_args(argv)
    losses: list[float] = []
    for tokens in batches(options.steps):
        losses.append(float(train_step(tokens)))
        if len(losses) in (1, options.steps) or len(losses) % 25 == 0:
            print(f"step {len(losses):4d}  loss {losses[-1]:.3f}", flush=True)
    save_curve(losses, options.curve, title)
    print(f"wrote {options.curve}")
    assert losses[-1] < 0.8 * losses[0], f"the loss fell from {losses[0]} to {losses[-1]} only"
    return losses
