"""Programs compiled for TPUs that are not here, by libtpu, with the schedules of their kernels."""

import contextlib
import functools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.aot import _schedule, _trips
from ejkernel.aot._reports import KernelReport
from ejkernel.aot._targets import Target
from ejkernel.callib import _pallas
from ejkernel.kernels._registry import KernelEntry, Platform

_FILE = re.compile(r"^(\d+)-(.+)-\d+-final_bundles\.txt$")
_SUFFIX = re.compile(r"(\.\d+)+(\.refs_\d+_)?$")  # behind a kernel's name, refs in libtpu 0.0.50
_UTILIZATION = "final_hlo-static-per-bundle-utilization.txt"
_LABELS = "final_(bundles|hlo)|vmem_report"


class Compiler:
    """libtpu for one target; a process has at most one."""

    def __init__(self, target: Target, axis: str):
        self._target, self._axis = target, axis
        self._dumps = True
        self._dump = tempfile.TemporaryDirectory(prefix="ejkernel-aot-")

    def expect(self, entries: Sequence[KernelEntry]) -> None:
        """What comes: without a Pallas kernel there is no schedule worth writing down."""
        self._dumps = any(entry.platform == Platform.PALLAS for entry in entries)

    @functools.cached_property
    def _mesh(self) -> Mesh:
        """Devices of libtpu, which is loaded here, with the flags that it keeps from then on."""
        flags = {
            "xla_jf_dump_to": self._dump.name,
            "xla_jf_dump_llo_text": "true",
            "xla_jf_dump_llo_pass_label_regex": _LABELS,  # all of them are a hundred times as many
        }
        # libtpu reads them where C does; this process has no other use for its environment
        text = " ".join(f"--{name}={value}" for name, value in flags.items())
        os.putenv("LIBTPU_INIT_ARGS", text if self._dumps else "")
        os.putenv("TPU_SKIP_MDS_QUERY", "1")
        os.putenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        from jax.experimental import topologies

        chip, size = self._target.chip, self._target.slice
        name = f"{chip.name}:{size or chip.topology}"
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        return Mesh(np.array(devices if size else devices[:1]), (self._axis,))

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The same on every chip of a slice; the shapes of a call are those of one chip."""
        if self._target.slice is None:
            return fn
        whole = PartitionSpec()
        return jax.shard_map(fn, mesh=self._mesh, in_specs=whole, out_specs=whole, check_vma=False)

    def refusal(self, entry: KernelEntry) -> str | None:
        return None

    def tracing(self, entry: KernelEntry) -> Any:
        """Around all that is traced and compiled of an entry; all are alike."""
        return contextlib.nullcontext()

    def build(
        self, fn: Callable[..., Any], inputs: tuple[Any, ...]
    ) -> tuple[Any, Any, pathlib.Path]:
        """A traced and a compiled program, and the folder of its schedules until the next one."""
        folder = pathlib.Path(self._dump.name)
        for file in folder.iterdir():
            file.unlink()
        place = NamedSharding(self._mesh, PartitionSpec())
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), inputs
        )
        with _pallas.compile_for_tpu():
            traced = jax.jit(fn).trace(*placed)
            return traced, traced.lower().compile(), folder

    def compile(
        self, fn: Callable[..., Any], inputs: tuple[Any, ...], known: dict[str, Any]
    ) -> dict[str, Any]:
        """Numbers of a program and of its kernels; `known` are values of arrays by name."""
        traced, compiled, folder = self.build(fn, inputs)
        values = [
            known.get(_field(path)) for path, _ in jax.tree_util.tree_leaves_with_path(inputs)
        ]
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
        return {
            "kernels": self.kernels(traced, folder, values),
            "argument_bytes": memory.argument_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "flops": cost.get("flops"),
            "bytes_accessed": cost.get("bytes accessed"),
        }

    def kernels(
        self, traced: Any, folder: pathlib.Path, values: Sequence[Any]
    ) -> list[KernelReport]:
        """Numbers of the kernels of a program that was just built; `values` are known inputs."""
        found = _trips.kernels(traced.jaxpr, values)
        dumped: dict[str, list[pathlib.Path]] = {}
        for file in sorted(folder.iterdir()):
            if match := _FILE.match(file.name):
                dumped.setdefault(_SUFFIX.sub("", match[2]), []).append(file)
        memory = _vmem(folder)
        made = []
        for kernel in found:
            files = dumped.get(kernel.name, [])
            file = files.pop(0) if len(files) > 1 else files[0] if files else None
            made.append(self._kernel(kernel, file, memory))
        return made

    def _kernel(
        self, kernel: _trips.Kernel, file: pathlib.Path | None, memory: dict[str, Any]
    ) -> KernelReport:
        if file is None:
            return KernelReport(name=kernel.name)
        stamp, name = _FILE.match(file.name).groups()
        utilization = next(file.parent.glob(f"{stamp}-{name}-*-{_UTILIZATION}"), None)
        control, flops = _trips.control(kernel)
        read = _schedule.read(
            file.read_text(), utilization.read_text() if utilization else "", control, kernel.steps
        )
        peak, cycles = self._target.chip.flop_per_cycle, read.cycles
        if flops and peak:  # the schedule packs products closer than the units take them
            cycles = max(cycles, flops / peak)
        share = flops / (cycles * peak) if flops and peak and read.exact else None
        vmem, spills = memory.get(name, (None, None))
        return KernelReport(
            name=kernel.name,
            vmem_bytes=vmem,
            spill_bytes=spills,
            cycles=cycles,
            exact=read.exact,
            mxu_share=read.mxu_share,
            vpu_share=read.vpu_share,
            flops=flops,
            peak_share=share,
        )


def _field(path: Any) -> str:
    """The name of an argument of the call; nothing for what else a program takes."""
    if path[0].idx != 0:
        return ""
    return str(getattr(path[-1], "key", ""))


def _vmem(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Bytes of VMEM that a kernel asks for and those of spills, by its name in the program."""
    file = next(folder.glob("*vmem_report.html"), None)
    _, mark, rest = file.read_text().partition("const DATA =") if file else ("", "", "")
    if not mark:
        return {}
    data, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    made = {}
    for name, uses in data["hlo_breakdowns"].items():
        each = [a for block in uses["blocks"] for a in block["allocations"]]
        spills = sum(a["size"] for a in each if a["tag"] == "SPILL")
        made[name] = (uses["total_size"], spills)
    return made
