"""libtpu, installed for compiling, is not loaded by commands on a machine without a TPU."""

import os
import subprocess
import sys

import pytest

from ejkernel import _no_tpu


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Sets up a machine; gives the platforms that JAX is then told to look for."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    def make(devices=(), vendor="0x8086", plugins=(), libtpu=True):
        bus = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:00:04.0"
        bus.mkdir(parents=True)
        (bus / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "dev").mkdir()
        for name in devices:
            (tmp_path / "dev" / name).touch()
        for name in plugins:
            (tmp_path / "jax_plugins" / name).mkdir(parents=True)
            (tmp_path / "jax_plugins" / name / "__init__.py").touch()
        found = {"libtpu": libtpu, "jax_plugins": bool(plugins)}
        spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "jax_plugins")]})
        find = lambda name: spec if found[name] else None
        monkeypatch.setattr(_no_tpu.importlib.util, "find_spec", find)
        _no_tpu.name_platforms(str(tmp_path))
        return os.environ.get("JAX_PLATFORMS")

    return make


@pytest.mark.parametrize(
    ("here", "platforms"),
    [
        ({}, "cpu"),
        ({"libtpu": False}, None),
        ({"vendor": "0x1ae0"}, None),
        ({"devices": ["accel0"]}, None),
        ({"devices": ["nvidia0"], "plugins": ["xla_cuda13"]}, "cuda,cpu"),
        ({"devices": ["nvidia0"]}, "cpu"),
        ({"plugins": ["xla_cuda13"]}, "cpu"),
        ({"devices": ["kfd"], "plugins": ["xla_rocm60"]}, "rocm,cpu"),
    ],
)
def test_jax_is_told_what_is_here(machine, here, platforms):
    assert machine(**here) == platforms


def test_what_the_user_says_stays(machine, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert machine() == "tpu"


def test_the_command_prints_nothing_of_libtpu():
    pytest.importorskip("libtpu")
    environment = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [
        sys.executable,
        "-m",
        "ejkernel",
        "explain",
        "mean_pooling",
        "--shape",
        "inputs=1,4,2",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mean_pooling on cpu" in done.stdout
