"""JSON of configs and keys: equal in every process, and back again with checks."""

import dataclasses
import enum
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from ejkernel.kernels import Platform
from ejkernel.kernels._xla.flash_attention.config import Config as XlaConfig
from ejkernel.modules import AttentionConfig, FlashAttentionConfig
from ejkernel.ops import BwdParams, FwdParams, from_json, stable_json, to_json

ROOT = pathlib.Path(__file__).parents[2]


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Mine:
    block: int = 128
    ratio: float = 0.5
    name: str = "default"
    flags: tuple[bool, ...] = (True, False)
    inner: FwdParams | None = None
    color: Color = Color.RED


CONFIGS = [
    FwdParams(),
    FwdParams(q_blocksize=128, kv_blocksize=64, num_warps=4, num_stages=2),
    BwdParams(kv_blocksize=32),
    FlashAttentionConfig(fwd_params=FwdParams(q_blocksize=16), platform="xla"),
    AttentionConfig(platform="xla", backend="any"),
    XlaConfig(block_q=512, block_k=256, block_h=8),
    Mine(),
    Mine(block=1, ratio=1e-30, flags=(), inner=FwdParams(num_warps=8)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_configs_come_back(config):
    text = to_json(config)
    json.loads(text)
    back = from_json(text, type(config))
    assert back == config
    assert type(back) is type(config)
    assert to_json(back) == text


def test_order_of_keys_does_not_matter():
    assert stable_json({"b": 1, "a": [1, 2]}) == stable_json({"a": [1, 2], "b": 1})
    assert stable_json({"b": 1, "a": [1, 2]}) == '{"a":[1,2],"b":1}'
    assert stable_json({3, 1, 2}) == stable_json(frozenset({2, 3, 1})) == "[1,2,3]"


def test_values_that_are_equal_in_python_but_not_alike_stay_apart():
    assert len({stable_json(value) for value in (1, 1.0, True, "1")}) == 4
    assert len({stable_json(value) for value in (0, 0.0, -0.0, False, None, "")}) == 6


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.dtype("float16"), "float16"),
        (np.float32, "float32"),
        (jnp.dtype(jnp.bfloat16), "bfloat16"),
        (Platform.XLA, "xla"),
        (Color.RED, "red"),
        ((1, (2, 3)), [1, [2, 3]]),
        (jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), {"shape": [2, 3], "dtype": "bfloat16"}),
        (
            np.arange(2, dtype=np.int8),
            {"shape": [2], "dtype": "int8", "data": [0, 1]},
        ),
        (functools.reduce, "_functools.reduce"),
    ],
    ids=repr,
)
def test_plain_form_of_a_value(value, expected):
    assert json.loads(to_json(value)) == expected


def test_plain_form_of_a_jax_array():
    expected = {"shape": [1, 1], "dtype": "float32", "data": [[1.0]]}
    assert json.loads(to_json(jnp.ones((1, 1), jnp.float32))) == expected


def test_what_cannot_be_written_is_an_error():
    with pytest.raises(TypeError, match=r"`to_json`.*object"):
        to_json(object())


@pytest.mark.parametrize(
    "text",
    [
        '{"q_blocksize": "many"}',
        '{"q_blocksize": 1.5}',
        '{"q_blocksize": 0}',  # the config's own check
        "[1]",
        "{",
    ],
)
def test_a_bad_text_is_refused(text):
    with pytest.raises((msgspec.DecodeError, ValueError)):
        from_json(text, FwdParams)


PROGRAM = """
from ejkernel.ops import FwdParams, stable_json
names = {"query", "key", "value", "bias", "softmax_aux"}
print(stable_json({"wanted": names, "params": FwdParams(q_blocksize=3), **{n: n for n in names}}))
"""


def test_text_is_equal_in_every_process():
    texts = set()
    for seed in ("0", "1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        texts.add(done.stdout)
    assert len(texts) == 1
    (text,) = texts
    assert '"wanted":["bias","key","query","softmax_aux","value"]' in text


@dataclasses.dataclass(frozen=True)
class Layered:
    dtype: np.dtype
    table: np.ndarray
    device_table: jax.Array
    kind: Color


def test_dtypes_arrays_and_enums_survive():
    value = Layered(
        jnp.dtype(jnp.bfloat16), np.arange(6).reshape(2, 3), jnp.ones((2,), jnp.bfloat16), Color.RED
    )
    back = from_json(to_json(value), Layered)
    assert (back.dtype, back.kind) == (value.dtype, value.kind)
    np.testing.assert_array_equal(back.table, value.table)
    assert back.device_table.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(back.device_table, np.float32), [1.0, 1.0])
