"""Keys of configurations: equal for equal calls in every process, and for no others."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel._device import Target
from ejkernel.modules import FlashAttention
from ejkernel.ops import (
    Invocation,
    Kernel,
    device_fingerprint,
    device_kind,
    get_device_platform,
    sharding_fingerprint,
)

ROOT = pathlib.Path(__file__).parents[2]
CPU = Target(kind="cpu", model="cpu")


def arrays(length=8, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(1, length, 2, 4)).astype(dtype) for _ in range(3))


def invocation(*given, platform="auto", target=CPU, direction="forward", wanted=(), **options):
    kernel = FlashAttention()
    args, _ = kernel.prepare(kernel.bind(given or arrays(), options, None))
    return Invocation(
        kernel=kernel,
        call=args,
        platform=platform,
        target=target,
        direction=direction,
        wanted=frozenset(wanted),
    )


def test_key_depends_on_nothing_but_the_kind_of_call():
    again = tuple(x + 1 for x in arrays())
    assert invocation().key == invocation(*again).key
    assert invocation(causal=True).key == invocation(causal=True, bias=None).key
    shapes = jax.eval_shape(lambda: arrays())
    traced = []
    jax.eval_shape(lambda *xs: traced.append(invocation(*xs).key), *shapes)
    assert traced == [invocation().key]


def test_the_value_of_a_seed_is_not_in_the_key():
    first = invocation(dropout_prob=0.5, dropout_seed=1).key
    assert first == invocation(dropout_prob=0.5, dropout_seed=2**40).key


DIFFERENT = {
    "plain": lambda: invocation(),
    "length": lambda: invocation(*arrays(length=9)),
    "dtype": lambda: invocation(*arrays(dtype=jnp.bfloat16)),
    "half": lambda: invocation(*arrays(dtype=jnp.float16)),
    "causal": lambda: invocation(causal=True),
    "scale": lambda: invocation(softmax_scale=0.25),
    "window": lambda: invocation(sliding_window=(1, -1)),
    "other window": lambda: invocation(sliding_window=(-1, 1)),
    "lse": lambda: invocation(return_lse=True),
    "bias": lambda: invocation(bias=jnp.zeros((1, 1, 8, 8))),
    "mask": lambda: invocation(attention_mask=jnp.ones((1, 1, 8, 8), bool)),
    "broadcast mask": lambda: invocation(attention_mask=jnp.ones((1, 1, 1, 8), bool)),
    "sinks": lambda: invocation(softmax_aux=jnp.zeros((1, 1))),
    "platform": lambda: invocation(platform="xla"),
    "backward": lambda: invocation(direction="backward", wanted=["query"]),
    "wanted": lambda: invocation(direction="backward", wanted=["query", "bias"]),
    "device": lambda: invocation(target=Target("gpu", "NVIDIA H200", "9.0")),
    "capability": lambda: invocation(target=Target("gpu", "NVIDIA H200", "10.0")),
    "model": lambda: invocation(target=Target("gpu", "NVIDIA A100", "9.0")),
    "kind": lambda: invocation(target=Target("tpu", "cpu")),
}


def test_calls_of_different_kinds_have_different_keys():
    keys = {name: make().key for name, make in DIFFERENT.items()}
    assert len(set(keys.values())) == len(keys), keys


def test_precision_is_in_the_key():
    keys = {invocation().key}
    for precision in ("bfloat16", "tensorfloat32", "float32"):
        with jax.default_matmul_precision(precision):
            keys.add(invocation().key)
    assert len(keys) == 4
    assert invocation().key in keys


def test_options_of_different_types_have_different_keys():
    class Any(Kernel):
        pass

    x = jnp.zeros(3)
    keys = {Invocation(kernel=Any(), args=(x, option)).key for option in (1, 1.0, True, "1", None)}
    assert len(keys) == 5


def test_position_and_name_of_an_array_are_in_the_key():
    class Any(Kernel):
        pass

    x = jnp.zeros(3)
    calls = [((x, x), {}), ((x,), {"y": x}), ((x,), {"z": x}), (((x, x),), {}), (([x, x],), {})]
    keys = {Invocation(kernel=Any(), args=args, kwargs=kwargs).key for args, kwargs in calls}
    assert len(keys) == len(calls)
    assert Invocation(kernel=Any("a"), args=(x,)).key != Invocation(kernel=Any("b"), args=(x,)).key


def test_sharding_is_in_the_key():
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("x",))
    whole = arrays()

    def placed(*parts):
        sharding = NamedSharding(mesh, PartitionSpec(*parts))
        return tuple(jax.device_put(x, sharding) for x in whole)

    keys = {invocation(*placed(*parts)).key for parts in ((), ("x",), (None, None, "x"))}
    assert len(keys) == 3
    assert invocation(*placed()).key == invocation(*whole).key


def test_sharding_fingerprint():
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("x",))
    x = jnp.zeros((4, 4))
    assert sharding_fingerprint(x) is None
    assert sharding_fingerprint(np.zeros(3)) is None
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("x", None)))
    assert "x" in sharding_fingerprint(split)
    replicated = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None)))
    assert sharding_fingerprint(replicated) is None


def test_device_fingerprint():
    assert device_fingerprint(CPU) == "cpu|cpu"
    assert device_fingerprint(Target("gpu", "NVIDIA H200", "9.0")) == "gpu|NVIDIA H200|9.0"
    assert device_fingerprint().startswith(device_kind())


def test_device_kind_and_platform_agree():
    platforms = {"gpu": "triton", "tpu": "pallas", "cpu": "xla"}
    assert get_device_platform() == platforms[device_kind()]


def test_key_of_a_dataclass_option_follows_its_fields():
    @dataclasses.dataclass(frozen=True)
    class Option:
        size: int

    class Any(Kernel):
        pass

    keys = {Invocation(kernel=Any(), args=(jnp.zeros(3), Option(n))).key for n in (1, 2)}
    assert len(keys) == 2


PROGRAM = """
import jax.numpy as jnp
from ejkernel._device import Target
from ejkernel.modules import FlashAttention
from ejkernel.ops import Invocation, Kernel
kernel = FlashAttention()
given = tuple(jnp.zeros((1, 8, 2, 4)) for _ in range(3))
args, _ = kernel.prepare(kernel.bind(given, {"causal": True, "sliding_window": 3}, None))
wanted = frozenset({"query", "key", "value", "bias", "softmax_aux"})
target = Target("cpu", "cpu")
print(Invocation(kernel, call=args, target=target, direction="backward", wanted=wanted).key)
options = {"names": {"c", "a", "b"}, "z": 1, "a": 2.0}
print(Invocation(Kernel("mine"), args=given, kwargs=options, target=target).key)
"""


def test_keys_are_equal_in_every_process():
    outputs = set()
    for seed in ("0", "1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    first, second = outputs.pop().split()
    assert len(first) == len(second) == 64
    wanted = ["softmax_aux", "bias", "value", "key", "query"]
    here = invocation(causal=True, sliding_window=3, direction="backward", wanted=wanted)
    assert here.key == first
