"""What importing costs: little time, and none of the extras."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
EXTRAS = ("triton", "jax_triton", "libtpu", "rich", "matplotlib", "jax.experimental.pallas")
TIMES = """
import json, sys, time
start = time.perf_counter()
import jax
middle = time.perf_counter()
import ejkernel
end = time.perf_counter()
print(json.dumps({"jax": middle - start, "ejkernel": end - middle, "loaded": sorted(sys.modules)}))
"""
LOADED = """
import json, sys
import jax
before = set(sys.modules)
import {module}
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


def test_importing_the_package_is_quick_and_loads_no_extra():
    runs = [run(TIMES) for _ in range(3)]
    best = min(runs, key=lambda times: times["ejkernel"])
    assert best["ejkernel"] < 0.15
    assert best["jax"] > 0  # both were imported, in this order
    assert "ejkernel" in best["loaded"]
    assert those(best["loaded"], (*EXTRAS, "beartype")) == []


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
