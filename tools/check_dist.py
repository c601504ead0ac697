"""Checks the wheel and the source archive in dist/ in fresh environments.

For each Python (the one that runs this, and the newest supported one found): install the wheel
alone, import it, call an operation, run the command line; then install its `test` extra and run a
short part of the tests against the installed package. The source archive must install too.
"""

import argparse
import glob
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]
SHORT_TESTS = (
    "tests/test_import.py",
    "tests/ops/test_kernel.py",
    "tests/ops/test_registry.py",
    "tests/types",
)
CORE_CHECK = """
import importlib.metadata, pathlib, sys
import ejkernel

folder = pathlib.Path(ejkernel.__file__).parent
assert "site-packages" in folder.parts, f"imported from {folder}"
assert importlib.metadata.version("ejkernel") == ejkernel.__version__ == sys.argv[1]
assert (folder / "py.typed").exists()
import jax
from ejkernel.modules import flash_attention

keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (1, 16, 2, 8)) for key in keys)
out = flash_attention(q, k, v, causal=True)
expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
assert abs(out - expected).max() < 1e-5
assert "triton" not in sys.modules, "the core must not load an extra"
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="check with these instead")
    pythons = parser.parse_args(argv).python or [sys.executable, *newest_python()]
    (wheel,) = (ROOT / "dist").glob("*.whl")
    (archive,) = (ROOT / "dist").glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    check_contents(wheel)
    for python in pythons:
        check_installed(python, wheel, version)
    with tempfile.TemporaryDirectory() as folder:
        check_core(make_environment(sys.executable, folder, str(archive)), version, folder)
    print(f"{wheel.name} and {archive.name} are good")
    return 0


def newest_python() -> list[str]:
    """The newest other Python that is supported, from PATH or pyenv."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    for minor in (13, 12):
        if sys.version_info[:2] == (3, minor):
            return []
        places = [shutil.which(f"python3.{minor}")]
        places += sorted(glob.glob(f"{pyenv}/versions/3.{minor}.*/bin/python"))
        for place in filter(None, places):
            works = [place, "-c", "import sys, venv"]
            if subprocess.run(works, capture_output=True, check=False).returncode == 0:
                return [place]
    return []


def check_contents(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    inside = [name for name in names if not name.startswith(("ejkernel/", "ejkernel-"))]
    assert not inside, f"the wheel holds more than the package: {inside[:5]}"
    assert "ejkernel/py.typed" in names
    assert any(name.startswith("ejkernel/data/tuned/") for name in names)


def check_installed(python: str, wheel: pathlib.Path, version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        own = make_environment(python, folder, str(wheel))
        check_core(own, version, folder)
        run(own, "-m", "pip", "install", "--quiet", f"{wheel}[test]")
        # a copy, so that the tests import the installed package and not the one beside them
        tests = pathlib.Path(folder) / "copy"
        shutil.copytree(ROOT / "tests", tests / "tests")
        shutil.copy(ROOT / "pyproject.toml", tests)
        options = ("-q", "-n", "1", "-m", "not slow", "-p", "no:cacheprovider")
        run(own, "-m", "pytest", *options, *SHORT_TESTS, cwd=tests)


def make_environment(python: str, folder: str, package: str) -> str:
    """A new environment with one package; returns its Python."""
    environment = pathlib.Path(folder) / "environment"
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    own = str(environment / "bin" / "python")
    run(own, "-m", "pip", "install", "--quiet", package)
    return own


def check_core(own: str, version: str, folder: str) -> None:
    print(f"core on {subprocess.check_output([own, '--version'], text=True).strip()}", flush=True)
    run(own, "-c", CORE_CHECK, version, cwd=folder)
    command = str(pathlib.Path(own).with_name("ejkernel"))
    shown = subprocess.check_output([command, "doctor"], text=True, cwd=folder, env=settings())
    assert version in shown, shown


def settings() -> dict[str, str]:
    """An environment for programs that measure nothing and find no repository."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"EJKERNEL_AUTOTUNE_POLICY": "heuristics", "JAX_PLATFORMS": "cpu"}


def run(python: str, *arguments: str, cwd: str | pathlib.Path | None = None) -> None:
    subprocess.run([python, *arguments], check=True, cwd=cwd, env=settings())


if __name__ == "__main__":
    sys.exit(main())
