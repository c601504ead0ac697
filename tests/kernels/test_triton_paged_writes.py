"""The Triton kernel that writes tokens into pages: dtypes, sizes, and whose memory it takes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel import _settings, modules
from ejkernel._device import Target
from ejkernel.callib import _triton_call
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._triton._blocks import scatter
from tests.kernels import harness

# op: its arrays of pages, and shapes of all arrays for three tokens
WRITERS = {
    "update_paged_cache": (2, ((3, 2, 4, 8), (3, 2, 4, 6), (3, 2, 8), (3, 2, 6))),
    "update_kv_pages": (1, ((3, 4, 4, 8), (3, 2, 8), (3, 2, 8))),
    "update_latent_pages": (1, ((3, 4, 14), (3, 8), (3, 6))),
}
AMPERE = Target(kind="gpu", model="A100", capability="8.0")
HOPPER = Target(kind="gpu", model="H200", capability="9.0")


def arrays(op, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(3), len(WRITERS[op][1]))
    shapes = zip(keys, WRITERS[op][1], strict=True)
    return [(30 * jax.random.normal(key, shape)).astype(dtype) for key, shape in shapes]


def canonical(op, *given):
    spec = kernel_registry.spec(op)
    names = [field.name for field in dataclasses.fields(spec.args)][:-1]  # donate_cache is last
    return spec.canonicalize(spec.complete(dict(zip(names, given, strict=True))))


def run(op, *given, platform):
    with _settings.override(interpret=True):
        made = jax.jit(getattr(modules, op), static_argnames="platform")(*given, platform=platform)
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("op", WRITERS)
def test_narrow_pages_take_the_bits_of_their_tokens(op, dtype):
    given = (*arrays(op, dtype), jnp.array([11, -1, 2]))
    actual, expected = (run(op, *given, platform=platform) for platform in ("triton", "xla"))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(e).view(np.uint8))


@pytest.mark.parametrize("op", WRITERS)
def test_one_launch_takes_the_memory_of_the_pages(op):
    given = (*arrays(op), jnp.array([11, -1, 2]))
    entry = harness.find_entry(op, "triton/gpu")
    run = lambda *given: entry.fn(canonical(op, *given), None)[0]
    program = jax.make_jaxpr(run)(*given).jaxpr
    (launch,) = _triton_call.launches(program)
    count, _ = WRITERS[op]
    aliases = launch.params["launch"].aliases
    # the pages themselves, which nothing has copied, become the results
    assert [launch.invars[operand] for operand, _ in aliases] == program.invars[:count]
    assert [launch.outvars[out] for _, out in aliases] == program.outvars


@pytest.mark.gpu
@pytest.mark.parametrize("op", WRITERS)
def test_donated_pages_are_not_copied(op):
    given, (count, _) = (*arrays(op), jnp.array([11, -1, 2])), WRITERS[op]
    write = functools.partial(getattr(modules, op), platform="triton")
    made = jax.jit(write, donate_argnums=range(count)).lower(*given).compile()
    assert made.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in given[:count])
    of_pages = [rf" = f32\[{','.join(map(str, x.shape))}\]\S* copy\(" for x in given[:count]]
    assert not any(re.search(pattern, made.as_text()) for pattern in of_pages)


def test_many_heads_take_several_programs_a_token(monkeypatch):
    monkeypatch.setattr(scatter, "_TILE", 16)  # two heads of eight
    op, tokens = "update_kv_pages", jnp.array([5, 0])
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 3, 10, 8), (2, 5, 8), (2, 5, 8))
    given = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    (actual,), (expected,) = (run(op, *given, tokens, platform=p) for p in ("triton", "xla"))
    np.testing.assert_array_equal(actual, expected)


def test_of_two_tokens_with_one_slot_one_is_written():
    pages, latents, ropes = arrays("update_latent_pages")
    (made,) = run(
        "update_latent_pages", pages, latents, ropes, jnp.array([6, 6, 6]), platform="triton"
    )
    found = np.asarray(made).reshape(12, 14)
    np.testing.assert_array_equal(np.delete(found, 6, 0), np.delete(pages.reshape(12, 14), 6, 0))
    assert (found[6, :8] == np.asarray(latents)).any(axis=0).all()  # each number is one of theirs


@pytest.mark.parametrize("sizes", [(0, 3), (2, 0)], ids=["no_pages", "no_tokens"])
def test_nothing_to_write(sizes):
    pages, tokens = sizes
    given = (jnp.ones((pages, 4, 14)), jnp.ones((tokens, 8)), jnp.ones((tokens, 6)))
    slots = jnp.zeros(tokens, jnp.int32)
    (made,) = run("update_latent_pages", *given, slots, platform="triton")
    np.testing.assert_array_equal(made, given[0])


def test_float8_is_refused_where_the_gpu_has_none():
    op = "update_latent_pages"
    entry = harness.find_entry(op, "triton/gpu")
    args = canonical(op, *arrays(op, "float8_e4m3fn"), jnp.array([0, 1, 2]))
    assert "needs compute capability 8.9" in entry.why_not(args, AMPERE)
    assert entry.why_not(args, HOPPER) is None
    args = canonical(op, *arrays(op, "float8_e4m3fnuz"), jnp.array([0, 1, 2]))
    assert "have no float8_e4m3fnuz" in entry.why_not(args, HOPPER)
