"""The examples of the design documents, as they are written there; each gives the right value."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from beartype import beartype
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int
from numpy.testing import assert_allclose, assert_array_equal

from ejkernel import _settings
from ejkernel.errors import EjkernelWarning, UnsupportedError
from ejkernel.kernels import Backend, Platform, kernel_registry
from ejkernel.ops import (
    BwdParams,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Invocation,
    Kernel,
    PersistentCache,
    clear_invocations,
)


def draw(*shapes, seed=0):
    """Independent normal arrays of these shapes."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def plain_attention(q, k, v):
    """What every attention below must give, from JAX's own."""
    return jax.nn.dot_product_attention(q, k, v)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A cache folder of the test's own, also for threads of the tuner."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "default"))
    _settings._from_environment.cache_clear()
    yield
    monkeypatch.undo()
    _settings._from_environment.cache_clear()


@pytest.fixture
def a_b():
    return draw((6, 4), (4, 5))


@pytest.fixture
def executor():
    return Executor(ConfigSelectorChain(cache=ConfigCache()))


# Kernel: the building block


@dataclass(frozen=True)
class MyConfig:
    block_size: int = 128
    num_warps: int = 4
    algorithm: str = "default"


class MyKernel(Kernel[MyConfig, jnp.ndarray]):
    def __init__(self):
        super().__init__(name="my_kernel")

    def run(self, a, b, *, cfg: MyConfig, **kwargs) -> jnp.ndarray:
        """Default implementation."""
        return jnp.dot(a, b)

    def heuristic_cfg(self, inv: "Invocation") -> MyConfig:
        """Generate config based on input shapes."""
        # inv.args contains the input arrays
        a = inv.args[0]
        block = 128 if a.shape[0] >= 128 else 64
        return MyConfig(block_size=block)


class ShowsConfig(MyKernel):
    """Adds the block size to the product, so that the result tells which config ran."""

    def run(self, a, b, *, cfg: MyConfig, **kwargs) -> jnp.ndarray:
        return jnp.dot(a, b) + cfg.block_size


class Tunable(MyKernel):
    def config_space(self, inv: Invocation) -> list[MyConfig]:
        """Return configs to try during autotuning."""
        return [
            MyConfig(block_size=64, num_warps=2),
            MyConfig(block_size=128, num_warps=4),
            MyConfig(block_size=256, num_warps=8),
        ]


def test_basic_kernel(a_b, executor):
    a, b = a_b
    my_kernel = MyKernel()
    assert my_kernel.name == "my_kernel"
    assert_allclose(executor(my_kernel, a, b), np.dot(a, b), rtol=1e-5)
    assert executor.choose(my_kernel, a, b).cfg == MyConfig(block_size=64)
    large = jnp.ones((128, 4))
    assert executor.choose(my_kernel, large, b).cfg == MyConfig(block_size=128)


@dataclass(frozen=True)
class AttentionConfig:
    triton_params: tuple = ()
    pallas_params: tuple = ()


class AttentionKernel(Kernel[AttentionConfig, jnp.ndarray]):
    def run_triton(self, q, k, v, *, cfg, **kwargs):
        """Triton GPU implementation."""
        return plain_attention(q, k, v) + 1

    def run_pallas(self, q, k, v, *, cfg, **kwargs):
        """Pallas TPU implementation."""
        return plain_attention(q, k, v) + 2

    def run_xla(self, q, k, v, *, cfg, **kwargs):
        """XLA fallback implementation."""
        return plain_attention(q, k, v)

    def run(self, q, k, v, *, cfg, **kwargs):
        """Default fallback."""
        return self.run_xla(q, k, v, cfg=cfg, **kwargs)


def test_platform_specific_kernel(executor):
    q, k, v = draw((1, 6, 2, 4), (1, 7, 2, 4), (1, 7, 2, 4))
    offset = {"gpu": 1, "tpu": 2, "cpu": 0}[jax.default_backend()]
    out = executor(AttentionKernel(), q, k, v, cfg=AttentionConfig())
    assert_allclose(out, plain_attention(q, k, v) + offset, rtol=1e-5)
    expected = {"gpu": "triton/gpu", "tpu": "pallas/tpu", "cpu": "xla/cpu"}
    choice = executor.choose(AttentionKernel(), q, k, v, cfg=AttentionConfig())
    assert choice.implementation.name == expected[jax.default_backend()]


def test_custom_gradients(a_b, executor):
    def custom_forward(a, b, cfg):
        return jnp.dot(a, b)

    def custom_grad_a(a, b, ct, cfg):
        return 10 * jnp.dot(ct, b.T)  # ten times too much: the rule is seen at work

    def custom_grad_b(a, b, ct, cfg):
        return jnp.dot(a.T, ct)

    class MyKernel(Kernel[MyConfig, jnp.ndarray]):
        def run(self, a, b, *, cfg, **kwargs):
            return custom_forward(a, b, cfg)

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            """Custom backward pass."""
            a, b = primals
            ct = cotangents[0]
            grad_a = custom_grad_a(a, b, ct, cfg)
            grad_b = custom_grad_b(a, b, ct, cfg)
            return (grad_a, grad_b)

    a, b = a_b
    kernel = MyKernel()

    def loss(dot):
        return jax.value_and_grad(lambda a, b: jnp.sin(dot(a, b)).sum(), argnums=(0, 1))(a, b)

    value, (grad_a, grad_b) = loss(lambda a, b: executor(kernel, a, b, cfg=MyConfig()))
    expected, (expected_a, expected_b) = loss(jnp.dot)
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(grad_a, 10 * expected_a, rtol=1e-4, atol=1e-5)
    assert_allclose(grad_b, expected_b, rtol=1e-4, atol=1e-5)


# Invocation and executor


def test_invocation(a_b):
    a, b = a_b
    my_kernel = MyKernel()
    inv = Invocation(
        kernel=my_kernel,
        args=(a, b),  # Positional arguments
        kwargs={"scale": 1.0},  # Keyword arguments
        metadata={"device": jax.devices()[0]},  # Shapes, dtypes, device info
    )
    assert inv.abstract_args == tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b))
    assert inv.device_fingerprint.startswith(jax.default_backend())
    assert inv.key == Executor().invocation(my_kernel, a, b, scale=1.0).key
    assert my_kernel.heuristic_cfg(inv) == MyConfig(block_size=64)


def test_executor(a_b):
    a, b = a_b
    my_kernel, my_config = ShowsConfig(), MyConfig(block_size=3)

    # Create the execution stack
    cache = ConfigCache()
    selector = ConfigSelectorChain(cache=cache)
    executor = Executor(selector)

    # Run a kernel
    result = executor(my_kernel, a, b)
    assert_allclose(result, np.dot(a, b) + 64, rtol=1e-5)

    # Run with explicit config
    result = executor(my_kernel, a, b, cfg=my_config)
    assert_allclose(result, np.dot(a, b) + 3, rtol=1e-5)
    assert len(cache) == 0  # neither a heuristic nor an override is worth remembering


# Configuration selection and caching


@pytest.mark.parametrize("key", ["a key", ("matmul", 64, "float32")])
def test_config_cache(key):
    cache, config = ConfigCache(), MyConfig(block_size=3)
    assert cache.get(key) is None  # Returns None if not found
    assert key not in cache

    # Store a config
    cache.put(key, config)

    # Retrieve
    assert cache.get(key) == config

    # Check existence
    assert key in cache


@pytest.mark.parametrize("key", ["a key", ("matmul", 64, "float32")])
def test_persistent_cache(key, tmp_path):
    config = MyConfig(block_size=3)
    persistent = PersistentCache(path=tmp_path / "configs")
    assert persistent.get(key) is None
    assert key not in persistent

    # Same interface as ConfigCache
    persistent.put(key, config)
    assert persistent.get(key) == config

    # Survives the process
    again = PersistentCache(path=str(tmp_path / "configs"))
    assert again.get(key) == config
    assert key in again


def test_persistent_cache_understands_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    persistent = PersistentCache(path="~/.cache/ejkernel/configs")
    persistent.put("key", MyConfig())
    assert persistent.get("key") == MyConfig()
    assert list((tmp_path / ".cache" / "ejkernel" / "configs").rglob("*.json"))


def test_config_selector_chain(a_b, tmp_path):
    a, b = a_b
    selector = ConfigSelectorChain(
        cache=ConfigCache(),  # Level 1: In-memory
        persistent=PersistentCache(),  # Level 2: Disk
        autotune=True,  # Level 3: Benchmark if not found
    )
    kernel, executor = Tunable(), Executor(selector)
    assert_allclose(executor(kernel, a, b), np.dot(a, b), rtol=1e-5)
    choice = executor.choose(kernel, a, b)
    assert choice.source == "memory"
    assert choice.cfg in [*kernel.config_space(None), MyConfig(block_size=64)]
    assert len(choice.times_ms) == 4  # the heuristic's config, and the three of the space
    assert list((tmp_path / "default").rglob("*.json"))

    # Disk-based storage that outlives the process
    later = ConfigSelectorChain(cache=ConfigCache(), persistent=PersistentCache(), autotune=False)
    stored = Executor(later).choose(kernel, a, b)
    assert (stored.source, stored.cfg) == ("persistent", choice.cfg)


def test_chain_prefers_what_is_remembered(a_b):
    a, b = a_b
    kernel, cache = ShowsConfig(), ConfigCache()
    executor = Executor(ConfigSelectorChain(cache=cache))
    cache.put(executor.invocation(kernel, a, b).key, MyConfig(block_size=7))
    assert_allclose(executor(kernel, a, b), np.dot(a, b) + 7, rtol=1e-5)


class TakesPair(Tunable):
    """Its one argument is a pair of arrays."""

    def run(self, args, *, cfg, **kwargs):
        a, b = args
        return jnp.dot(a, b) + cfg.block_size

    def heuristic_cfg(self, inv):
        return MyConfig(block_size=1)


def test_temporary_overrides(a_b):
    from ejkernel.ops import overlay_cache, policy_override

    kernel, args = TakesPair(), tuple(a_b)
    product = np.dot(*args)
    chain = ConfigSelectorChain(cache=ConfigCache(), autotune=True)
    executor = Executor(chain)
    my_custom_cache = ConfigCache()
    my_custom_cache.put(executor.invocation(kernel, args).key, MyConfig(block_size=1000))

    # Temporarily use different cache
    with overlay_cache(my_custom_cache):
        result = executor(kernel, args)
    assert_allclose(result, product + 1000, rtol=1e-5)

    # Temporarily change autotuning policy
    with policy_override(autotune=False):
        result = executor(kernel, args)  # No autotuning
    assert_allclose(result, product + 1, rtol=1e-5)
    assert len(chain.cache) == 0


# Autotuning


def test_config_space(a_b):
    a, b = a_b
    kernel = Tunable()
    inv = Executor().invocation(kernel, a, b)
    assert [c.block_size for c in kernel.config_space(inv)] == [64, 128, 256]
    assert kernel.candidate_cfgs(inv) == kernel.config_space(inv)


def test_manual_autotuning(a_b):
    from ejkernel.ops import autotune, benchmark

    a, b = a_b
    kernel = Tunable()
    inv = Executor().invocation(kernel, a, b)

    # Autotune a specific kernel call
    best_config = autotune(
        kernel,
        a,
        b,
        configs=kernel.config_space(inv),
        num_warmup=3,
        num_iters=10,
    )
    assert best_config in kernel.config_space(inv)

    # Simple function benchmarking
    time_ms = benchmark(lambda: kernel(a, b), num_iters=100)
    assert 0 < time_ms < 1e4


def test_autotune_finds_the_fast_config():
    from ejkernel.ops import autotune

    class Repeats(Tunable):
        def run(self, a, b, *, cfg, **kwargs):
            def again(_, x):
                return jnp.dot(x, b) / 100

            # 256 is the size that does the work once; every other does it 200 times too often
            extra = jax.lax.fori_loop(0, 1 if cfg.block_size == 256 else 200, again, a)
            return jnp.dot(a, b) + 0 * extra

    a, b = draw((128, 128), (128, 128))
    kernel = Repeats()
    inv = Executor().invocation(kernel, a, b)
    best_config = autotune(kernel, a, b, configs=kernel.config_space(inv), num_iters=3)
    assert best_config == MyConfig(block_size=256, num_warps=8)


@pytest.fixture
def no_recordings():
    clear_invocations()
    yield
    clear_invocations()


@pytest.mark.usefixtures("no_recordings")
def test_batch_autotuning(a_b):
    from ejkernel.ops import autotune_recorded, get_invocations, record_invocation

    a, b = a_b
    kernel = Tunable()
    inv = Invocation(kernel=kernel, args=(a, b))

    # Enable recording
    record_invocation(kernel, inv)
    record_invocation(kernel, Invocation(kernel=kernel, args=(a[:3], b)))

    # Get all recorded invocations
    invocations = get_invocations()
    assert [i.abstract_args[0].shape for i in invocations] == [(6, 4), (3, 4)]

    # Autotune all at once
    results = autotune_recorded(invocations)
    assert list(results) == [i.key for i in invocations]
    for choice in results.values():
        assert choice.source == "autotune"
        assert choice.cfg in [*kernel.config_space(inv), MyConfig(block_size=64)]
    assert Executor().invocation(kernel, a, b).key in results
    assert_allclose(kernel(a, b), np.dot(a, b), rtol=1e-5)


# Batch processing


def test_vmap_with_config():
    from ejkernel.ops import vmap_with_config

    asked = []

    class Counts(MyKernel):
        def heuristic_cfg(self, inv):
            asked.append([x.shape for x in inv.args])
            return MyConfig()

    batched_a, batched_b = draw((5, 6, 4), (5, 4, 3))
    batched_result = vmap_with_config(
        Counts(),
        in_axes=(0, 0),  # Batch over first axis
    )(batched_a, batched_b)
    assert_allclose(batched_result, np.matmul(batched_a, batched_b), rtol=1e-4, atol=1e-5)
    assert asked == [[(6, 4), (4, 3)]]  # once, for one element


def test_pmap_with_config():
    from ejkernel.ops import pmap_with_config

    count = jax.device_count()
    sharded_a, sharded_b = draw((count, 6, 4), (count, 4, 3))

    # Run kernel across multiple devices
    parallel_result = pmap_with_config(MyKernel(), axis_name="devices")(sharded_a, sharded_b)
    assert_allclose(parallel_result, np.matmul(sharded_a, sharded_b), rtol=1e-4, atol=1e-5)
    assert len(parallel_result.sharding.device_set) == count


# Configuration parameters


def test_fwd_params_and_bwd_params():
    fwd = FwdParams(
        q_blocksize=128,  # Query block size
        kv_blocksize=256,  # Key-value block size
        num_warps=4,  # GPU warps
        num_stages=2,  # Pipeline stages
    )
    bwd = BwdParams(
        q_blocksize=64,
        kv_blocksize=128,
    )
    assert (fwd.q_blocksize, fwd.kv_blocksize, fwd.num_warps, fwd.num_stages) == (128, 256, 4, 2)
    assert (bwd.q_blocksize, bwd.kv_blocksize, bwd.num_warps, bwd.num_stages) == (
        64,
        128,
        None,
        None,
    )

    from ejkernel.modules import flash_attention

    q, k, v = draw((1, 9, 2, 4), (1, 9, 2, 4), (1, 9, 2, 4))

    def loss(attend):
        return jax.value_and_grad(lambda q: jnp.sin(attend(q, k, v)).sum())(q)

    actual = loss(lambda q, k, v: flash_attention(q, k, v, fwd_params=fwd, bwd_params=bwd))
    for got, expected in zip(actual, loss(plain_attention), strict=True):
        assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


# Utility functions


def test_device_detection():
    from ejkernel.ops import device_fingerprint, device_kind, get_device_platform

    # Get device type
    assert device_kind() == jax.default_backend()

    # Get platform for dispatch
    platforms = {"gpu": "triton", "tpu": "pallas", "cpu": "xla"}
    assert get_device_platform() == platforms[jax.default_backend()]

    # Unique device identifier (for caching)
    fingerprint = device_fingerprint()
    assert fingerprint.startswith(f"{device_kind()}|")
    assert fingerprint == device_fingerprint()


def test_sharding_utilities(a_b):
    from ejkernel.ops import default_key_builder_with_sharding, sharding_fingerprint

    kernel, kwargs = MyKernel(), {"scale": 1.0}
    plain = jnp.ones((2 * jax.device_count(), 4))
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    array = jax.device_put(plain, NamedSharding(mesh, PartitionSpec("x")))

    # Get fingerprint of array sharding
    assert sharding_fingerprint(plain) is None
    assert sharding_fingerprint(array) == f"{{'x': {jax.device_count()}}}:('x',)"

    # Build cache key including sharding info
    key = default_key_builder_with_sharding(kernel, (array, a_b[1]), kwargs)
    assert key == default_key_builder_with_sharding(kernel, (array, a_b[1]), kwargs)
    assert key != default_key_builder_with_sharding(kernel, (plain, a_b[1]), kwargs)
    assert key != default_key_builder_with_sharding(kernel, (array, a_b[1]), {"scale": 2.0})


def test_serialization():
    from ejkernel.ops import from_json, stable_json, to_json

    config = MyConfig(block_size=3)

    # Serialize config to JSON
    json_str = to_json(config)

    # Deserialize
    assert from_json(json_str, MyConfig) == config

    # Stable JSON (deterministic ordering for cache keys)
    stable_str = stable_json(config)
    assert stable_str == '{"algorithm":"default","block_size":3,"num_warps":4}'


def test_hlo_analysis(a_b, executor):
    from ejkernel.ops import (
        extract_labels_from_hlo_text,
        find_labels_in_lowered,
        labels_to_configs,
    )

    kernel = MyKernel()

    def fn(args):
        return executor(kernel, *args)

    args = tuple(a_b)
    with _settings.override(ops_stamp="json"):
        # Find labeled operations in lowered JAX code
        lowered = jax.jit(fn).lower(args)
        labels = find_labels_in_lowered(lowered)
        key = executor.invocation(kernel, *args).key
    assert [label.name for label in labels] == ["my_kernel"]

    # Extract from HLO text
    hlo_text = lowered.compile().as_text()
    assert extract_labels_from_hlo_text(hlo_text) == labels

    # Convert labels to configs
    configs = labels_to_configs(labels)
    assert list(configs) == [key]
    assert configs[key]["config"] == {"algorithm": "default", "block_size": 64, "num_warps": 4}
    assert configs[key]["source"] == "heuristics"


def test_labeling_operations():
    from ejkernel.ops import find_labels_in_lowered, label

    # Add label for HLO analysis
    @label("my_attention")
    def my_attention(q, k, v):
        return plain_attention(q, k, v)

    q, k, v = draw((1, 6, 2, 4), (1, 7, 2, 4), (1, 7, 2, 4))
    assert_allclose(my_attention(q, k, v), plain_attention(q, k, v), rtol=1e-6)
    lowered = jax.jit(my_attention).lower(q, k, v)
    assert [found.name for found in find_labels_in_lowered(lowered)] == ["my_attention"]
    assert my_attention.__name__ == "my_attention"


# Best practices


def test_module_api():
    from ejkernel.modules import flash_attention

    q, k, v = draw((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    output = flash_attention(q, k, v, causal=True)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("seq_len", "block"), [(2048, 256), (512, 128), (511, 64)])
def test_heuristics(seq_len, block):
    class WithHeuristic(Kernel[MyConfig, jnp.ndarray]):
        def run(self, q, *, cfg, **kwargs):
            return q[0, 0, 0, 0] + cfg.block_size

        def heuristic_cfg(self, inv):
            # Consider input shapes
            q = inv.args[0]
            _batch, seq_len, _heads, _dim = q.shape

            # Larger sequences benefit from larger blocks
            if seq_len >= 2048:
                block = 256
            elif seq_len >= 512:
                block = 128
            else:
                block = 64

            return MyConfig(block_size=block)

    q = jnp.ones((1, seq_len, 1, 1))
    assert Executor()(WithHeuristic(), q) == 1 + block
    assert jax.jit(lambda q: Executor()(WithHeuristic(), q))(q) == 1 + block


def test_only_structure_is_in_a_key(a_b, executor):
    # Shapes and dtypes are used for cache keys
    # Actual values don't matter, only structure
    a, b = a_b
    key = executor.invocation(MyKernel(), a, b).key
    assert executor.invocation(MyKernel(), 2 * a, b).key == key
    assert executor.invocation(MyKernel(), a[:3], b).key != key
    assert executor.invocation(MyKernel(), a.astype(jnp.bfloat16), b).key != key


def test_profiling(a_b, executor, tmp_path):
    kernel, args = TakesPair(), tuple(a_b)
    with jax.profiler.trace(str(tmp_path / "jax-trace")):
        result = executor(kernel, args)
    assert_allclose(result, np.dot(*args) + 1, rtol=1e-5)
    assert any(path.is_file() for path in (tmp_path / "jax-trace").rglob("*"))


# The usage example


def test_usage():
    from ejkernel.modules import FlashAttention, create_default_executor

    # Initialize
    executor = create_default_executor()
    attention = FlashAttention()

    # Create inputs
    batch, seq_len, num_heads, head_dim = 2, 1024, 8, 64
    key = jax.random.PRNGKey(0)
    q = k = v = jax.random.normal(key, (batch, seq_len, num_heads, head_dim))

    # Execute attention with automatic optimization
    with pytest.warns(EjkernelWarning, match="dropout_seed"):
        output = executor(
            attention,
            q,
            k,
            v,
            causal=True,
            dropout_prob=0.1,
            logits_soft_cap=30.0,  # Gemma-2 style soft capping
        )
    assert output.shape == q.shape
    # the first query sees the first key alone: kept and scaled up, or dropped
    first = np.asarray(output[:, 0])
    kept = np.abs(first).max(-1, keepdims=True) > 0
    assert_allclose(first, np.where(kept, v[:, 0] / 0.9, 0), rtol=1e-5)
    seeded = executor(
        attention, q, k, v, causal=True, dropout_prob=0.1, logits_soft_cap=30.0, dropout_seed=0
    )
    assert_array_equal(output, seeded)
    scores = jnp.einsum("bthd,bshd->bhts", q[:, -1:], k) * head_dim**-0.5
    weights = jax.nn.softmax(30.0 * jnp.tanh(scores / 30.0))
    last = jnp.einsum("bhts,bshd->bthd", weights, v)
    whole = executor(attention, q, k, v, causal=True, logits_soft_cap=30.0)
    assert_allclose(whole[:, -1:], last, rtol=1e-3, atol=1e-4)


# The registry, and tests across backends


@pytest.fixture
def registry_restored():
    """Takes out again what a test registers."""
    before = kernel_registry.list()
    yield
    for entry in kernel_registry.list():
        if entry not in before and entry.base is None:
            kernel_registry.unregister(entry)


def create_test_inputs():
    q, k, v = draw((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    return {"query": q, "key": k, "value": v, "causal": True}


def test_attention_consistency():
    """Ensure all backends produce equivalent results."""
    # Generate test inputs
    inputs = create_test_inputs()

    # Get all implementations
    xla_impl = kernel_registry.get("flash_attention", Platform.XLA)

    # Compute outputs
    out_xla = xla_impl(**inputs)
    q, k, v = (inputs[name] for name in ("query", "key", "value"))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    assert_allclose(out_xla, expected, rtol=1e-5, atol=1e-5)

    # Compare
    here = (Backend.ANY, jax.default_backend())
    there = {e.platform for e in kernel_registry.list("flash_attention") if e.backend in here}
    for platform in (Platform.TRITON, Platform.PALLAS):
        if platform in there:
            out = kernel_registry.get("flash_attention", platform)(**inputs)
            assert_allclose(out, out_xla, rtol=1e-5, atol=1e-5)
        else:
            with pytest.raises(UnsupportedError, match=f"`flash_attention`: .*{platform}"):
                kernel_registry.get("flash_attention", platform)


def test_custom_vjp():
    """Verify custom gradients match autograd."""

    def create_differentiable_inputs():
        return {name: x for name, x in create_test_inputs().items() if name != "causal"}

    def kernel_with_custom_vjp(inputs):
        flash_attention = kernel_registry.get("flash_attention", Platform.XLA)
        return jnp.sin(flash_attention(**inputs, causal=True)).sum()

    def kernel_without_vjp(inputs):
        arrays = (inputs[name] for name in ("query", "key", "value"))
        return jnp.sin(jax.nn.dot_product_attention(*arrays, is_causal=True)).sum()

    # Create test case
    inputs = create_differentiable_inputs()

    # Custom VJP gradient
    custom_grads = jax.grad(kernel_with_custom_vjp)(inputs)

    # Autograd gradient (reference)
    auto_grads = jax.grad(kernel_without_vjp)(inputs)

    # Compare
    assert custom_grads.keys() == auto_grads.keys()
    for name, grad in custom_grads.items():
        assert_allclose(grad, auto_grads[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("registry_restored")
def test_register():
    calls = []

    # a priority of its own, so that it stands beside the kernels of the library
    @kernel_registry.register("flash_attention", Platform.XLA, Backend.ANY, priority=1)
    @kernel_registry.register("flash_attention", Platform.TRITON, Backend.GPU, priority=1)
    @jaxtyping.jaxtyped(typechecker=beartype)
    def flash_attention(
        query: Float[Array, "batch seq_len_q num_heads head_dim"],
        key: Float[Array, "batch seq_len_k num_kv_heads head_dim"],
        value: Float[Array, "batch seq_len_k num_kv_heads head_dim"],
        attention_mask: Bool[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
        causal: bool = False,
        softmax_scale: float | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | None = None,
        fwd_params: FwdParams | None = None,
        bwd_params: BwdParams | None = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        cum_seqlens_q: Int[Array, "batch+1"] | None = None,
        cum_seqlens_k: Int[Array, "batch+1"] | None = None,
        softmax_aux: Float[Array, "..."] | None = None,
    ) -> Float[Array, "batch seq_len_q num_heads head_dim"]:
        calls.append(softmax_scale)
        return 2 * jax.nn.dot_product_attention(
            query, key, value, bias, attention_mask, scale=softmax_scale, is_causal=causal
        )

    inputs = create_test_inputs()
    out = kernel_registry.get("flash_attention", Platform.XLA)(**inputs)
    q, k, v = (inputs[name] for name in ("query", "key", "value"))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    assert_allclose(out, 2 * expected, rtol=1e-5, atol=1e-5)
    assert calls == [8**-0.5]
    entries = [e for e in kernel_registry.list("flash_attention") if e.priority == 1]
    assert {(e.platform, e.backend) for e in entries} == {
        (Platform.TRITON, Backend.GPU),
        (Platform.XLA, Backend.ANY),
    }
    assert kernel_registry.validate_signatures() == []

    from ejkernel.modules import flash_attention as public

    # an option it does not take is not lost: another kernel serves the call
    _, lse = public(**inputs, return_lse=True)
    assert lse.shape == (2, 4, 9)
    assert len(calls) == 1
