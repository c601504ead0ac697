"""What is collected: no module that makes a JAX array, and no kernel that was tested before."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
INSIDE = "import jax.numpy as jnp\ndef test_sum():\n    assert jnp.ones(3).sum() == 3\n"
OUTSIDE = "import jax.numpy as jnp\nX = jnp.ones(3)\ndef test_sum():\n    assert X.sum() == 3\n"


TWO = """
import pytest

@pytest.mark.parametrize("call", ["gla-xla/any-plain", "attention-xla/any-plain"])
def test_it(call):
    assert call
"""


def collect_and_run(path, *options):
    pytest_with_hook = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "/dev/null"]
    command = [*pytest_with_hook, "-p", "no:cacheprovider", "--rootdir", path.parent]
    command += [*options, path]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_arrays_are_made_inside_tests_only(tmp_path):
    inside, outside = tmp_path / "test_inside.py", tmp_path / "test_outside.py"
    inside.write_text(INSIDE)
    outside.write_text(OUTSIDE)
    done = collect_and_run(inside)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    done = collect_and_run(outside)
    assert "test_outside.py:2: in <module>" in done.stdout
    assert "none_while_tests_are_collected" in done.stdout


def test_kernels_that_passed_by_a_file_of_results_are_left_out(tmp_path):
    path, results = tmp_path / "test_two.py", tmp_path / "results.json"
    path.write_text(TWO)
    done = collect_and_run(path, "--device-results", results, "-k", "gla")
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    done = collect_and_run(path, "--device-results", results, "--untested-in", results, "-n", "2")
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    assert set(json.loads(results.read_text())["entries"]) == {"gla xla/any", "attention xla/any"}
    path.write_text(TWO.replace('["gla-xla/any-plain"', '["gla-xla/any-new", "gla-xla/any-plain"'))
    done = collect_and_run(path, "--untested-in", results)  # a kernel with another test
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout + done.stderr
