"""What the kernel tests of a run gave, by op and entry, as a file to commit.

make test-gpu, make test-kernels, make test-hopper
"""

import collections
import datetime as dt
import hashlib
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import pytest

import ejkernel
from ejkernel.kernels import _source, kernel_registry
from tests.backend import BACKEND
from tests.kernels import harness

_ENTRY = re.compile(r"(?:xla|triton|pallas|cudnn|cuda)/[a-z]+(?:@-?\d+)?")
_TARGET = re.compile(r"(?:cuda:sm_\d+|hip:gfx\w+|tpu:\w+)")
_VERSIONS = ("jax", "jaxlib", "triton", "libtpu", "jax-cuda13-plugin", "nvidia-cudnn-cu13")


# Tests of numbers in files about one kernel, whose parameters do not name it.
_OWN_FILES = {
    re.compile(r"/test_pallas_gpu_grouped\.py::test_(?:more_)?numbers\w*\["): (
        "grouped_matmul pallas/gpu"
    ),
    re.compile(
        r"/test_pallas_gpu\w*\.py::test_(?:(?:more_)?numbers|gradients|exact_weights|large_scores)\w*\["
    ): "flash_attention pallas/gpu",
}


class Recorder:
    """A pytest plugin that counts outcomes; a call that was rightly refused is one of its own.

    An entry is written when the last of its tests has ended, so that a run which is cut short
    leaves those that it came to the end of.
    """

    def __init__(self, path: str):
        self._path = pathlib.Path(path)
        self._counts: dict[tuple[str, str], collections.Counter] = collections.defaultdict(
            collections.Counter
        )
        self._left: dict[str, set[str]] = {}  # tests that have not ended, by entry
        self._seen: dict[str, set[str]] = collections.defaultdict(set)  # those that said anything

    def pytest_collection_finish(self, session):
        self._expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        del node
        if not self._left:  # all processes collect the same
            self._expect(ids)

    def _expect(self, nodeids):
        for nodeid in nodeids:
            if (name := entry_of(nodeid)) is not None:
                self._left.setdefault(name, set()).add(nodeid)

    def pytest_runtest_logreport(self, report):
        counted = (
            report.when == "call" or report.outcome != "passed"
        )  # errors around a test count too
        if counted and (name := entry_of(report.nodeid)) is not None:
            self._seen[name].add(report.nodeid)
            noted = [tuple(p) for p in report.user_properties]
            refused = report.outcome == "passed" and ("refused", True) in noted
            if (kind := kind_of(report.nodeid, name)) is not None:
                self._counts[name, kind]["refused" if refused else report.outcome] += 1
        # what xdist says of a test that ended its process has no phase
        ended = report.when not in ("setup", "call")
        if ended and (name := entry_of(report.nodeid)) in self._left:
            self._left[name].discard(report.nodeid)
            if not self._left[name]:
                self._write()

    def pytest_sessionfinish(self):
        self._write()

    def _write(self):
        content = dict(zip(("device", "backend"), _device(), strict=True))
        made: dict[str, Any] = {}
        for (name, kind), counts in sorted(self._counts.items()):
            if self._left.get(name):
                continue
            tests = {"tests": _digest(self._seen[name])}
            entry = made.setdefault(name, _facts(name) | tests | {"checks": {}})
            entry["checks"][kind] = dict(sorted(counts.items()))
        content["entries"] = dict(sorted((_others(self._path, content) | made).items()))
        self._path.write_text(json.dumps(content, indent=1) + "\n")


def _others(path: pathlib.Path, content: dict[str, Any]) -> dict[str, Any]:
    """What earlier runs on the same device found for other entries."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    entries = earlier.pop("entries")
    return entries if earlier == content else {}


def tested(path: pathlib.Path) -> dict[str, str]:
    """Kernels all of whose tests passed on this device, with the code and versions that are here.

    With a digest of which tests these were. The code is what the support table calls a kernel's;
    specs, `callib` and the bodies of tests may have changed.
    """
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    if (content["device"], content["backend"]) != _device():
        return {}
    entries = content["entries"].items()
    return {name: kept.get("tests", "") for name, kept in entries if _is_current(name, kept)}


def _is_current(name: str, kept: dict[str, Any]) -> bool:
    """What never ran on the device counts as not tested, and so does a failure."""
    now, checks = _facts(name), kept["checks"]
    same = all(kept[fact] == now[fact] for fact in ("versions", "version", "source"))
    outcomes = {outcome for counts in checks.values() for outcome in counts}
    ran = checks.get("run", {}).get("passed", 0) > 0
    return same and ran and outcomes <= {"passed", "refused", "skipped"}


class LeftOut:
    """A pytest plugin that leaves out kernels that are `tested`, where it has the same tests."""

    def __init__(self, tested: Mapping[str, str]):
        self._tested = tested

    @pytest.hookimpl(trylast=True)  # after tests that options leave out
    def pytest_collection_modifyitems(self, config, items):
        ids: dict[str, set[str]] = collections.defaultdict(set)
        for item in items:
            if (name := entry_of(item.nodeid)) is not None:
                ids[name].add(item.nodeid)
        names = {name for name, found in ids.items() if self._tested.get(name) == _digest(found)}
        is_left_out = lambda item: entry_of(item.nodeid) in names
        config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
        items[:] = [item for item in items if not is_left_out(item)]


def _digest(nodeids: Iterable[str]) -> str:
    """Of tests with parameters; xdist adds the group of a test to its name."""
    names = sorted(nodeid[: nodeid.rindex("]") + 1] for nodeid in nodeids)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _device() -> tuple[str, str]:
    device = jax.devices()[0]
    return device.device_kind, device.platform


def entry_of(nodeid: str) -> str | None:
    """The "op entry" that a test is about; attention's own files name no op."""
    for pattern, name in _OWN_FILES.items():
        if pattern.search(nodeid):
            return name
    parameters = nodeid.partition("[")[2]
    if (entry := _ENTRY.search(parameters)) is None:
        return None
    op = re.match(r"([a-z_0-9]+)-" + re.escape(entry[0]), parameters)
    known = op is not None and op[1] in kernel_registry.ops()
    return f"{op[1] if known else 'flash_attention'} {entry[0]}"


def kind_of(nodeid: str, name: str) -> str | None:
    """How a test checks a kernel: "run", "interpreted", or "compiled for" a target.

    None: neither, where a kernel for another device is refused or something stands in for it.
    """
    if (target := _TARGET.search(nodeid.partition("[")[2])) is not None:
        return f"compiled for {target[0]}"
    entry = _entry(name)
    if entry is not None and harness.interpreted(entry):
        return "interpreted"
    return "run" if entry is None or entry.backend in ("any", BACKEND) else None


def _entry(name: str) -> Any:
    op, entry = name.split(" ")
    return next((e for e in kernel_registry.list(op) if e.name == entry), None)


def _facts(name: str) -> dict[str, Any]:
    """Which code was tested, when, and with what."""
    entry = _entry(name)
    versions = {"ejkernel": ejkernel.__version__}
    versions |= {one: found for one in _VERSIONS if (found := _version(one)) is not None}
    return {
        "date": dt.date.today().isoformat(),
        "versions": versions,
        "version": entry and entry.version,
        "source": entry and _source.fingerprint(entry),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
