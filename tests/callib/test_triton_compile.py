"""Triton's compiler without a GPU: targets, errors, and machine code kept on disk."""

import errno
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _device, _settings
from ejkernel.callib import _triton_call, _triton_compile, _triton_jaxlib, triton_call
from ejkernel.callib._triton_compile import GpuTarget
from ejkernel.errors import CompilationError, EjkernelWarning, UnsupportedError

triton = pytest.importorskip("triton")
tl = triton.language
ROOT = pathlib.Path(__file__).parents[2]
HOPPER = GpuTarget("cuda", 90)
X = np.ones(8, np.float32)


@triton.jit
def _plus(x, ADDED: tl.constexpr):
    return x + ADDED


@triton.jit
def plus_kernel(x, out, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(out + o, _plus(tl.load(x + o), ADDED))


def plus(x, added=1.0, **options):
    bound = {"inputs": {"x": x}, "outputs": {"out": jax.ShapeDtypeStruct(x.shape, x.dtype)}}
    return triton_call(plus_kernel, **bound, grid=(1,), ADDED=added, BLOCK=x.size, **options)["out"]


def compile_plus(added=1.0, x=X, target=HOPPER, **options):
    (eqn,) = jax.make_jaxpr(lambda x: plus(x, added, **options))(x).eqns
    avals = [v.aval for v in eqn.invars]
    return _triton_call.compile_launch(eqn.params["launch"], avals, target)


@pytest.fixture
def folder(tmp_path):
    """An empty cache, and no memory of earlier compilations."""
    _triton_compile.compile_kernel.cache_clear()
    with _settings.override(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"
    _triton_compile.compile_kernel.cache_clear()


def counted(run):
    """(compiled, found on disk) while a function ran."""
    before = dict(_triton_compile.counts)
    run()
    return tuple(_triton_compile.counts[name] - before[name] for name in ("compiled", "found"))


# Targets


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("cuda:sm_90", GpuTarget("cuda", 90)),
        ("cuda:100", GpuTarget("cuda", 100)),
        ("hip:gfx942", GpuTarget("hip", "gfx942")),
    ],
)
def test_targets_have_names(text, target):
    assert GpuTarget.parse(text) == target
    assert GpuTarget.parse(str(target)) == target


@pytest.mark.parametrize(
    "text", ["", "cuda", "cuda:", "cuda:sm_x", "hip:90", "rocm:gfx942", "sm_90"]
)
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=r"'cuda:sm_90' or 'hip:gfx942'.*got '" + text):
        GpuTarget.parse(text)


@pytest.mark.parametrize("text", ["cuda:sm_80", "cuda:sm_90", "hip:gfx942"])
def test_kernels_compile_for_targets_that_are_not_here(folder, text):
    made = compile_plus(target=GpuTarget.parse(text))
    assert made.name == "plus_kernel"
    assert "plus_kernel" in made.ttir
    if text.startswith("cuda"):
        assert f".target {text.removeprefix('cuda:')}" in made.code
    else:
        assert pathlib.Path(made.code).read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_the_dtype_of_arrays_reaches_the_kernel(folder, dtype):
    name = {"float32": "f32", "bfloat16": "bf16", "int32": "i32"}[dtype]
    made = compile_plus(1, jax.ShapeDtypeStruct((8,), jnp.dtype(dtype)))
    assert f"!tt.ptr<{name}>" in made.ttir


def test_a_kernel_compiles_after_others_were_interpreted(folder):
    with jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_array_equal(plus(X), X + 1)
        assert compile_plus().shared_bytes == 0
        np.testing.assert_array_equal(plus(X, 3.0), X + 3)


# Errors


def test_an_error_names_kernel_constants_options_and_target(folder):
    with pytest.raises(CompilationError) as caught:
        compile_plus(x=np.ones(7, np.float32), num_warps=2)
    for part in ("`plus_kernel`", "'BLOCK': 7", "'num_warps': 2", "cuda:sm_90", "power of 2"):
        assert part in str(caught.value)
    assert caught.value.__cause__ is not None


def test_an_error_does_not_stay(folder):
    for _ in range(2):
        with pytest.raises(CompilationError):
            compile_plus(x=np.ones(7, np.float32))
    assert compile_plus().name == "plus_kernel"


@triton.jit
def total_kernel(x, out, BLOCK: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, BLOCK))))


def test_more_shared_memory_than_there_is_is_refused(folder, monkeypatch):
    def total(x):  # warps meet in shared memory
        bound = {"inputs": {"x": x}, "outputs": {"out": jax.ShapeDtypeStruct((), x.dtype)}}
        return triton_call(total_kernel, **bound, grid=(1,), BLOCK=256)["out"]

    (eqn,) = jax.make_jaxpr(total)(np.ones(256, np.float32)).eqns
    run = lambda: _triton_call.compile_launch(
        eqn.params["launch"], [eqn.invars[0].aval], GpuTarget("cuda", 90)
    )
    needed = run().shared_bytes
    assert needed > 0
    _triton_compile.compile_kernel.cache_clear()
    monkeypatch.setitem(_device._SHARED, "9.0", needed - 1)
    words = rf"`total_kernel` takes {needed} bytes .* {needed - 1} that cuda:sm_90 .* smaller"
    with pytest.raises(CompilationError, match=words):
        run()


# The cache


def test_code_is_kept_beside_our_other_files(folder):
    assert counted(compile_plus) == (1, 0)
    assert [p.stat().st_mode & 0o777 for p in (folder, folder / "triton")] == [0o700] * 2
    assert list((folder / "triton").rglob("*.cubin"))
    assert counted(compile_plus) == (0, 0)  # known to this process
    _triton_compile.compile_kernel.cache_clear()
    assert counted(compile_plus) == (0, 1)


def test_what_changes_the_code_is_compiled_anew(folder):
    assert counted(compile_plus) == (1, 0)
    assert counted(lambda: compile_plus(2.0)) == (1, 0)
    assert counted(lambda: compile_plus(num_warps=8)) == (1, 0)
    assert counted(lambda: compile_plus(options={"maxnreg": 64})) == (1, 0)
    assert counted(lambda: compile_plus(target=GpuTarget("cuda", 80))) == (1, 0)


def test_constants_of_other_types_are_other_code(folder):
    assert counted(lambda: compile_plus(1)) == (1, 0)
    for other in (1.0, True, -0.0, 0.0):
        assert counted(lambda other=other: compile_plus(other)) == (1, 0), other
    assert counted(lambda: compile_plus(np.float32(1))) == (0, 0)  # 1.0


@triton.jit
def chosen_kernel(x, out, MODE: tl.constexpr):
    if MODE == "1":
        tl.store(out, 7.0)
    else:
        tl.store(out, 9.0)


def test_a_text_is_no_number_on_disk(folder):
    def code(mode):
        outputs = {"out": jax.ShapeDtypeStruct((1,), jnp.float32)}
        bound = {"outputs": outputs, "grid": (1,), "MODE": mode}
        run = lambda x: triton_call(chosen_kernel, inputs={"x": x}, **bound)["out"]
        (eqn,) = jax.make_jaxpr(run)(X).eqns
        return _triton_call.compile_launch(eqn.params["launch"], [eqn.invars[0].aval], HOPPER).ttir

    assert "9.0" in code(1)
    assert "7.0" in code("1")


MODULE = """
import triton, sizes
tl = triton.language

@triton.jit
def kernel(x, out):
    tl.store(out, tl.load(x) * sizes.FACTOR)
"""


def test_constants_read_through_a_module_are_part_of_the_key(folder, tmp_path, monkeypatch):
    (tmp_path / "scaled.py").write_text(MODULE)
    monkeypatch.setitem(sys.modules, "sizes", types.ModuleType("sizes"))

    def code(factor):
        sys.modules["sizes"] = sizes = types.ModuleType("sizes")
        sizes.FACTOR = tl.constexpr(factor)
        spec = importlib.util.spec_from_file_location("scaled", tmp_path / "scaled.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        signature = _triton_compile.Signature((np.dtype(np.float32),) * 2)
        options = (("num_warps", 4), ("num_stages", 3))
        return _triton_compile.compile_kernel(module.kernel, signature, options, HOPPER).ttir

    assert "2.0" in code(2.0)
    assert "5.0" in code(5.0)
    assert counted(lambda: code(2.0)) == (0, 1)


# a kernel of Triton 3.9 whose description cannot be read has no `module` to give back
@pytest.mark.filterwarnings(
    "ignore:.*CompiledKernel.__del__:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("keep", [0, 0.5], ids=["code_emptied", "description_cut_short"])
@pytest.mark.parametrize("target", ["cuda:sm_90", "hip:gfx942"])
def test_what_cannot_be_read_is_compiled_again(folder, target, keep):
    run = lambda: compile_plus(target=GpuTarget.parse(target))
    assert counted(run) == (1, 0)
    pattern = "plus_kernel.json" if keep else "*.ptx" if "cuda" in target else "*.hsaco"
    (path,) = (folder / "triton").rglob(pattern)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    _triton_compile.compile_kernel.cache_clear()
    assert counted(run) == (1, 0 if keep else 1)
    assert path.read_bytes() == whole
    _triton_compile.compile_kernel.cache_clear()
    assert counted(run) == (0, 1)


def test_a_cache_of_binaries_alone_is_not_ours(folder, monkeypatch):
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    assert ".target sm_90" in compile_plus().code


@triton.jit
def specialised_kernel(a, b, n, c, B: tl.constexpr):
    left = tl.make_tensor_descriptor(a, [B, n], [n, 1], [B, 64])
    right = tl.make_tensor_descriptor(b, [B, n], [n, 1], [B, 64])
    total = tl.zeros((B, B), tl.float32)
    for k in tl.range(0, n, 64, warp_specialize=True):
        total = tl.dot(left.load([0, k]), right.load([0, k]).T, total)
    o = tl.arange(0, B)
    tl.store(c + o[:, None] * B + o[None, :], total)


def test_warps_that_triton_adds_are_launched(folder):
    outputs = {"c": jax.ShapeDtypeStruct((128, 128), jnp.float32)}
    x = jax.ShapeDtypeStruct((128, 1024), jnp.float16)

    def run(a, b):
        options = {"grid": (1,), "outputs": outputs, "num_warps": 4, "num_stages": 2}
        inputs = {"a": a, "b": b, "n": 1024}
        return triton_call(specialised_kernel, inputs=inputs, B=128, **options)["c"]

    (eqn,) = jax.make_jaxpr(run)(x, x).eqns
    made = _triton_call.compile_launch(eqn.params["launch"], [v.aval for v in eqn.invars], HOPPER)
    (threads,) = re.findall(r"\.reqntid (\d+)", made.code)
    assert made.num_warps * 32 == int(threads) > 128


def test_assertions_of_a_kernel_made_to_debug_are_kept(folder):
    def assertions(debug):
        kernel = triton.jit(debug=debug)(asserting)
        signature = _triton_compile.Signature((np.dtype(np.float32),) * 2)
        options = (("num_warps", 4), ("num_stages", 3))
        return (
            "tt.assert" in _triton_compile.compile_kernel(kernel, signature, options, HOPPER).ttir
        )

    assert assertions(True)
    assert not assertions(None)


def asserting(x, out):
    tl.device_assert(tl.load(x) > 0)
    tl.store(out, 1.0)


def test_options_of_another_vendor_are_refused(folder):
    with pytest.raises(ValueError, match=r"`plus_kernel`: `options` has \['maxnreg'\].*gfx942"):
        compile_plus(options={"maxnreg": 64}, target=GpuTarget("hip", "gfx942"))


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("mine")

    def run():
        _triton_compile.compile_kernel.cache_clear()
        with _settings.override(cache_dir=str(tmp_path / "file")):
            return [counted(lambda added=added: compile_plus(added)) for added in (4.0, 5.0)]

    with pytest.warns(EjkernelWarning, match="EJKERNEL_CACHE_DIR") as told:
        found = [run(), run()]
    assert found == [[(1, 0)] * 2, [(0, 1)] * 2]  # this process has a folder of its own
    assert len(told) == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_can_only_be_read_is_read(folder, monkeypatch):
    """As of an image whose kernels were compiled when it was made."""
    compile_plus(6.0)
    before = sorted(folder.rglob("*"))

    def guarded(run, writes):
        def call(path, *args, **kwargs):
            if writes(*args, **kwargs) and str(path).startswith(str(folder)):
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            return run(path, *args, **kwargs)

        return call

    monkeypatch.setattr(os, "mkdir", guarded(os.mkdir, lambda *_, **__: True))
    monkeypatch.setattr(os, "open", guarded(os.open, lambda flags, *_, **__: flags & os.O_RDWR))
    for added, found in ((6.0, (0, 1)), (7.0, (1, 0)), (7.0, (0, 1)), (6.0, (0, 1))):
        _triton_compile.compile_kernel.cache_clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert counted(lambda added=added: compile_plus(added)) == found
        assert [("Read-only" in str(w.message)) for w in told] == [True] * (found == (1, 0))
    (path,) = folder.rglob("*.ptx")
    path.write_bytes(b"")
    _triton_compile.compile_kernel.cache_clear()
    assert counted(lambda: compile_plus(6.0)) == (1, 1)  # damaged: made again, elsewhere
    assert path.read_bytes() == b""
    assert sorted(folder.rglob("*")) == before


def test_a_folder_that_triton_was_told_is_used(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "theirs"))
    compile_plus()
    assert list((tmp_path / "theirs").rglob("*.cubin"))
    assert not folder.exists()


def test_a_cache_that_somebody_switched_off_stays_on_for_us(folder, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # jax-triton does so when it is imported
    assert counted(compile_plus) == (1, 0)
    _triton_compile.compile_kernel.cache_clear()
    assert counted(compile_plus) == (0, 1)
    assert list((folder / "triton").rglob("*.cubin"))
    assert os.environ["TRITON_CACHE_DIR"] == ""


def test_settings_of_triton_are_as_before(folder):
    from triton import knobs

    before = knobs.cache.dir, knobs.compilation.listener
    compile_plus()
    with pytest.raises(CompilationError):
        compile_plus(x=np.ones(7, np.float32))
    assert (knobs.cache.dir, knobs.compilation.listener) == before


PROCESS = """
import json, os, sys
from tests.callib import test_triton_compile as tests
os.environ["TRITON_CACHE_DIR"] = ""
print(json.dumps([tests.counted(lambda: tests.compile_plus(x)) for x in json.loads(sys.argv[1])]))
"""


def in_a_process(folder, *added):
    """(compiled, found) for each constant, in a process where somebody switched the cache off."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "EJKERNEL_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", PROCESS, json.dumps(added)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path):
    assert in_a_process(tmp_path, 1.0) == [[1, 0]]
    assert in_a_process(tmp_path, 1.0, 2.0) == [[0, 1], [1, 0]]  # but what is new to it


# What launches them


@pytest.fixture
def plugin():
    """JAX's GPU plugin, of which the CPU wheel has none."""
    try:
        return _triton_jaxlib.library()
    except UnsupportedError as reason:
        pytest.skip(str(reason))


def test_without_the_plugin_the_error_says_what_to_install():
    from jaxlib import gpu_triton

    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
    if any(importlib.util.find_spec(name) is not None for name in plugins):
        # a name that is missing here has changed
        assert [n for n in _triton_jaxlib.NAMES if not hasattr(gpu_triton, n)] == []
        assert _triton_jaxlib.library() is gpu_triton
    else:
        with pytest.raises(UnsupportedError, match=r"pip install 'jax\[cuda13\]'"):
            _triton_jaxlib.library()


def lower(fn, *arrays):
    with _triton_call.lower_for(HOPPER):
        return jax.jit(fn).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_a_program_for_a_gpu_that_is_not_here(folder, plugin):
    text = lower(plus, X)
    assert text.count("custom_call @triton_kernel_call") == 1
    assert "output_operand_alias<" not in text
    assert "output_operand_alias<" in lower(lambda x: plus(x, aliases={"out": "x"}), X)


def test_a_batched_program_for_a_gpu_that_is_not_here(folder, plugin):
    text = lower(jax.vmap(plus), np.stack([X, X]))
    assert text.count("custom_call @triton_kernel_call") == 1
    assert "tensor<2x8xf32>" in text


@pytest.mark.gpu
def test_values_on_the_device(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(plus(X, 2.5), X + 2.5)
        np.testing.assert_array_equal(jax.vmap(plus)(np.stack([X, 2 * X])), [X + 1, 2 * X + 1])
