"""Finding needles in long contexts: full, block-sparse and native sparse attention side by side.

The context is a row of passages: keys of one passage share a topic. A few keys are needles, each in
a passage of its own, anywhere. Each of the last queries asks for one of them; it is found
if the output is nearest to its value. Every method answers all queries, as a model that reads its
context does, and its time and temporary memory are measured.

Stops with an error when full or native sparse attention misses a needle. `--plot FILE` draws time
and memory against length.

Needs: pip install matplotlib
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import (
    block_mask,
    blocksparse_attention,
    flash_attention,
    native_sparse_attention,
)
from ejkernel.ops import benchmark, policy_override

HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 64
BLOCK, CHOSEN = 32, 4  # tokens of a block, blocks that a query chooses
NEEDLES = 16
SHARP = 1.5  # of a query along its needle: logits of about 24, 12 more than the passage's others

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Haystack:
    """Queries, keys and values of one context, and where the needles are."""

    query: jax.Array  # [1, t, h, d]
    key: jax.Array  # [1, t, g, d]
    value: jax.Array  # [1, t, g, d]
    places: np.ndarray  # [needles], each in a block of its own


def make_haystack(length: int, seed: int, dtype: jnp.dtype) -> Haystack:
    keys = jax.random.split(jax.random.key(seed), 4)
    query = jax.random.normal(keys[0], (1, length, HEADS, HEAD_DIM))
    key = jax.random.normal(keys[1], (1, length, KEY_HEADS, HEAD_DIM))
    value = jax.random.normal(keys[2], (1, length, KEY_HEADS, HEAD_DIM))
    topics = jax.random.normal(keys[3], (1, -(-length // BLOCK), KEY_HEADS, HEAD_DIM))
    key += jnp.repeat(topics, BLOCK, axis=1)[:, :length]
    rng = np.random.default_rng(seed)
    blocks = rng.choice((length - NEEDLES) // BLOCK, NEEDLES, replace=False)
    places = blocks * BLOCK + rng.integers(0, BLOCK, NEEDLES)
    wanted = jnp.repeat(key[:, places], HEADS // KEY_HEADS, axis=2)  # [1, needles, h, d]
    query = query.at[:, -NEEDLES:].set(SHARP * wanted)
    return Haystack(query.astype(dtype), key.astype(dtype), value.astype(dtype), places)


def found(stack: Haystack, out: jax.Array) -> float:
    """The share of needles that all heads of their queries point at."""
    group = HEADS // KEY_HEADS
    asked = out[0, -NEEDLES:].astype(jnp.float32).reshape(NEEDLES, KEY_HEADS, group, HEAD_DIM)
    values = stack.value[0].astype(jnp.float32)  # [t, g, d]
    distance = (values**2).sum(-1).T[None, :, None] - 2 * jnp.einsum(
        "ngrd,tgd->ngrt", asked, values
    )
    nearest = np.asarray(distance.argmin(-1)).reshape(NEEDLES, -1)
    return float((nearest == stack.places[:, None]).all(axis=1).mean())


def full(query: jax.Array, key: jax.Array, value: jax.Array, platform: str) -> jax.Array:
    return flash_attention(query, key, value, causal=True, platform=platform)


def fixed_blocks(query: jax.Array, key: jax.Array, value: jax.Array, platform: str) -> jax.Array:
    """The neighbours of a block, the first block, and two at random: needles elsewhere are lost."""
    pattern = block_mask.bigbird(window=1, num_global=1, num_random=2) & block_mask.causal()
    return blocksparse_attention(
        query, key, value, block_size=BLOCK, mask_builder=pattern, causal=True, platform=platform
    )


def chosen_blocks(query: jax.Array, key: jax.Array, value: jax.Array, platform: str) -> jax.Array:
    """Native sparse attention: every query chooses blocks by the means of their keys."""
    one = jnp.ones(query.shape[:3], query.dtype)
    return native_sparse_attention(
        query, key, value, g_slc=one, block_counts=CHOSEN, block_size=BLOCK, platform=platform
    )


METHODS = {"full": full, "block-sparse": fixed_blocks, "native sparse": chosen_blocks}


@dataclasses.dataclass(frozen=True)
class Row:
    method: str
    length: int
    found: float
    milliseconds: float
    megabytes: float  # of temporaries


def run(method: str, length: int, platform: str, dtype: jnp.dtype) -> Row:
    stack = make_haystack(length, seed=length, dtype=dtype)
    attend = jax.jit(functools.partial(METHODS[method], platform=platform))
    arrays = (stack.query, stack.key, stack.value)
    compiled = attend.lower(*arrays).compile()
    memory = compiled.memory_analysis()
    time = benchmark(lambda: compiled(*arrays), num_warmup=1, num_iters=3)
    share = found(stack, compiled(*arrays))
    return Row(method, length, share, time, getattr(memory, "temp_size_in_bytes", 0) / 1e6)


def draw(rows: Sequence[Row], file: pathlib.Path) -> None:
    """Time and memory against length, both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, field, label in zip(
        axes, ("milliseconds", "megabytes"), ("ms", "MB of temporaries"), strict=True
    ):
        for method in METHODS:
            own = [row for row in rows if row.method == method]
            axis.plot([r.length for r in own], [getattr(r, field) for r in own], "o-", label=method)
        axis.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default="1024,2048,4096", help="tokens of the contexts")
    parser.add_argument("--platform", default="auto", help="auto, triton, xla, …")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--plot", metavar="FILE", help="a PNG or SVG; needs matplotlib")
    arguments = parser.parse_args(argv)
    words = arguments.lengths.split(",")
    least = BLOCK * (NEEDLES + 1)
    if not all(word.isdecimal() and int(word) >= least for word in words):
        parser.error(f"--lengths must be numbers of at least {least}; got {arguments.lengths}")
    print(f"{'tokens':>8}  {'method':<14}{'needles found':>14}{'ms':>10}{'MB':>9}")
    rows = []
    with policy_override(autotune=False):
        for length in map(int, words):
            for method in METHODS:
                row = run(method, length, arguments.platform, jnp.dtype(arguments.dtype))
                rows.append(row)
                print(
                    f"{length:>8}  {method:<14}{row.found:>14.0%}{row.milliseconds:>10.1f}"
                    f"{row.megabytes:>9.1f}"
                )
    if arguments.plot:
        draw(rows, pathlib.Path(arguments.plot))
        print(f"time and memory against length: {arguments.plot}")
    missed = [row for row in rows if row.found < 1 and row.method != "block-sparse"]
    for row in missed:
        print(f"{row.method} missed needles at {row.length} tokens", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
