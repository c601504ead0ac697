"""What the kernel tests of a run on a device gave, by op and entry, as a file to commit.

make test-gpu
"""

import collections
import datetime as dt
import importlib.metadata
import json
import pathlib
import re
from typing import Any

import jax

import ejkernel
from ejkernel.kernels import kernel_registry

_ENTRY = re.compile(r"(?:xla|triton|pallas|cudnn|cuda)/[a-z]+(?:@-?\d+)?")
_VERSIONS = ("jax", "jaxlib", "triton", "jax-cuda13-plugin", "nvidia-cudnn-cu13")


class Recorder:
    """A pytest plugin that counts outcomes; a call that was rightly refused is one of its own."""

    def __init__(self, path: str):
        self._path = pathlib.Path(path)
        self._counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)

    def pytest_runtest_logreport(self, report):
        counted = (
            report.when == "call" or report.outcome != "passed"
        )  # errors around a test count too
        if counted and (name := entry_of(report.nodeid)) is not None:
            noted = [tuple(p) for p in report.user_properties]
            refused = report.outcome == "passed" and ("refused", True) in noted
            self._counts[name]["refused" if refused else report.outcome] += 1

    def pytest_sessionfinish(self):
        device = jax.devices()[0]
        entries = {
            name: {"version": _code(name)} | dict(sorted(count.items()))
            for name, count in sorted(self._counts.items())
        }
        content: dict[str, Any] = {
            "date": dt.date.today().isoformat(),
            "device": device.device_kind,
            "backend": device.platform,
            "versions": {"ejkernel": ejkernel.__version__}
            | {name: found for name in _VERSIONS if (found := _version(name)) is not None},
        }
        content["entries"] = _others(self._path, content) | entries
        self._path.write_text(json.dumps(content, indent=1) + "\n")


def _others(path: pathlib.Path, content: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run on the same day, device and versions found for other entries."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    entries = earlier.pop("entries")
    return entries if earlier == content else {}


def entry_of(nodeid: str) -> str | None:
    """The "op entry" that a generated test is about; attention's own files name no op."""
    parameters = nodeid.partition("[")[2]
    if (entry := _ENTRY.search(parameters)) is None:
        return None
    op = re.match(r"([a-z_0-9]+)-" + re.escape(entry[0]), parameters)
    known = op is not None and op[1] in kernel_registry.ops()
    return f"{op[1] if known else 'flash_attention'} {entry[0]}"


def _code(name: str) -> int | None:
    """The version of an entry's code."""
    op, entry = name.split(" ")
    return next((e.version for e in kernel_registry.list(op) if e.name == entry), None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
