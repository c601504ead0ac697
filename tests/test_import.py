"""What importing loads: as little as possible, and none of the extras."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import ejkernel.modules

ROOT = pathlib.Path(__file__).parents[1]
EXTRAS = ("triton", "jax_triton", "libtpu", "rich", "matplotlib", "jax.experimental.pallas")
LOADED = """
import json, sys
import jax
before = set(sys.modules)
import {module}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
CALLED = """
import json, sys
import jax, jax.numpy as jnp
before = set(sys.modules)
from ejkernel.modules import flash_attention
q, k, v = (jnp.ones((1, 4, 1, 2)) * i for i in range(3))
jax.grad(lambda q: flash_attention(q, k, v, causal=True).sum())(q)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def run(program, platforms="cpu"):
    environment = os.environ | {"JAX_PLATFORMS": platforms}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def those(loaded, names):
    return [m for m in loaded if any(m == n or m.startswith(f"{n}.") for n in names)]


def test_importing_the_package_loads_nothing_else():
    loaded = run(LOADED.format(module="ejkernel"))
    assert [m for m in loaded if m.startswith("ejkernel")] == ["ejkernel"]
    assert those(loaded, (*EXTRAS, "beartype", "jaxtyping")) == []


def test_importing_one_operation_loads_no_other():
    program = LOADED.format(module="ejkernel.modules; from ejkernel.modules import mean_pooling")
    loaded = run(program)
    operations = [m for m in loaded if m.startswith("ejkernel.modules.operations.")]
    assert operations == ["ejkernel.modules.operations.mean_pooling"]
    assert "ejkernel.kernels._specs.flash_attention" not in loaded


def test_a_call_on_a_cpu_loads_no_kernels_for_other_devices():
    loaded = run(CALLED)
    assert those(loaded, ("ejkernel.kernels._xla.flash_attention",)) != []
    assert those(loaded, (*EXTRAS, "ejkernel.kernels._triton.flash_attention")) == []


def test_every_name_of_modules_is_there():
    missing = [n for n in ejkernel.modules.__all__ if getattr(ejkernel.modules, n, None) is None]
    assert missing == []
    assert set(ejkernel.modules.__all__) <= set(dir(ejkernel.modules))
    with pytest.raises(AttributeError, match="no attribute 'flesh_attention'"):
        _ = ejkernel.modules.flesh_attention


@pytest.mark.parametrize(
    "module", ["ejkernel.modules", "ejkernel.ops", "ejkernel.kernels", "ejkernel.types"]
)
def test_importing_a_room_loads_no_extra(module):
    loaded = run(LOADED.format(module=module))
    assert module in loaded
    assert those(loaded, EXTRAS) == []


def test_importing_starts_no_device():
    program = "import json, ejkernel.modules; print(json.dumps(ejkernel.__version__))"
    assert run(program, platforms="no_such_platform")


def test_importing_works_where_nothing_can_be_written(tmp_path):
    program = f"""
import json, os
os.environ["HOME"] = os.environ["EJKERNEL_CACHE_DIR"] = {str(tmp_path / "missing")!r}
import ejkernel.modules
print(json.dumps(os.path.exists(os.environ["HOME"])))
"""
    assert run(program) is False
