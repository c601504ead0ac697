"""One environment for every test process, and the time budget printed after a run."""

import gc
import importlib.metadata
import os
import pathlib

from tests.backend import BACKEND

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TRITON_DEFAULT_FP_FUSION": "1",
    "EJKERNEL_AUTOTUNE_POLICY": "heuristics",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_COMPILATION_CACHE_DIR": str(_ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
}
if BACKEND == "cpu":
    _ENVIRONMENT["JAX_PLATFORMS"] = "cpu"
    _ENVIRONMENT["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
elif BACKEND == "gpu":  # XLA would time ways to compute each small product of the reference
    _ENVIRONMENT["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
os.environ.update(_ENVIRONMENT)

import jax  # noqa: E402
import pytest  # noqa: E402

from tests import budget, device_results, selection  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "standard")
_TESTED = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    parser.addoption("--device-results", help="a file for outcomes by kernel; see device_results")
    parser.addoption("--untested-in", help="leave out kernels that passed by this file of outcomes")
    parser.addoption("--op", help="only tests about this operation")
    parser.addoption("--random-calls", type=int, default=2, help="random calls of each operation")
    parser.addoption("--random-seed", type=int, default=0, help="the seed of the first of them")
    parser.addoption("--optimised", action="store_true", help="compile every test as a user would")


# XLA's newer way to make code for the CPU takes twice the time of the older one, which jaxlib had
# until 0.11; and code that is cut into parts for several threads takes longer altogether.
_QUICK_FLAGS = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def pytest_configure(config):
    version = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
    if BACKEND == "cpu" and version < (0, 11) and not config.getoption("--optimised"):
        os.environ["XLA_FLAGS"] += _QUICK_FLAGS  # read when the first array is made
    path = config.getoption("--device-results")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(device_results.Recorder(path))
    config.stash[_TESTED] = _tested(config)
    config.pluginmanager.register(device_results.LeftOut(config.stash[_TESTED]))


def _tested(config):
    """Kernels to leave out. Processes are told: a late one would read what this run wrote."""
    if hasattr(config, "workerinput"):
        return config.workerinput["tested"]
    path = config.getoption("--untested-in")
    return {} if path is None else device_results.tested(pathlib.Path(path))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["tested"] = node.config.stash[_TESTED]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # Every process collects all tests: a module that makes a JAX array when it is imported would
    # compile in each of them. JAX finds no device meanwhile, so that such a module fails. Tables of
    # a module hold NumPy arrays (tests/host.py); tests make JAX arrays of them when they run.
    platforms = jax.config.jax_platforms
    jax.config.update("jax_platforms", "none_while_tests_are_collected")
    try:
        return (yield)
    finally:
        jax.config.update("jax_platforms", platforms)
        gc.freeze()  # thousands of tests, which no collection of garbage need look through again


def pytest_unconfigure():
    gc.unfreeze()  # bindings of C++ report what is never freed


def pytest_collection_modifyitems(config, items):
    if (op := config.getoption("--op")) is not None:
        if op not in selection.OPS:
            raise pytest.UsageError(f"--op: {op!r} is none of {', '.join(sorted(selection.OPS))}")
        others = [item for item in items if op not in selection.ops_of(item.nodeid)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if op in selection.ops_of(item.nodeid)]
    for item in items:
        for backend, name in (("gpu", "an NVIDIA GPU"), ("tpu", "a TPU")):
            if item.get_closest_marker(backend) and BACKEND != backend:
                item.add_marker(pytest.mark.skip(reason=f"needs {name}"))
        if item.nodeid in selection.LATE:
            item.add_marker(pytest.mark.slow)
        # tests of one op share what they compile: one process runs them all
        item.add_marker(pytest.mark.xdist_group(budget.group_of(item)))
    # a long group that starts last keeps one process busy while the others wait
    items.sort(key=lambda item: -budget.limit_of(budget.part_of(item.nodeid)))


# Tests mostly wait for XLA's compiler, which takes half the time without its expensive passes.
# These look at what it makes: programs, their memory, and what a cache keeps of them.
_AS_USERS_COMPILE = ("tests/aot/", "tests/reliability/", "memory", "as_users_compile_it")


@pytest.fixture(autouse=True)
def quick_compilation(request):
    name = request.node.nodeid
    quick = BACKEND == "cpu" and not any(part in name for part in _AS_USERS_COMPILE)
    if quick and not request.config.getoption("--optimised"):
        jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    report.cpu_seconds = budget.cpu_seconds_since_last_time()
    report.is_slow = item.get_closest_marker("slow") is not None
    return report


def pytest_runtest_logreport(report):
    budget.add(report.nodeid, report.cpu_seconds, report.is_slow)


def pytest_terminal_summary(terminalreporter):
    for line in budget.report():
        terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    # the budget is one of CPUs
    if exitstatus == 0 and BACKEND == "cpu" and budget.broken():
        session.exitstatus = 1


@pytest.fixture
def without_jax_cache():
    """What libtpu makes without a device can be written to JAX's cache, but not read again."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.fixture
def usable_mosaic_interpreter():
    """A kernel that failed in the interpreter spoils those that follow, unless it is reset."""
    from ejkernel.kernels._pallas.gpu._blocks import probe

    yield
    if probe.why_not_interpreted() is None:
        from ejkernel.kernels._pallas.gpu._blocks import mosaic

        mosaic.reset_interpreter()
