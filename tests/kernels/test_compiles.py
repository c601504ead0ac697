"""Every kernel for a device compiles for it, with the configuration that is used unmeasured.

From the registry: a new kernel is compiled here without a line of its own. `make test-all` compiles
every configuration that a tuner may try, for every target.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from ejkernel import _device, _settings
from ejkernel.aot import _calls, _gpu, _programs, _targets, _tpu
from ejkernel.callib import _cuda_build
from ejkernel.kernels import Platform, kernel_registry
from tests.kernels import harness, oracles

QUICK = {
    Platform.TRITON: ("cuda:sm_90", "hip:gfx942"),
    Platform.PALLAS: ("tpu:v5e",),
    Platform.CUDA: ("cuda:sm_90",),
}
REST = {
    Platform.TRITON: ("cuda:sm_80", "cuda:sm_100"),
    Platform.CUDA: ("cuda:sm_80", "cuda:sm_100"),
    Platform.PALLAS: ("tpu:v4", "tpu:v5p", "tpu:v6e", "tpu:7x"),
}
# Kernels that refuse the small head sizes of tests compile the call that is measured on devices.
LARGE = {
    "pallas/tpu": ("page_attention", "ragged_decode_attention", "ragged_page_attention"),
}
NEEDS = {Platform.TRITON: "triton", Platform.PALLAS: "libtpu"}


def rows(targets):
    """(op, entry, direction, call, target) for every kernel that is compiled ahead of time."""
    return [
        (op, entry.name, direction, call, target)
        for op in kernel_registry.ops()
        for entry in kernel_registry.list(op)
        for target in targets.get(entry.platform, ())
        if target.startswith("tpu") == (entry.backend == "tpu")  # Mosaic GPU compiles on a GPU
        for direction in ("forward", "backward")
        if direction == "forward" or entry.backward is not None
        for call in ("example", "options")
    ]


@pytest.fixture(autouse=True)
def _keeps_compiled_kernels(without_jax_cache):
    """Triton's kernels are kept from run to run."""
    with _settings.override(cache_dir=str(oracles.FOLDER.parent)):
        yield


# Attention of a length that fills a device; other ops compile quicker in the shapes of their tests.
LONG = {n: jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16) for n in ("query", "key", "value")}


def call_of(op, entry, kind):
    """A plain call, small unless the kernel refuses that, or the one that sets most options."""
    spec = kernel_registry.spec(op)
    if kind == "example" and op in ("attention", "flash_attention"):
        return _calls.Call(spec, LONG, {})
    if kind == "example" and op in LARGE.get(entry, ()):
        return _calls.decode(op, {"arrays": {}, "options": {}})
    names = [case.name for case in spec.cases()]
    wanted = names[:1] if kind == "example" else ("cover00", "plain")
    name = next(name for name in wanted if name in names)
    values = harness.find_case(op, name).values(jnp.bfloat16, jax.random.key(0))
    values = {n: v for n, v in values.items() if v is not None}
    arrays = {n: v for n, v in values.items() if hasattr(v, "shape")}
    shapes = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in arrays.items()}
    return _calls.Call(spec, shapes, {n: v for n, v in values.items() if n not in arrays})


@functools.cache
def compiler_for(target):
    parsed = _targets.parse(target)
    return _tpu.Compiler(parsed, "x") if parsed.kind == "tpu" else _gpu.Compiler(parsed)


def check(op, entry_name, direction, call, target, record_property, every=False):
    entry = harness.find_entry(op, entry_name)
    if entry.platform == Platform.CUDA:
        if (reason := _cuda_build.why_not(target)) is not None:
            pytest.skip(reason)
    elif importlib.util.find_spec(NEEDS[entry.platform]) is None:
        pytest.skip(f"needs {NEEDS[entry.platform]}")
    compiler, parsed = compiler_for(target), _targets.parse(target)
    compiler.expect([])  # no schedules
    programs = _programs.Programs(call_of(op, entry_name, call), parsed, compiler.wrap)
    jobs = list(programs.jobs([entry], [direction], every, compiler.refusal))
    if jobs[0].refusal is not None:
        assert len(jobs) == 1
        assert entry.why_not(programs.args, programs.device, direction) is not None
        record_property("refused", True)
        return
    for job in jobs:
        function, inputs = programs.program(job)
        made = compiler.compile(function, inputs, {})
        limit = _device.shared_memory(parsed.capability)
        if parsed.kind != "tpu":
            assert made["kernels"], "it launches no kernel"
            assert all((kernel.shared_bytes or 0) <= limit for kernel in made["kernels"])


def in_time():
    """In `make test` an example of each kernel, for AMD forward alone.

    Of flash attention also its backward for AMD, and calls with most options, on TPUs these alone.
    """
    for op, name, direction, call, target in rows(QUICK):
        own, example = harness.find_entry(op, name).base is None, call == "example"
        amd, leading = target == "hip:gfx942", op == "flash_attention"
        quick = own and example and not (amd and direction == "backward")
        quick |= leading and (example or not amd)
        quick &= not (leading and example and target.startswith("tpu"))
        late = [] if quick else [pytest.mark.slow]
        yield pytest.param(op, name, direction, call, target, marks=late)


@pytest.mark.parametrize(("op", "entry", "direction", "call", "target"), list(in_time()))
def test_the_first_guess_compiles(op, entry, direction, call, target, record_property):
    check(op, entry, direction, call, target, record_property)


ALL = {platform: (*QUICK[platform], *REST[platform]) for platform in QUICK}


@pytest.mark.slow
@pytest.mark.parametrize(("op", "entry", "direction", "call", "target"), rows(ALL))
def test_every_candidate_compiles(op, entry, direction, call, target, record_property):
    check(op, entry, direction, call, target, record_property, every=True)


def test_a_tpu_kernel_that_fetches_pages_compiles():
    pytest.importorskip("libtpu")
    from tests.blocks import pages

    compiler = compiler_for("tpu:v5e")
    compiler.expect([])
    table, values = ((3, 4), jnp.int32), ((7, 8, 128), jnp.float32)
    shapes = tuple(jax.ShapeDtypeStruct(*x) for x in (table, values))
    assert compiler.compile(pages.sum_of_pages, shapes, {})["argument_bytes"] >= 7 * 8 * 128 * 4
