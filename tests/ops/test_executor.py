"""The executor: one program for one kind of call, and none for a call that failed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from ejkernel import _settings
from ejkernel.modules import FlashAttention, create_default_executor
from ejkernel.ops import Executor, Kernel


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global X
    X = jax.random.normal(jax.random.key(0), (3,))


class Traced(Kernel):
    """Adds how often it was traced; notes the option of every trace."""

    def __init__(self):
        super().__init__(name="traced")
        self.traces = []

    def run(self, x, option=None, *, cfg, **options):
        self.traces.append(option)
        return x + len(self.traces)

    def heuristic_cfg(self, inv):
        return None


@pytest.fixture
def executor():
    return Executor()


@pytest.fixture
def kernel():
    return Traced()


@pytest.fixture
def counted():
    """`FlashAttention` with a list that grows with every trace."""
    traces = []

    class Counted(FlashAttention):
        def prepare(self, call):
            traces.append(call)
            return super().prepare(call)

    return Counted(), traces


def qkv(seed=0, length=6):
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(jax.random.normal(key, (1, length, 2, 4)) for key in keys)


def test_a_second_identical_call_does_not_retrace(executor, kernel):
    for _ in range(3):
        assert_array_equal(executor(kernel, X, "a"), X + 1)
    assert kernel.traces == ["a"]


def test_new_values_of_arrays_do_not_retrace(executor, kernel):
    assert_array_equal(executor(kernel, X), X + 1)
    assert_array_equal(executor(kernel, 2 * X), 2 * X + 1)
    assert len(kernel.traces) == 1


def test_new_shapes_and_dtypes_do_retrace(executor, kernel):
    for x in (X, jnp.zeros(4), jnp.zeros(3, jnp.int32), jnp.zeros((3, 1))):
        executor(kernel, x)
    assert len(kernel.traces) == 4


def test_one_program_serves_all_seeds_and_values(executor, counted):
    flash, traces = counted
    outs = [executor(flash, *qkv(), dropout_prob=0.5, dropout_seed=s) for s in (0, 1, 2**40)]
    assert not np.array_equal(outs[0], outs[1])
    assert not np.array_equal(outs[0], outs[2])
    executor(flash, *qkv(seed=1), dropout_prob=0.5, dropout_seed=3)
    assert len(traces) == 1


def test_different_static_options_are_different_programs(executor, counted):
    flash, traces = counted
    plain, causal = executor(flash, *qkv()), executor(flash, *qkv(), causal=True)
    assert not np.array_equal(plain, causal)
    assert_array_equal(executor(flash, *qkv()), plain)
    assert_array_equal(executor(flash, *qkv(), causal=True), causal)
    assert len(traces) == 2


def test_positional_and_keyword_spellings_are_one_program(executor, counted):
    flash, traces = counted
    q, k, v = qkv()
    first = executor(flash, q, k, v, None, None, True)
    assert_array_equal(executor(flash, q, value=v, key=k, causal=True), first)
    assert len(traces) == 1


def test_equal_options_of_different_types_are_not_confused(executor, kernel):
    options = [1, True, 1.0, np.float32(1.0), 0, False, 0.0]
    for _ in range(2):
        for option in options:
            executor(kernel, X, option)
    assert kernel.traces == options
    assert [type(trace) for trace in kernel.traces] == [type(option) for option in options]


def test_negative_zero_is_not_zero(executor, kernel):
    executor(kernel, X, 0.0)
    executor(kernel, X, -0.0)
    assert [np.copysign(1.0, trace) for trace in kernel.traces] == [1.0, -1.0]


def test_options_inside_containers_are_told_apart(executor, kernel):
    options = [(1, 2), [1, 2], (1.0, 2), {"a": 1}, {"b": 1}, {"a": True}, None, ()]
    for _ in range(2):
        for option in options:
            executor(kernel, X, option)
    assert kernel.traces == options


def test_array_and_option_in_one_place_are_told_apart(executor, kernel):
    executor(kernel, X, 1.0)
    executor(kernel, X, jnp.float32(1.0))
    executor(kernel, X, 1.0)
    assert len(kernel.traces) == 2


def test_an_option_that_cannot_be_hashed_works(executor, kernel):
    assert_array_equal(executor(kernel, X, {1, 2}), X + 1)
    assert_array_equal(executor(kernel, X, {1, 3}), X + 2)
    assert kernel.traces == [{1, 2}, {1, 3}]


class Unhashable:
    __hash__ = None

    def __eq__(self, other):
        return True


@pytest.mark.parametrize(
    "option", [PartitionSpec("x"), 1j, Unhashable()], ids=lambda option: type(option).__name__
)
def test_an_option_that_json_does_not_know_works(executor, kernel, option):
    assert_array_equal(executor(kernel, X, option), X + 1)
    assert kernel.traces == [option]


def test_numpy_inputs(executor, kernel, counted):
    assert_array_equal(executor(kernel, np.asarray(X)), X + 1)
    executor(kernel, 2 * np.asarray(X))
    assert len(kernel.traces) == 1
    flash, traces = counted
    arrays = qkv()
    expected = executor(flash, *arrays, causal=True)
    for _ in range(2):
        actual = executor(flash, *map(np.asarray, arrays), causal=True)
        assert isinstance(actual, jax.Array)
        assert_array_equal(actual, expected)
    mixed = executor(flash, arrays[0], *map(np.asarray, arrays[1:]), causal=True)
    assert_array_equal(mixed, expected)
    assert len(traces) <= 3


def test_a_failed_call_is_not_remembered(executor):
    class Sometimes(Traced):
        broken = True

        def run(self, x, *, cfg):
            if self.broken:
                raise RuntimeError("not yet")
            return x

    kernel = Sometimes()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not yet"):
            executor(kernel, X)
    assert len(executor._programs) == 0
    kernel.broken = False
    assert_array_equal(executor(kernel, X), X)
    assert len(executor._programs) == 1


def test_a_refused_argument_is_not_remembered(executor, counted):
    flash, _ = counted
    q, k, v = qkv()
    for _ in range(2):
        with pytest.raises(ValueError, match="logits_soft_cap"):
            executor(flash, q, k, v, logits_soft_cap=-1.0)
        with pytest.raises(TypeError, match=r"`flash_attention`.*casual"):
            executor(flash, q, k, v, casual=True)
    assert len(executor._programs) == 0


def test_kernels_do_not_share_programs(executor):
    first, second = Traced(), Traced()
    executor(first, X)
    executor(second, X)
    assert (len(first.traces), len(second.traces)) == (1, 1)


def test_configs_are_different_programs(executor):
    @dataclasses.dataclass(frozen=True)
    class Config:
        factor: int

    class Scale(Kernel):
        def run(self, x, *, cfg):
            return x * cfg.factor

        def heuristic_cfg(self, inv):
            return Config(1)

    kernel = Scale()
    for factor in (2, 3, 2):
        assert_array_equal(executor(kernel, X, cfg=Config(factor)), factor * X)
    assert_array_equal(executor(kernel, X), X)


def test_the_number_of_programs_is_bounded(executor, kernel, monkeypatch):
    monkeypatch.setattr("ejkernel.ops.execution.executor._MAX_PROGRAMS", 3)
    for number in range(6):
        executor(kernel, X, number)
    assert len(executor._programs) == 3
    executor(kernel, X, 5)
    assert len(kernel.traces) == 6


def test_inside_jit_a_call_traces_once(executor, kernel):
    function = jax.jit(lambda x: executor(kernel, x, "in jit"))
    for _ in range(3):
        assert_array_equal(function(X), X + 1)
    assert kernel.traces == ["in jit"]


def test_settings_reach_calls_that_were_made_before(executor, counted):
    flash, _ = counted
    arrays = qkv()
    before = executor(flash, *arrays)
    with (
        _settings.override(platform="cudnn"),
        pytest.raises(NotImplementedError, match="cudnn"),
    ):
        executor(flash, *arrays)
    assert_array_equal(executor(flash, *arrays), before)


def test_precision_reaches_calls_that_were_made_before(executor):
    class Asks(Kernel):
        def run(self, x, *, cfg):
            return x, str(jax.config.jax_default_matmul_precision) == "bfloat16"

        def heuristic_cfg(self, inv):
            return None

    kernel = Asks()
    assert not executor(kernel, X)[1]
    with jax.default_matmul_precision("bfloat16"):
        assert executor(kernel, X)[1]
    assert not executor(kernel, X)[1]


def test_a_gradient_outside_jit_is_compiled_too(executor):
    concrete = []

    class Notes(Kernel):
        def run(self, x, *, cfg):
            return jnp.sin(x)

        def heuristic_cfg(self, inv):
            return None

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            concrete.append(not isinstance(cotangents[0], jax.core.Tracer))
            return (cotangents[0] * jnp.cos(primals[0]),)

    kernel = Notes()
    for _ in range(2):
        assert_allclose(jax.grad(lambda x: executor(kernel, x).sum())(X), jnp.cos(X), rtol=1e-6)
    assert not any(concrete)  # op by op, a blockwise backward is several times slower


def test_default_executor_runs_what_the_function_runs():
    arrays = qkv(seed=3)
    out = create_default_executor()(FlashAttention(), *arrays, causal=True)
    expected = jax.nn.dot_product_attention(*arrays, is_causal=True)
    assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_a_config_found_while_a_program_is_traced_serves_the_next_call():
    @dataclasses.dataclass(frozen=True)
    class Factor:
        number: int

    class Times(Kernel):
        def run(self, x, *, cfg):
            executor.chooser.cache.put(key, Factor(2))  # as a tuner in another thread might
            return x * cfg.number

        def heuristic_cfg(self, inv):
            return Factor(1)

    executor, kernel = Executor(), Times(name="times")
    key = executor.invocation(kernel, X).key
    assert_array_equal(executor(kernel, X), X)
    assert_array_equal(executor(kernel, X), 2 * X)
