"""The shipped table: which rows count as measured, which as guesses, and which not at all."""

import copy
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import msgspec
import pytest
from numpy.testing import assert_array_equal

from ejkernel._device import Target
from ejkernel.kernels import kernel_registry
from ejkernel.modules import FlashAttention
from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, Invocation, Kernel
from ejkernel.ops.config import table


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global X
    X = jax.random.normal(jax.random.key(0), (48, 16))


H200 = Target("gpu", "NVIDIA H200", "9.0")


@dataclasses.dataclass(frozen=True)
class Config:
    factor: int = 1

    def __post_init__(self):
        if self.factor < 1:
            raise ValueError(f"{self.factor=} must be positive.")


class Scale(Kernel):
    """x times the config's factor, which shows the config that ran."""

    def __init__(self):
        super().__init__(name="scale")

    def run(self, x, *, cfg, option=0):
        return x * cfg.factor

    def heuristic_cfg(self, inv):
        return Config(2)


@pytest.fixture
def shipped(monkeypatch):
    """Rows by device, in the place of those that ship."""
    content = {}
    monkeypatch.setattr(table, "rows", lambda device, op: tuple(content.get((device, op), ())))
    devices = tuple(
        {"model": model, "kind": "gpu", "capability": capability}
        for model, capability in (("NVIDIA H200", "9.0"), ("NVIDIA H100", "9.0"), ("L4", "8.9"))
    )
    monkeypatch.setattr(table, "_devices", lambda: devices)
    return content


def invocation(shape=(48, 16), target=None, dtype=jnp.float32, **kwargs):
    executor = Executor(ConfigSelectorChain(autotune=False))
    inv = executor.invocation(Scale(), jnp.ones(shape, dtype), **kwargs)
    return inv if target is None else dataclasses.replace(inv, target=target)


def row(factor=7, version=1, implementation="run/any", config=None, **call):
    # as it ships: plain values that went through JSON
    document = json.loads(json.dumps(invocation(**call).document))
    plain = {"factor": factor} if config is None else config
    return table.Row(document, implementation, version, plain, {"run/any": 0.5})


def like(made, **call):
    document = copy.deepcopy(made.call) | call
    return table.Row(document, made.implementation, made.version, made.config, made.times_ms)


def ship(shipped, *rows, device=None):
    model = invocation().target.model if device is None else device
    shipped[model, "scale"] = list(rows)


def choose(inv=None, **kwargs):
    return ConfigSelectorChain(autotune=False, **kwargs).choose(inv or invocation())


def answer(inv=None):
    choice = choose(inv)
    return choice.source, choice.cfg.factor


def test_an_exact_hit_counts_as_measured(shipped):
    ship(shipped, row())
    choice = choose()
    assert (choice.source, choice.cfg) == ("persistent", Config(7))
    assert choice.times_ms == {"run/any": 0.5}
    assert_array_equal(Executor(ConfigSelectorChain())(Scale(), X), 7 * X)


@pytest.mark.parametrize("shape", [(33, 16), (64, 16), (48, 9), (33, 9)])
def test_a_hit_within_powers_of_two_counts_as_measured(shipped, shape):
    ship(shipped, row(shape=shape))
    assert answer() == ("persistent", 7)


@pytest.mark.parametrize("reverse", [False, True])
def test_an_exact_hit_goes_before_one_within_powers_of_two(shipped, reverse):
    rows = [row(8, shape=(64, 16)), row(7)]
    ship(shipped, *(rows[::-1] if reverse else rows))
    assert answer() == ("persistent", 7)


@pytest.mark.parametrize("shape", [(32, 16), (65, 16), (128, 16), (96, 32)])
def test_a_near_shape_is_a_guess(shipped, shape):
    ship(shipped, row(shape=shape))
    assert answer() == ("heuristics", 7)


@pytest.mark.parametrize("shape", [(48, 16), (96, 16)])
def test_a_row_of_other_rivals_is_no_more_than_a_guess(shipped, shape):
    made = msgspec.structs.replace(row(shape=shape), rivals={"run/any": 2})
    ship(shipped, made)
    assert answer() == ("heuristics", 7)
    ship(shipped, msgspec.structs.replace(made, rivals={"run/any": 1}))
    assert answer() == ("persistent" if shape == (48, 16) else "heuristics", 7)


def test_the_nearest_shape_is_the_guess(shipped):
    ship(shipped, row(9, shape=(1024, 16)), row(7, shape=(96, 16)), row(8, shape=(300, 16)))
    assert answer() == ("heuristics", 7)


@pytest.mark.parametrize("shape", [(48 * 128, 16), (1, 1), (48 * 8, 16 * 16)])
def test_far_shapes_say_nothing(shipped, shape):
    ship(shipped, row(shape=shape))
    assert answer() == ("heuristics", 2)


@pytest.mark.parametrize(
    "call", [{"dtype": jnp.bfloat16}, {"option": 1}, {"shape": (48, 16, 1)}, {"shape": (48 * 16,)}]
)
def test_rows_of_other_calls_say_nothing(shipped, call):
    ship(shipped, row(**call))
    assert answer() == ("heuristics", 2)


def test_rows_of_the_backward_say_nothing_about_the_forward(shipped):
    ship(shipped, like(row(), direction="backward"))
    assert answer() == ("heuristics", 2)


def test_a_row_is_for_every_requested_platform_and_schema(shipped):
    ship(shipped, like(row(), platform="xla", schema=0, device="another name"))
    assert answer() == ("persistent", 7)


def test_a_sibling_device_is_a_guess(shipped):
    ship(shipped, row(), device="NVIDIA H100")
    assert answer(invocation(target=H200)) == ("heuristics", 7)
    ship(shipped, row(9), device="NVIDIA H200")
    assert answer(invocation(target=H200)) == ("persistent", 9)


def test_the_own_device_goes_before_a_sibling(shipped):
    ship(shipped, row(8), device="NVIDIA H100")
    ship(shipped, row(7, shape=(96, 16)), device="NVIDIA H200")
    assert answer(invocation(target=H200)) == ("heuristics", 7)


def test_a_device_of_another_architecture_says_nothing(shipped):
    ship(shipped, row(), device="L4")
    assert answer(invocation(target=H200)) == ("heuristics", 2)


@pytest.mark.parametrize("shape", [(48, 16), (64, 16), (96, 16)])
@pytest.mark.parametrize("stale", [{"version": 99}, {"implementation": "gone/any"}])
def test_a_row_of_an_unknown_kernel_is_ignored(shipped, shape, stale):
    ship(shipped, row(shape=shape, **stale))
    assert answer() == ("heuristics", 2)


@pytest.mark.parametrize(("shape", "source"), [((48, 16), "persistent"), ((96, 16), "heuristics")])
def test_a_row_of_an_unknown_version_does_not_hide_another(shipped, shape, source):
    ship(shipped, row(8, version=99, shape=shape), row(7, shape=shape))
    assert answer() == (source, 7)


@pytest.mark.parametrize("shape", [(48, 16), (64, 16), (96, 16)])
@pytest.mark.parametrize("config", [{"factor": -1}, {"factor": "x"}, [1]])
def test_an_invalid_config_does_not_stop_a_call(shipped, shape, config):
    ship(shipped, row(shape=shape, config=config))
    assert answer() == ("heuristics", 2)
    assert_array_equal(Executor(ConfigSelectorChain(autotune=False))(Scale(), X), 2 * X)


def test_table_hits_are_not_stored(shipped):
    ship(shipped, row())
    chain = ConfigSelectorChain(autotune=False)
    assert chain.choose(invocation()).source == "persistent"
    assert len(chain.cache) == 0


def test_a_measured_row_is_not_tuned_again_and_a_guess_is(shipped):
    class Space(Scale):
        def run(self, x, *, cfg, option=0):
            return x * 2

        def config_space(self, inv):
            return [Config(1), Config(2)]

    inv = invocation()
    inv = Invocation(kernel=Space(), call=inv.call, target=inv.target)
    for shape, source in (((48, 16), "persistent"), ((96, 16), "autotune")):
        ship(shipped, row(shape=shape))
        chain = ConfigSelectorChain(policy=AutotunePolicy(mode="autotune"))
        assert chain.choose(inv).source == source


def test_what_ships_can_be_read():
    folder = pathlib.Path(table.__file__).parents[2] / "data" / "tuned"
    known = {table.slug(device["model"]) for device in table._devices()}
    for file in folder.glob("*/*.json"):
        assert file.parent.name in known
    for device in table._devices():
        for file in (folder / table.slug(device["model"])).glob("*.json"):
            assert table.rows(device["model"], file.stem)


def test_a_device_without_rows_is_no_error():
    assert table.rows("no such device", "scale") == ()


# What ships


def shipped_files():
    folder = pathlib.Path(table.__file__).parents[2] / "data" / "tuned"
    devices = json.loads((folder / "devices.json").read_text())
    return {device["model"] for device in devices}, sorted(folder.glob("*/*.json"))


def test_every_table_belongs_to_a_device():
    devices, files = shipped_files()
    assert {f.parent.name for f in files} == {table.slug(model) for model in devices}


@pytest.mark.parametrize("file", shipped_files()[1], ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_shipped_rows_are_of_kernels_that_are_there(file):
    entries = {e.name: e for e in kernel_registry.list(file.stem)}
    found = table.rows(file.parent.name, file.stem)
    assert found
    for row in found:
        entry = entries[row.implementation]
        # a row keeps the version that it was measured with: one of older code is measured again
        assert 1 <= row.version <= entry.version
        assert (entry.config is None) == (row.config is None)
        if row.config is not None:
            assert dataclasses.asdict(entry.config.Config(**row.config)) == row.config


def test_a_shipped_row_is_found_by_its_call():
    executor = Executor(ConfigSelectorChain(autotune=False))
    q = jnp.zeros((4, 4096, 16, 128), jnp.bfloat16)
    inv = executor.invocation(FlashAttention(), q, q, q, causal=True, platform="auto")
    on_h200 = dataclasses.replace(inv, target=H200)
    stored = table.exact(on_h200, on_h200.kernel.implementations(on_h200))
    assert stored.implementation == "pallas/gpu"


@pytest.mark.parametrize("value_size", [128, 256])
def test_a_near_row_fits_the_call(value_size):
    pytest.importorskip("triton", reason="Triton is not installed")
    from ejkernel.kernels._triton import _launch
    from ejkernel.kernels._triton.flash_attention import config

    q = jnp.zeros((4, 4096, 16, 128), jnp.bfloat16)
    v = jnp.zeros((4, 4096, 16, value_size), jnp.bfloat16)
    there = {"direction": "backward", "wanted": frozenset({"query", "key", "value"})}
    executor = Executor(ConfigSelectorChain(autotune=False))
    inv = executor.invocation(FlashAttention(), q, q, v, causal=True, platform="triton", **there)
    choice = executor.chooser.choose(dataclasses.replace(inv, target=H200))
    bytes_needed = config.shared_bytes(inv.call, "backward", choice.cfg, H200)
    assert bytes_needed <= _launch.shared_limit(H200)
    guess = choice.cfg == config.heuristic(inv.call, "backward", H200)
    assert guess or value_size == 128


BOTH = ("forward", "backward")


@pytest.mark.parametrize(
    ("shape", "groups", "value_size", "causal", "direction"),
    [
        *(((4, 4096, 16, 128), 16, 128, True, way) for way in BOTH),
        *(((4, 4096, 16, 128), 16, 128, False, way) for way in BOTH),
        *(((1, 16384, 16, 128), 16, 128, True, way) for way in BOTH),
        *(((1, 16384, 16, 128), 16, 128, False, way) for way in BOTH),
        *(((4, 4096, 32, 128), 8, 128, True, way) for way in BOTH),
        *(((4, 4096, 16, 192), 16, 128, True, way) for way in BOTH),
        ((4, 4096, 32, 64), 32, 64, True, "backward"),  # forward is Triton's
    ],
)
def test_without_hoppers_kernels_calls_take_cudnn(
    shape, groups, value_size, causal, direction, monkeypatch
):
    pytest.importorskip("triton", reason="Triton is not installed")
    from ejkernel.kernels._pallas.gpu._blocks import probe

    q, k, v = (
        jax.ShapeDtypeStruct((*shape[:2], heads, size), jnp.bfloat16)
        for heads, size in ((shape[2], shape[3]), (groups, shape[3]), (groups, value_size))
    )
    executor = Executor(ConfigSelectorChain(autotune=False))
    given = []
    jax.eval_shape(
        lambda *xs: given.append(executor.invocation(FlashAttention(), *xs, causal=causal)), q, k, v
    )
    inv = dataclasses.replace(given[0], target=H200)
    if direction == "backward":
        wanted = frozenset({"query", "key", "value"})
        inv = dataclasses.replace(inv, direction=direction, wanted=wanted)
    monkeypatch.setattr(probe, "why_not", lambda: "not in this version of JAX")
    assert executor.chooser.choose(inv).implementation.name == "cudnn/gpu"


def test_a_row_that_cannot_serve_does_not_hide_the_next(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from ejkernel.kernels._cudnn.flash_attention import private
    from ejkernel.kernels._pallas.gpu._blocks import probe

    q = jnp.zeros((4, 4096, 16, 128), jnp.bfloat16)
    executor = Executor(ConfigSelectorChain(autotune=False))
    inv = executor.invocation(FlashAttention(), q, q, q, causal=True)
    inv = dataclasses.replace(inv, target=H200)
    monkeypatch.setattr(probe, "why_not", lambda: "not in this version of JAX")
    assert executor.chooser.choose(inv).implementation.name == "cudnn/gpu"
    monkeypatch.setattr(private, "library", lambda: None)
    measured = {
        r.version
        for r in table.rows("nvidia_h200", "flash_attention")
        if r.implementation == "triton/gpu"
    }
    (able,) = (i for i in inv.kernel.implementations(inv) if i.name == "triton/gpu")
    able = [dataclasses.replace(able, version=max(measured))]
    assert table.exact(inv, able).implementation == "triton/gpu"
