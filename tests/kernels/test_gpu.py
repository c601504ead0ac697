"""What only a GPU shows: offsets beyond 2³¹ elements, one entry's backward after another's forward,
a program for the CPU beside it, and a second process with nothing to do."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _oracle, kernel_registry
from ejkernel.modules import flash_attention, gla, native_sparse_attention
from tests.kernels import harness

pytestmark = pytest.mark.gpu
ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = kernel_registry.spec("flash_attention")


def normal(seed, shape, parts=1):
    """Random numbers; a long array in parts, which need less memory at once."""
    rows = shape[1] // parts
    make = lambda key: jax.random.normal(key, (shape[0], rows, *shape[2:]), jnp.bfloat16)
    made = jax.lax.map(make, jax.random.split(jax.random.key(seed), parts))
    return jnp.moveaxis(made, 0, 1).reshape(shape)


def test_more_than_two_billion_elements():
    """The queries stand at the end and look a short way back: all they see is beyond 2³¹."""
    heads, d, seen = 64, 128, 512
    s = 2**31 // (heads * d) + seen
    options = {"causal": True, "sliding_window": (200, 0), "return_lse": True}
    q = normal(0, (1, 130, heads, d))
    k, v = (normal(seed, (1, s, heads, d), parts=64) for seed in (1, 2))
    assert k.size > 2**31
    make = lambda k, v: SPEC.canonicalize(
        SPEC.complete({"query": q, "key": k, "value": v} | options)
    )
    made = harness.solve(SPEC, make(k[:, -seen:], v[:, -seen:]))
    whole = _oracle.Problem(make(k, v), made.cotangents, made.wanted, None, None)
    entry = harness.find_entry("flash_attention", "triton/gpu")
    cfg = harness.configs(entry, whole.args, "heuristic")

    def tail(args, cotangents):
        outputs, residuals = entry.fn(args, cfg[0])
        wanted = frozenset(made.wanted)
        grads = entry.backward(args, cfg[1], outputs, residuals, cotangents, wanted)
        before = [jnp.abs(grads[n][:, :-seen]).max() for n in ("key", "value")]
        return outputs, {n: g[:, -seen:] for n, g in grads.items()}, before

    outputs, grads, before = jax.jit(tail)(whole.args, made.cotangents)
    harness.assert_close_to_oracle(_oracle.answer(SPEC, made.args, outputs, grads), made)
    assert [float(x) for x in before] == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_arrays_of_the_cpu_are_computed_there(dtype):
    """A trace does not know where its arrays are; what is chosen for the GPU has a stand-in."""
    q = jax.random.normal(jax.random.key(0), (2, 40, 2, 16), dtype)
    loss = lambda q: flash_attention(q, q, q, causal=True).astype(jnp.float32).sum()
    there = jax.device_put(q, jax.devices("cpu")[0])
    given, expected = jax.jit(jax.grad(loss))(there), jax.jit(jax.grad(loss))(q)
    assert [x.platform for x in given.devices()] == ["cpu"]
    assert "conditional" not in jax.jit(jax.grad(loss)).lower(q).compile().as_text()
    tolerance = 64 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(given, np.float32),
        np.asarray(expected, np.float32),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("names", [("triton/gpu", "cudnn/gpu"), ("cudnn/gpu", "triton/gpu")])
def test_a_backward_after_the_forward_of_another_entry(names):
    """They are chosen apart, so what one saves has to serve the other."""
    q, k, v = (normal(seed, (2, 192, n, 64)) for seed, n in ((0, 4), (1, 2), (2, 2)))
    values = {"query": q, "key": k, "value": v, "causal": True}
    made = harness.solve(SPEC, SPEC.canonicalize(SPEC.complete(values)))
    first, second = (harness.find_entry("flash_attention", name) for name in names)

    def both(args, cotangents):
        outputs, residuals = first.fn(args, harness.configs(first, args, "heuristic")[0])
        cfg = harness.configs(second, args, "heuristic")[1]
        wanted = frozenset(made.wanted)
        return outputs, second.backward(args, cfg, outputs, residuals, cotangents, wanted)

    outputs, grads = jax.jit(both)(made.args, made.cotangents)
    harness.assert_close_to_oracle(_oracle.answer(SPEC, made.args, outputs, grads), made)


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_a_state_without_the_mapped_axis_counts_once_a_lane(platform):
    draw = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape)
    q, k, v = draw(0, (3, 1, 40, 2, 16)), draw(1, (1, 40, 2, 16)), draw(2, (1, 40, 2, 16))
    state = lambda q, v: gla(q, k, v, return_state=True, platform=platform)[1].sum()
    by_vmap = lambda v: jax.vmap(lambda q: state(q, v))(q).sum()
    by_loop = lambda v: sum(state(x, v) for x in q)
    for actual, expected in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(by_vmap))(v)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(by_loop))(v)),
        strict=True,
    ):
        # lanes and elements are summed in another order
        tolerance = 64 * float(jnp.finfo(jnp.float32).eps)
        most = float(jnp.abs(expected).max())
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * most)


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_a_prefix_compresses_as_the_whole_does(platform):
    """A block counts once it is complete: not where the array ends."""
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    length, cut = 200, 141
    xs = (
        draw(0, 1, length, 16, 64),
        draw(1, 1, length, 1, 64),
        draw(2, 1, length, 1, 64),
        *(jax.nn.sigmoid(draw(seed, 1, length, 16)) for seed in (3, 4, 5)),
    )
    attend = functools.partial(
        native_sparse_attention, block_counts=2, block_size=16, window_size=24, platform=platform
    )
    whole, part = attend(*xs), attend(*(x[:, :cut] for x in xs))
    tolerance = 64 * float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(part, whole[:, :cut], rtol=tolerance, atol=tolerance)


PROCESS = """
import json, jax, jax.numpy as jnp
from ejkernel.callib import _triton_compile
from ejkernel.modules import flash_attention
from ejkernel.ops.execution import tuning

measured = []
measure = tuning.benchmark.measure
tuning.benchmark.measure = lambda *a, **k: measured.append(1) or measure(*a, **k)
q, k, v = (jax.random.normal(jax.random.key(i), (1, 256, 2, 64), jnp.bfloat16) for i in range(3))
loss = lambda *x: flash_attention(*x, causal=True, platform="triton").astype(jnp.float32).sum()
jax.block_until_ready(jax.grad(loss, (0, 1, 2))(q, k, v))
print(json.dumps({"measured": len(measured), **_triton_compile.counts}))
"""


def in_a_process(folder):
    """What a process measured, compiled, and found compiled."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        cwd=ROOT,
        env=os.environ
        | {
            "EJKERNEL_CACHE_DIR": str(folder),
            "EJKERNEL_AUTOTUNE_POLICY": "autotune",
            "EJKERNEL_AUTOTUNE_BUDGET_S": "60",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_process_neither_tunes_nor_compiles(tmp_path):
    first = in_a_process(tmp_path)
    assert first["measured"] > 2
    assert first["compiled"] > 2
    second = in_a_process(tmp_path)
    assert second["measured"] == second["compiled"] == 0
    assert second["found"] == 4  # forward, careful forward, dk and dv, dq
