"""The precision of products: float32 stays float32 unless the user lowered it, on every backend."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.lax import Precision

from ejkernel.kernels._pallas.tpu._blocks import tiles
from ejkernel.kernels._shared import precision

EXACT = [None, "highest", "float32", "F32_F32_F32", "F64_F64_F64", "BF16_BF16_F32_X6"]
EXACT += ["BF16_BF16_F32_X3", "BF16_BF16_F32_X9", "TF32_TF32_F32_X3"]
HIGH = ["high", "tensorfloat32", "TF32_TF32_F32"]
LOW = ["default", "bfloat16", "F16_F16_F16", "F16_F16_F32", "BF16_BF16_BF16", "BF16_BF16_F32"]
LOW += [f"ANY_F8_ANY_F8_{x}" for x in ("F32", "F32_FAST_ACCUM", "ANY", "ANY_FAST_ACCUM")]
LEVELS = [(name, Precision.HIGHEST) for name in EXACT]
LEVELS += [(name, Precision.HIGH) for name in HIGH] + [(name, Precision.DEFAULT) for name in LOW]


def test_every_name_that_jax_knows_has_a_level():
    """A name that a later JAX adds must be looked at, and added to the table above."""
    with pytest.raises(ValueError, match="F32_F32_F32") as told:
        jax.config.update("jax_default_matmul_precision", "none of them")
    listed = re.search(r"in \[(.*?)\]", str(told.value))
    assert listed is not None
    assert set(re.findall(r"'([^']+)'", listed[1])) == {name for name, _ in LEVELS} - {None}


@pytest.mark.parametrize(("asked", "level"), LEVELS)
def test_float32_is_lowered_only_by_the_user(asked, level):
    with jax.default_matmul_precision(asked):
        assert precision.dot_precision(jnp.float32) == level
        for narrow in (jnp.bfloat16, jnp.float16):
            assert precision.dot_precision(narrow) == Precision.DEFAULT


@pytest.mark.parametrize(("asked", "level"), LEVELS)
def test_a_backend_never_takes_less_than_asked(asked, level):
    with jax.default_matmul_precision(asked):
        # Mosaic has no product between the two
        wanted = Precision.DEFAULT if level == Precision.DEFAULT else Precision.HIGHEST
        assert tiles.precision(jnp.float32) == wanted
        # XLA takes an algorithm by its name
        named = asked is not None and asked.isupper()
        assert precision.xla_precision(jnp.float32) == (None if named else level)


@pytest.mark.parametrize(("asked", "level"), LEVELS)
def test_triton_knows_two_precisions(asked, level):
    pytest.importorskip("triton")
    from ejkernel.kernels._triton import _launch

    with jax.default_matmul_precision(asked):
        wanted = "ieee" if level == Precision.HIGHEST else "tf32"
        assert _launch.dot_precision(jnp.float32) == wanted
        assert _launch.dot_precision(jnp.bfloat16) == "ieee"
