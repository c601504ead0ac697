"""`cuda_call`: sources are built once, run on a CPU as on a GPU, and fail with reasons."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import _settings
from ejkernel.callib import _cuda_build, cuda_call, reversed_threads
from ejkernel.errors import CompilationError, EjkernelWarning, UnsupportedError
from tests.backend import BACKEND

ARCH = _cuda_build.HOST if BACKEND == "cpu" else "sm_90"
pytestmark = pytest.mark.skipif(
    _cuda_build.why_not(ARCH) is not None, reason=_cuda_build.why_not(ARCH) or ""
)
on_cpu = pytest.mark.skipif(BACKEND != "cpu", reason="of threads that take turns on a CPU")
SOURCE = pathlib.Path(__file__).with_name("sums.cu")


def affine(x, a=2.0, b=3, negative=False, name="affine", shape=None, **more):
    shape = jax.ShapeDtypeStruct(x.shape if shape is None else shape, jnp.float32)
    attributes = {"a": a, "b": b, "negative": negative, "name": name}
    call = functools.partial(cuda_call, SOURCE, "affine_handler", **more)
    return call(inputs=[x], outputs=[shape], **attributes)[0]


def sums(x, kind, threads=64):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = functools.partial(cuda_call, SOURCE, "sum_handler", kind=kind, threads=threads)
    return call(inputs=[x], outputs=[shape])[0]


def draw(*shape):
    return jax.random.normal(jax.random.key(0), shape)


def test_arrays_and_attributes_arrive():
    x = draw(7, 30)
    np.testing.assert_allclose(affine(x), 2 * x + 3, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(affine)(x), 2 * x + 3, rtol=1e-6)
    with jax.disable_jit():
        np.testing.assert_array_equal(affine(x), jax.jit(affine)(x))
    np.testing.assert_allclose(affine(x, a=0.5, negative=True), -0.5 * x + 3, rtol=1e-6)
    np.testing.assert_array_equal(affine(None, b=-4, shape=(70,)), np.full(70, -4.0))


def test_an_error_of_a_handler_is_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="the name is other"):
        affine(draw(4), name="other").block_until_ready()


def test_vmap_maps_some_arrays():
    x = draw(3, 2, 5)
    np.testing.assert_array_equal(jax.vmap(affine)(x), affine(x))
    np.testing.assert_array_equal(
        jax.vmap(jax.vmap(affine), in_axes=1)(x), affine(x).swapaxes(0, 1)
    )


@on_cpu
def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("x",))
    x = jax.device_put(draw(4, 3), jax.sharding.NamedSharding(mesh, P("x")))
    call = jax.shard_map(affine, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(jax.jit(call)(x), affine(draw(4, 3)))


def test_an_output_may_share_the_memory_of_an_input():
    x, expected = draw(64), np.asarray(affine(draw(64)))
    call = jax.jit(functools.partial(affine, aliases={0: 0}), donate_argnums=0)
    np.testing.assert_array_equal(call(x), expected)
    assert x.is_deleted()


@pytest.mark.parametrize("kind", ["barrier", "lanes"])
def test_threads_of_a_block_see_each_other(kind):
    x = jnp.arange(192.0).reshape(-1)
    width = 64 if kind == "barrier" else 32
    expected = np.repeat(np.asarray(x).reshape(-1, width).sum(axis=1), width)
    np.testing.assert_array_equal(sums(x, kind), expected)
    if BACKEND == "cpu":
        with reversed_threads(SOURCE):
            np.testing.assert_array_equal(sums(x, kind), expected)


@on_cpu
def test_a_missing_barrier_shows():
    x = jnp.arange(64.0)
    with reversed_threads(SOURCE):
        backwards = sums(x, "no barrier")
    assert not np.array_equal(backwards, sums(x, "no barrier"))


@on_cpu
def test_a_barrier_that_some_threads_never_reach_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="wait at a barrier for ever"):
        sums(jnp.zeros(64), "stuck").block_until_ready()


@on_cpu
def test_what_no_thread_writes_is_nan():
    out = np.asarray(sums(jnp.ones(128), "hole"))
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(out)), [0, 64])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_floats_of_16_bits_are_those_of_numpy(dtype):
    def convert(x, to):
        shape = jax.ShapeDtypeStruct(x.shape, to)
        return np.asarray(cuda_call(SOURCE, "convert_handler", inputs=[x], outputs=[shape])[0])

    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide = convert(every, np.float32)
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    # between neighbours: nearest, ties to even
    finite = every[np.isfinite(every.astype(np.float32))].astype(np.float32)
    low = np.unique(finite)
    middle = ((low[1:].astype(np.float64) + low[:-1]) / 2).astype(np.float32)
    near = np.nextafter(middle, np.float32(np.inf))
    edges = np.array([np.inf, -np.inf, np.nan, 1e-30, -1e-30, 3e38, 65519.9, 65520.0], np.float32)
    given = np.concatenate([middle, near, edges])
    given = np.pad(given, (0, -given.size % 64))
    with np.errstate(over="ignore"):
        expected = given.astype(dtype)
    np.testing.assert_array_equal(
        convert(given, dtype).astype(np.float32), expected.astype(np.float32)
    )


def test_the_next_process_finds_the_library(tmp_path):
    program = (
        "from tests.callib import test_cuda_call as t\n"
        "from ejkernel.callib import _cuda_build\n"
        "built, run = [], _cuda_build._run\n"
        "_cuda_build._run = lambda *a: (built.append(a), run(*a))[1]\n"
        "print(float(t.affine(t.jnp.ones(4))[0]), len(built))"
    )
    root = pathlib.Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"EJKERNEL_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    run = lambda: subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert run() == ["5.0", "1"]
    (library,) = (tmp_path / "cuda").iterdir()  # nothing half-built beside it
    assert (tmp_path / "cuda").stat().st_mode & 0o777 == 0o700
    assert run() == ["5.0", "0"]
    assert library.exists()


def test_a_changed_header_is_another_library(tmp_path):
    header, source = tmp_path / "sizes.cuh", tmp_path / "made.cu"
    header.write_text("#define SIZE 1\n")
    source.write_text('#include "sizes.cuh"\n#include "ejkernel.cuh"\n')
    first = _cuda_build.digest(source, ARCH)
    header.write_text("#define SIZE 2\n")
    assert _cuda_build.digest(source, ARCH) != first


@on_cpu
def test_a_folder_that_others_may_write_is_not_used(tmp_path):
    folder = tmp_path / "cuda"
    folder.mkdir()
    folder.chmod(0o777)
    with _settings.override(cache_dir=str(tmp_path)):
        with pytest.warns(EjkernelWarning, match="others may write there"):
            path = _cuda_build.build(SOURCE, _cuda_build.HOST)
    assert path.exists()
    assert not list(folder.iterdir())


def test_what_does_not_compile_is_told_with_the_compilers_words(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text('#include "ejkernel.cuh"\nint f() { return undeclared; }\n')
    shape = jax.ShapeDtypeStruct((1,), jnp.float32)
    with _settings.override(cache_dir=str(tmp_path / "cache")):
        with pytest.raises(CompilationError, match=r"broken\.cu does not compile(.|\n)*undeclared"):
            cuda_call(source, "f", inputs=[draw(1)], outputs=[shape])
    assert not list((tmp_path / "cache" / "cuda").iterdir())


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (FileNotFoundError, "no source", {"source": "nowhere.cu"}),
        (CompilationError, "no handler 'other'", {"function": "other"}),
        (TypeError, "a must be a bool", {"a": (1, 2)}),
        (ValueError, "output 0 the memory of input 3", {"aliases": {0: 3}}),
    ],
)
def test_bad_calls_are_refused(error, words, call):
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    given = {"source": SOURCE, "function": "affine_handler", "outputs": [shape]} | call
    with pytest.raises(error, match=words):
        cuda_call(inputs=[draw(4)], **given)


def test_kernels_tell_what_they_take():
    if (reason := _cuda_build.why_not("sm_90")) is not None:
        pytest.skip(reason)
    found = {kernel.name: kernel for kernel in _cuda_build.usage(SOURCE, "sm_90")}
    assert {"affine_kernel", "sum_kernel", "narrow_kernel"} <= set(found)
    assert all(0 < k.registers < 64 and k.spill_bytes == 0 for k in found.values())


def test_a_library_for_a_gpu_is_built_and_loads(tmp_path):
    """What nvcc makes, without a GPU to run it on."""
    if (reason := _cuda_build.why_not("sm_90")) is not None:
        pytest.skip(reason)
    with _settings.override(cache_dir=str(tmp_path)):
        name = _cuda_build.register(SOURCE, "affine_handler", "sm_90")
    assert "sm_90" in name
    assert _cuda_build.register(SOURCE, "affine_handler", ARCH) != name or BACKEND == "gpu"


def test_the_same_library_in_another_folder_has_the_same_name(tmp_path):
    usual = _cuda_build.register(SOURCE, "affine_handler", _cuda_build.HOST)
    with _settings.override(cache_dir=str(tmp_path)):
        assert _cuda_build.register(SOURCE, "affine_handler", _cuda_build.HOST) == usual


@on_cpu
def test_lowering_for_a_gpu_that_is_not_here_is_refused():
    with pytest.raises(UnsupportedError, match="JAX finds none"):
        jax.jit(affine).trace(draw(4)).lower(lowering_platforms=("cuda",))
