"""What a compiler said about a kernel, as plain values, a table and JSON."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

COMPILED, REFUSED, FAILED = "compiled", "refused", "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel of a program; what the target does not have is None."""

    name: str
    registers: int | None = None  # of a thread
    shared_bytes: int | None = None  # of a program
    spill_bytes: int | None = None  # GPU: local memory of a thread; TPU: of the kernel
    vmem_bytes: int | None = None  # scratch, windows and spills; arrays that XLA keeps there not
    cycles: float | None = None  # of all grid steps on one core, when nothing stalls
    exact: bool | None = None  # False: a loop's length is not known, and `cycles` is a lower bound
    mxu_share: float | None = None  # of the slots of these cycles
    vpu_share: float | None = None
    flops: float | None = None  # of the matrix products that run
    peak_share: float | None = None  # of the device's bfloat16 peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One direction of one entry with one configuration, for one target."""

    op: str
    target: str
    entry: str
    direction: str
    status: str  # "compiled"; "refused": nobody meant it to; "failed"
    reason: str = ""  # why it is not compiled
    config: Any = None
    version: int = 1
    seconds: float = 0.0
    kernels: tuple[KernelReport, ...] = ()
    argument_bytes: int | None = None  # of the whole program
    temp_bytes: int | None = None
    launches: int | None = None  # of kernels and copies, XLA's own too; GPU
    flops: float | None = None  # XLA's count, which sees no kernel
    bytes_accessed: float | None = None
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # as tuned tables know it

    @property
    def cycles(self) -> float | None:
        """Of all kernels; None when one of them has none."""
        each = [kernel.cycles for kernel in self.kernels if kernel.cycles is not None]
        return sum(each) if each and len(each) == len(self.kernels) else None

    @property
    def exact(self) -> bool:
        """Whether `cycles` counts every loop."""
        return self.cycles is not None and all(kernel.exact for kernel in self.kernels)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"cycles": self.cycles, "exact": self.exact}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Report":
        """The report that `as_dict` describes."""
        values = {f.name: plain[f.name] for f in dataclasses.fields(cls) if f.name in plain}
        values["kernels"] = tuple(KernelReport(**kernel) for kernel in values["kernels"])
        return cls(**values)


def to_json(reports: Sequence[Report], indent: int | None = 2) -> str:
    return json.dumps([report.as_dict() for report in reports], indent=indent)


# Tables


_COMMON = ("entry", "direction", "config", "kernel")
_GPU = ("registers", "shared", "spills", "result")
_TPU = ("vmem", "spills", "cycles", "mxu", "vpu", "peak", "result")


def tables(reports: Sequence[Report]) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, columns and rows, one table a target."""
    made = []
    for target in dict.fromkeys(report.target for report in reports):
        mine = [report for report in reports if report.target == target]
        columns = (*_COMMON, *(_TPU if target.startswith("tpu") else _GPU))
        rows = [row for report in _folded(mine) for row in _rows(report)]
        made.append((f"{mine[0].op} for {target}", columns, rows))
    return made


def format_table(reports: Sequence[Report]) -> str:
    """The reports as plain text."""
    lines = []
    for title, columns, rows in tables(reports):
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines.append(title)
        for row in (columns, *rows):
            line = "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True))
            lines.append(line.rstrip())
        lines.append("")
    return "\n".join(lines[:-1])


def _folded(reports: Sequence[Report]) -> list[Report]:
    """The directions of an entry that are refused for one reason, as one."""
    made: list[Report] = []
    for report in reports:
        alike = lambda r: (r.status, r.entry, r.reason)
        if made and report.status == REFUSED and alike(made[-1]) == alike(report):
            both = f"{made[-1].direction}, {report.direction}"
            made[-1] = dataclasses.replace(made[-1], direction=both)
        else:
            made.append(report)
    return made


def _rows(report: Report) -> list[list[str]]:
    first = [report.entry, report.direction, config_text(report.config)]
    result = f"{report.seconds:.1f} s"
    if report.status == REFUSED:
        result = f"not compiled: {report.reason}"
    elif report.status == FAILED:
        result = f"FAILED: {report.reason}"
    rows = []
    # steps of a loop that is written out launch one kernel several times
    kernels = [(kernel, len(list(same))) for kernel, same in itertools.groupby(report.kernels)]
    for kernel, count in kernels or ((KernelReport(name=_program_text(report)), 1),):
        cells = _tpu_cells(kernel) if report.target.startswith("tpu") else _gpu_cells(kernel)
        name = kernel.name if count == 1 else f"{kernel.name} ({count} times)"
        rows.append([*first, name, *cells, result])
        first, result = ["", "", ""], ""
    if report.kernels and report.launches is not None:
        total = f"in all: {_launches(report)}, {_size(report.temp_bytes)} of temporaries"
        rows.append([*first, total, *[""] * (len(rows[0]) - 4)])
    return rows


def _program_text(report: Report) -> str:
    if report.temp_bytes is None:
        return ""
    text = f"XLA's own: {_size(report.temp_bytes)} of temporaries"
    if report.launches is not None:
        text += f", {_launches(report)}"
    if report.flops:
        text += f", {report.flops / 1e9:.3g} GFLOP"
    if report.bytes_accessed:
        text += f", {_size(int(report.bytes_accessed))} moved"
    return text


def _launches(report: Report) -> str:
    return f"{report.launches} launch{'' if report.launches == 1 else 'es'}"


def _gpu_cells(kernel: KernelReport) -> list[str]:
    return [
        "" if kernel.registers is None else str(kernel.registers),
        _size(kernel.shared_bytes),
        _size(kernel.spill_bytes),
    ]


def _tpu_cells(kernel: KernelReport) -> list[str]:
    cycles = "" if kernel.cycles is None else f"{kernel.cycles / 1e3:.1f}k"
    if cycles and not kernel.exact:
        cycles = f"at least {cycles}"
    shares = (kernel.mxu_share, kernel.vpu_share, kernel.peak_share)
    return [
        _size(kernel.vmem_bytes),
        _size(kernel.spill_bytes),
        cycles,
        *("" if share is None else f"{share:.0%}" for share in shares),
    ]


def config_text(config: Any) -> str:
    if not isinstance(config, Mapping):
        return "" if config is None else str(config)
    return " ".join(f"{name}={value}" for name, value in config.items())


def _size(count: int | None) -> str:
    if count is None:
        return ""
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.4g} KiB" if count < 1 << 20 else f"{count / (1 << 20):.4g} MiB"
