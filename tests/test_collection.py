"""A test module that makes a JAX array when it is imported cannot be collected."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
INSIDE = "import jax.numpy as jnp\ndef test_sum():\n    assert jnp.ones(3).sum() == 3\n"
OUTSIDE = "import jax.numpy as jnp\nX = jnp.ones(3)\ndef test_sum():\n    assert X.sum() == 3\n"


def collect_and_run(path):
    pytest_with_hook = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "/dev/null"]
    command = [*pytest_with_hook, "-p", "no:cacheprovider", "--rootdir", path.parent, path]
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
