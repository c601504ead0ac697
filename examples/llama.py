"""A Llama checkpoint in safetensors that generates with a paged cache, equal to the dense model.

Needs: pip install ejkernel safetensors

    python examples/llama.py FOLDER --prompt 1,5,9 --prompt 7,2 --tokens 16

FOLDER holds `config.json` and `*.safetensors` with Hugging Face's names. Prompts are token ids;
without FOLDER a tiny checkpoint with random weights is written and used. The prompts are computed
packed into one row, and their keys and values are written into pages; each further token is one
step of `update_paged_cache` and `page_attention` for all sequences at once.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file, save_file

from ejkernel.modules import flash_attention, page_attention, update_paged_cache
from ejkernel.ops import policy_override

PAGE = 16  # tokens of one page
Weights = dict[str, jax.Array]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]  # layer, q, k, v


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields of Hugging Face's `config.json` that the model needs."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


# What `config.json` may also say, and the only values for which this model computes the same.
_MUST_BE = {
    "rope_scaling": (None,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "sliding_window": (None,),
}


def load(folder: pathlib.Path) -> tuple[Config, Weights]:
    """Reads a checkpoint; refuses one that this model would compute differently."""
    found = json.loads((folder / "config.json").read_text())
    # newer files keep the angles' base in a record of its own
    rope = found.pop("rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"`{folder}`: rope_type must be 'default'; got {rope['rope_type']!r}.")
    if "rope_theta" in rope:
        found["rope_theta"] = rope["rope_theta"]
    for name, allowed in _MUST_BE.items():
        if found.get(name) not in allowed:
            raise ValueError(f"`{folder}`: {name} must be one of {allowed}; got {found[name]!r}.")
    names = {field.name for field in dataclasses.fields(Config)}
    config = Config(**{name: value for name, value in found.items() if name in names})
    if found.get("head_dim") not in (None, config.head_dim):
        raise ValueError(f"`{folder}`: head_dim must be {config.head_dim}.")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"`{folder}` has no *.safetensors file.")
    weights = {name: x for file in files for name, x in load_file(file).items()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return config, weights


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return unit.astype(x.dtype) * scale


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary positions; the two halves of a head are the two coordinates of each pair."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, None, None] * frequency  # [n, 1, half]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def model(
    config: Config, weights: Weights, tokens: jax.Array, positions: jax.Array, attend: Attend
) -> jax.Array:
    """Logits [n, vocabulary] of n tokens; `attend` gets the layer's q, k and v, [n, heads, d]."""

    def linear(x: jax.Array, name: str) -> jax.Array:
        return x @ weights[f"{name}.weight"].T  # torch keeps [out, in]

    norm = functools.partial(rms_norm, eps=config.rms_norm_eps)
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        y = norm(x, weights[f"{layer}.input_layernorm.weight"])
        q, k, v = (
            linear(y, f"{layer}.self_attn.{name}_proj").reshape(len(x), -1, config.head_dim)
            for name in "qkv"
        )
        q, k = (rotate(part, positions, config.rope_theta) for part in (q, k))
        mixed = attend(i, q, k, v).reshape(len(x), -1)
        x = x + linear(mixed, f"{layer}.self_attn.o_proj")
        y = norm(x, weights[f"{layer}.post_attention_layernorm.weight"])
        gated = jax.nn.silu(linear(y, f"{layer}.mlp.gate_proj")) * linear(y, f"{layer}.mlp.up_proj")
        x = x + linear(gated, f"{layer}.mlp.down_proj")
    return linear(norm(x, weights["model.norm.weight"]), "lm_head")


def generate_dense(
    config: Config, weights: Weights, prompt: Sequence[int], count: int
) -> list[int]:
    """The likeliest `count` tokens after a prompt; computes the whole text again for each."""

    def attend(i, q, k, v):
        return flash_attention(q[None], k[None], v[None], causal=True)[0]

    @jax.jit
    def last_logits(weights, tokens, length):
        # causal: padding after `length` changes nothing before it
        return model(config, weights, tokens, jnp.arange(len(tokens)), attend)[length - 1]

    text = list(prompt)
    for _ in range(count):
        padded = jnp.asarray(text + [0] * (len(prompt) + count - len(text)))
        text.append(int(jnp.argmax(last_logits(weights, padded, len(text)))))
    return text[len(prompt) :]


class PagedGenerator:
    """Sequences that share one cache of pages; `context_lens` counts what each has cached."""

    def __init__(
        self, config: Config, weights: Weights, prompts: Sequence[Sequence[int]], room: int
    ):
        self.config, self.weights, self.prompts = config, weights, prompts
        blocks = -(-max(len(p) + room for p in prompts) // PAGE)
        # pages in a mixed order, as they would be after some use
        order = np.random.default_rng(0).permutation(len(prompts) * blocks)
        self.tables = jnp.asarray(order.reshape(len(prompts), blocks), jnp.int32)
        shape = (order.size, config.num_key_value_heads, PAGE, config.head_dim)
        dtype = weights["model.embed_tokens.weight"].dtype
        # two arrays, keys and values, for each layer
        self.caches = [
            (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
            for _ in range(config.num_hidden_layers)
        ]
        self.context_lens = jnp.zeros(len(prompts), jnp.int32)

    def slots(self, rows: jax.Array, positions: jax.Array) -> jax.Array:
        """The cache slot of position `positions[i]` of sequence `rows[i]`."""
        return self.tables[rows, positions // PAGE] * PAGE + positions % PAGE

    def prefill(self) -> jax.Array:
        """Computes all prompts, packed into one row; returns the next token of each."""
        lengths = np.array([len(p) for p in self.prompts])
        bounds = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
        tokens = jnp.asarray([token for prompt in self.prompts for token in prompt])
        positions = jnp.concatenate([jnp.arange(n) for n in lengths])
        slots = self.slots(jnp.repeat(jnp.arange(len(lengths)), lengths), positions)

        @functools.partial(jax.jit, donate_argnums=0)
        def run(caches, weights):
            caches = list(caches)

            def attend(i, q, k, v):
                caches[i] = update_paged_cache(*caches[i], k, v, slots)
                row = (x[None] for x in (q, k, v))
                return flash_attention(*row, causal=True, cum_seqlens_q=bounds)[0]

            logits = model(self.config, weights, tokens, positions, attend)
            return jnp.argmax(logits[bounds[1:] - 1], axis=-1), caches

        following, self.caches = run(self.caches, self.weights)
        self.context_lens = jnp.asarray(lengths, jnp.int32)
        return following

    def decoder(self) -> Callable[..., tuple[jax.Array, list]]:
        """A compiled step: one token of each sequence in, the next of each out."""
        rows = jnp.arange(len(self.prompts))

        @functools.partial(jax.jit, donate_argnums=0)
        def step(caches, weights, tokens, positions):
            caches, slots = list(caches), self.slots(rows, positions)

            def attend(i, q, k, v):
                caches[i] = update_paged_cache(*caches[i], k, v, slots)
                return page_attention(q, *caches[i], positions + 1, self.tables)

            logits = model(self.config, weights, tokens, positions, attend)
            return jnp.argmax(logits, axis=-1), caches

        return step

    def generate(self, count: int) -> list[list[int]]:
        """The likeliest `count` tokens after each prompt."""
        tokens, step = [self.prefill()], self.decoder()
        while len(tokens) < count:
            inputs = self.weights, tokens[-1], self.context_lens
            following, self.caches = step(self.caches, *inputs)
            self.context_lens += 1
            tokens.append(following)
        return np.stack(tokens, axis=1).tolist()


def write_checkpoint(folder: pathlib.Path, config: Config, dtype: str = "float32") -> None:
    """Writes a checkpoint with random weights."""
    rng = np.random.default_rng(0)
    width, inner = config.hidden_size, config.intermediate_size
    kv_width = config.num_key_value_heads * config.head_dim
    shapes = {
        "model.embed_tokens": (config.vocab_size, width),
        "lm_head": (config.vocab_size, width),
    }
    norms = ["model.norm"]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        rows = {"q": width, "k": kv_width, "v": kv_width, "o": width}
        shapes |= {f"{layer}.self_attn.{n}_proj": (out, width) for n, out in rows.items()}
        shapes |= {f"{layer}.mlp.{n}_proj": (inner, width) for n in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (width, inner)
    draws = {name: rng.normal(size=shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    draws |= {name: 1 + rng.normal(size=width) / 8 for name in norms}
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {f"{name}.weight": jnp.asarray(x, dtype) for name, x in draws.items()}
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))


TINY = Config(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=97,
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Generate with a Llama checkpoint, paged and dense."
    )
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--prompt", action="append", help="token ids, separated by commas")
    parser.add_argument("--tokens", type=int, default=12)
    options = parser.parse_args(argv)
    prompts = [
        [int(token) for token in text.split(",")] for text in options.prompt or ["1,5,9,2,8", "7,2"]
    ]
    with tempfile.TemporaryDirectory() as scratch, policy_override(autotune=False):
        if options.folder is None:
            write_checkpoint(pathlib.Path(scratch), TINY)
        config, weights = load(options.folder or pathlib.Path(scratch))
        paged = PagedGenerator(config, weights, prompts, options.tokens).generate(options.tokens)
        dense = [generate_dense(config, weights, p, options.tokens) for p in prompts]
    for prompt, tokens in zip(prompts, paged, strict=True):
        print(f"{prompt} -> {tokens}")
    same = paged == dense
    print(f"paged and dense tokens are {'equal' if same else 'DIFFERENT'}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
