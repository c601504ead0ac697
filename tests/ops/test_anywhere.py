"""Programs traced on a machine with a GPU and lowered for a CPU."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import _device, _settings
from ejkernel.modules import flash_attention
from ejkernel.ops import find_labels_in_lowered, policy_override

H200 = _device.Target("gpu", "NVIDIA H200", "9.0")


def inputs(dtype, batch=2):
    keys = jax.random.split(jax.random.key(3), 3)
    shapes = ((batch, 48, 4, 16), (batch, 48, 2, 16), (batch, 48, 2, 16))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def attend(platform="auto"):
    return lambda q, k, v: flash_attention(q, k, v, causal=True, platform=platform)


def gradients(fn):
    return jax.grad(lambda *xs: fn(*xs).astype(jnp.float32).sum(), (0, 1, 2))


@pytest.fixture
def there(monkeypatch):
    """A trace finds a GPU, as it does where one is the default device."""
    monkeypatch.setattr(_device, "find", lambda mesh=None: H200)
    with policy_override(autotune=False):
        yield


def by_xla(form, *arrays):
    here = _device.describe(jax.devices("cpu")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device, "find", lambda mesh=None: here)
        return jax.jit(form(attend("xla")))(*arrays)


def assert_equal(actual, expected, **tolerance):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(a, e, **{"rtol": 0.0, "atol": 0.0} | tolerance)


# float32 is Triton's there, where Triton is installed, and bfloat16 cuDNN's
DTYPES = [jnp.float32, jnp.bfloat16]
FORMS = {
    "outputs": lambda fn: fn,
    "gradients": gradients,
    "gradients under vmap": lambda fn: jax.vmap(gradients(fn)),
    "gradients of a remat": lambda fn: gradients(jax.checkpoint(fn)),
    "jvp": lambda fn: lambda *xs: jax.jvp(fn, xs, xs),
}


def in_forms():
    for form in FORMS:
        late = [] if form in ("outputs", "gradients") else [pytest.mark.slow]
        yield pytest.param(form, jnp.float32, marks=late)
        yield form, jnp.bfloat16


@pytest.mark.parametrize(("form", "dtype"), list(in_forms()))
def test_a_trace_for_a_gpu_runs_on_a_cpu(there, form, dtype):
    arrays = inputs(dtype)
    if "vmap" in form:
        arrays = [jnp.stack([x, x[::-1]]) for x in arrays]
    assert_equal(jax.jit(FORMS[form](attend()))(*arrays), by_xla(FORMS[form], *arrays))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inside_shard_map(there, dtype):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays, specs = inputs(dtype), (P("x"),) * 3
    spread = jax.shard_map(gradients(attend()), mesh=mesh, in_specs=specs, out_specs=specs)
    # a device has one row: blocks of another size
    tolerance = 64 * float(jnp.finfo(dtype).eps)
    actual, expected = jax.jit(spread)(*arrays), by_xla(gradients, *arrays)
    assert_equal(actual, expected, rtol=tolerance, atol=tolerance)


def test_a_gpu_gets_the_choice_and_everybody_else_xla(there):
    text = str(jax.make_jaxpr(attend())(*inputs(jnp.bfloat16)))
    assert "branches_platforms=(('cuda', 'rocm'), None)" in text
    assert "dot_product_attention_fwd" in text


def test_a_call_for_a_cpu_has_no_branches():
    text = str(jax.make_jaxpr(attend())(*inputs(jnp.float32)))
    assert "branches_platforms" not in text


def test_an_explicit_platform_never_falls_back(there):
    with pytest.raises(NotImplementedError):
        jax.jit(attend("cudnn"))(*inputs(jnp.bfloat16))


def test_labels_name_the_choice(there):
    with _settings.override(ops_stamp="json"):
        lowered = jax.jit(gradients(attend())).lower(*inputs(jnp.bfloat16))
    labels = find_labels_in_lowered(lowered)
    assert [x.name for x in labels] == ["flash_attention"] * 2  # forward and backward
    assert {x.document["choice"]["implementation"] for x in labels} == {"cudnn/gpu"}
    text = lowered.as_text(debug_info=True)  # and what stands in for it here
    assert re.search(r"ejkernel\.flash_attention\.cudnn/gpu/.*ejkernel\.flash_attention\.xla", text)


def test_a_decision_is_logged_once(there, caplog):
    arrays = inputs(jnp.bfloat16, batch=3)
    with caplog.at_level(logging.INFO, "ejkernel"):
        for _ in range(2):
            jax.jit(lambda *xs: attend()(*xs))(*arrays)  # a trace of its own
    lines = [r.getMessage() for r in caplog.records if "said by" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("flash_attention (forward) for query=bfloat16[3, 48, 4, 16], ")
    assert "cudnn/gpu" in lines[0]
