"""The demo, and the examples that use Flax, Equinox and checkpoints, at toy size."""

import ast
import dataclasses
import importlib
import json
import pathlib
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example by name, as running it as a script would."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (EXAMPLES / f"{name}.py").exists():
            del sys.modules[name]


def imported(path):
    """The packages that a file imports, by their first names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found


def test_each_example_says_what_it_needs():
    optional = {"flax", "equinox", "optax", "safetensors", "matplotlib"}
    wanted = {path.name: imported(path) & optional for path in EXAMPLES.glob("*.py")}
    assert wanted["gpt_nnx.py"] == {"flax", "optax"}
    for name, packages in wanted.items():
        needs = re.findall("^Needs: pip install (.*)$", (EXAMPLES / name).read_text(), re.MULTILINE)
        assert packages <= set(" ".join(needs).split()), name


def test_the_page_lists_every_example():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert not [path.name for path in EXAMPLES.glob("*.py") if f"[`{path.name}`]" not in page]


def test_the_demo_shows_what_ran_and_is_exact(example, monkeypatch, capsys):
    demo = example("demo")
    sizes = {"LENGTHS": {"cpu": 96}, "SHORT": 48, "HEADS": 2, "HEAD_DIM": 16}
    for name, value in sizes.items():
        monkeypatch.setattr(demo, name, value)
    assert demo.main() == 0
    shown = capsys.readouterr().out
    assert "Errors are at most twice those of jax.nn." in shown
    assert "1 x 96 tokens, 2 heads of 16" in shown
    assert re.search(r"forward +xla/any +heuristics", shown)


@pytest.mark.parametrize("name", ["gpt_nnx", "gpt_equinox"])
def test_a_small_gpt_trains_and_draws_its_loss(example, name, tmp_path, capsys):
    curve = tmp_path / "loss.png"
    assert example(name).main(["--steps", "12", "--curve", str(curve)]) == 0
    assert "step   12" in capsys.readouterr().out
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_does_not_fall_is_an_error(example, tmp_path):
    training = example("training")
    argv = ["--steps", "2", "--curve", str(tmp_path / "loss.png")]
    with pytest.raises(AssertionError, match="the loss fell from"):
        training.run(argv, "constant", lambda tokens: jnp.ones(()))


def test_both_flax_layers_agree_with_flax(example, capsys):
    assert example("flax_attention_fn").main() == 0
    assert capsys.readouterr().out.count("outputs differ by") == 2


def test_attention_fn_is_flax_in_values_and_gradients(example):
    t = 5  # fewer queries than keys: flax aligns their beginnings
    attention_fn = example("flax_attention_fn").attention_fn
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (2, 3, t, 4, 8))  # two batch axes
    k, v = (jax.random.normal(key, (2, 3, 9, 4, 8)) for key in keys[1:3])
    bias = jax.random.normal(keys[3], (4, 1, 9))
    mask = jax.random.bernoulli(keys[4], 0.7, (2, 1, 1, t, 9)).at[..., 0].set(True)
    causal = jnp.tril(jnp.ones((t, 9), bool))

    def value_and_grads(fn):
        loss = lambda *xs: jnp.sin(fn(*xs)).sum()
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, bias)

    ours = value_and_grads(lambda q, k, v, b: attention_fn(q, k, v, b, mask, is_causal=True))
    theirs = value_and_grads(lambda q, k, v, b: nn.dot_product_attention(q, k, v, b, mask & causal))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)


def test_attention_fn_drops_weights_by_its_random_key(example):
    attention_fn = example("flax_attention_fn").attention_fn
    layer = nn.MultiHeadDotProductAttention(
        num_heads=2, dropout_rate=0.5, broadcast_dropout=False, attention_fn=attention_fn
    )
    x = jax.random.normal(jax.random.key(0), (1, 16, 8))
    params = layer.init(jax.random.key(1), x, deterministic=True)

    def run(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return layer.apply(params, x, deterministic=False, rngs=rngs)

    quiet = layer.apply(params, x, deterministic=True)
    assert jnp.array_equal(run(0), run(0))
    assert not jnp.allclose(run(0), run(1), atol=1e-3)
    assert not jnp.allclose(run(0), quiet, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": object()}, "sow_weights=False"),
        ({"precision": "highest"}, "jax.default_matmul_precision"),
        ({"dropout_rate": 0.1, "dropout_rng": 0}, "broadcast_dropout=False"),
    ],
)
def test_attention_fn_refuses_what_it_cannot_do(example, options, message):
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=message):
        example("flax_attention_fn").attention_fn(x, 2 * x, 3 * x, **options)


# Llama


def test_a_checkpoint_generates_the_same_paged_and_dense(example, capsys):
    assert (
        example("llama").main(["--tokens", "20", "--prompt", "1,5,9,2,8", "--prompt", "7,2"]) == 0
    )
    shown = capsys.readouterr().out
    assert "paged and dense tokens are equal" in shown
    first = shown.splitlines()[0].partition("-> ")[2]
    assert len(set(json.loads(first))) > 3  # not one token over and over


def test_a_cache_with_wrong_pages_is_noticed(example, tmp_path):
    llama = example("llama")
    llama.write_checkpoint(tmp_path, llama.TINY)
    config, weights = llama.load(tmp_path)
    prompts = [[1, 5, 9, 2, 8], [7, 2]]
    paged = llama.PagedGenerator(config, weights, prompts, 12)
    tokens = paged.prefill()
    paged.tables = paged.tables[::-1]  # each sequence reads the pages of the other
    following, _ = paged.decoder()(paged.caches, weights, tokens, paged.context_lens)
    dense = [llama.generate_dense(config, weights, p, 2) for p in prompts]
    assert tokens.tolist() == [d[0] for d in dense]
    assert following.tolist() != [d[1] for d in dense]


def test_checkpoints_in_bfloat16_in_two_files_and_with_tied_embeddings(example, tmp_path):
    llama = example("llama")
    config = dataclasses.replace(llama.TINY, tie_word_embeddings=True)
    llama.write_checkpoint(tmp_path, config, "bfloat16")
    whole = load_file(tmp_path / "model.safetensors")
    del whole["lm_head.weight"]
    names = sorted(whole)
    (tmp_path / "model.safetensors").unlink()
    for part in (0, 1):
        save_file({name: whole[name] for name in names[part::2]}, tmp_path / f"{part}.safetensors")
    config, weights = llama.load(tmp_path)
    assert weights["lm_head.weight"].dtype == jnp.bfloat16
    assert jnp.array_equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    generator = llama.PagedGenerator(config, weights, [[3, 4]], 4)
    assert np.shape(generator.generate(4)) == (1, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling must be one of"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type must be 'default'"),
        ({"attention_bias": True}, "attention_bias must be one of"),
        ({"head_dim": 16}, "head_dim must be 8"),
    ],
)
def test_checkpoints_of_other_models_are_refused(example, tmp_path, change, message):
    llama = example("llama")
    llama.write_checkpoint(tmp_path, llama.TINY)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        llama.load(tmp_path)
