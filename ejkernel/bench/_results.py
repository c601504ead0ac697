"""The one format of benchmark results: a JSON document of rows, with device, versions and date."""

import contextlib
import datetime as dt
import hashlib
import importlib.metadata
import os
import pathlib
import platform
from typing import Any

import msgspec

OWNER, SCHEMA = "ejkernel bench", 1
OURS, PEER = "ours", "peer"
_LIBRARIES = (
    *("jax", "jaxlib", "triton", "libtpu", "torch", "numpy", "jax-cuda13-plugin"),
    *("nvidia-cudnn-cu13", "fla-core", "tokamax", "jax-linear-attention"),
)


class Program(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One implementation in a row; `median` and `spread` have the unit of the row."""

    name: str
    kind: str = PEER  # or "ours"
    median: float | None = None  # None: it failed or was refused, see `failed`
    spread: float | None = None  # between the quartiles of the rounds; None: not recorded
    rounds: int = 0
    rate: float | None = None  # TFLOP/s or GB/s, whichever bounds the row
    share: float | None = None  # of the ceiling that was measured in the same run
    version: int | None = None  # of our kernel
    config: dict[str, str] = {}  # of our kernel, by direction
    failed: str = ""
    note: str = ""
    same_work: bool = True  # False: it does other work, so that it has no rate


class Verdict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A promise about a row: `of` takes at most 1 / `least` of what `beside` takes."""

    of: str
    beside: str
    least: float
    ratio: float | None = None  # beside / of; None: one of them has no number

    @property
    def kept(self) -> bool:
        return self.ratio is None or self.ratio >= self.least


class Row(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """All programs on one call and in one mode."""

    op: str
    workload: str
    mode: str  # "fwd" or "fwd+bwd"
    dtype: str
    programs: list[Program]
    shapes: dict[str, str] = {}
    unit: str = "ms"  # or "bytes", "us", "cycles"
    flops: int | None = None
    bytes: int | None = None
    bound: str = ""  # "compute" or "memory": which ceiling is the nearer one
    auto: str = ""  # the entry that platform="auto" runs
    bars: list[Verdict] = []

    def program(self, name: str) -> Program | None:
        return next((p for p in self.programs if p.name == name), None)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.op, self.workload, self.mode, self.unit

    @property
    def rate_unit(self) -> str:
        return {"compute": "TFLOP/s", "memory": "GB/s"}.get(self.bound, "")


class Ceiling(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What the device reaches in a plain program: a matrix product, or a copy."""

    name: str  # "matmul" or "copy"
    dtype: str
    rate: float
    unit: str


class Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Everything one run measured."""

    owner: str
    schema: int
    date: str
    device: str
    versions: dict[str, str]
    rows: list[Row]
    machine: str = ""
    source: str = ""  # hash of the package's source files; "": of an older harness
    ceilings: list[Ceiling] = []
    notes: list[str] = []

    def ceiling(self, bound: str, dtype: str) -> float | None:
        """The rate that bounds a row, in its unit."""
        name = {"compute": "matmul", "memory": "copy"}.get(bound)
        found = [c for c in self.ceilings if c.name == name]
        same = [c for c in found if c.dtype == dtype] or found
        return same[0].rate if same else None

    @property
    def model(self) -> str:
        """The name of the device, without its kind and capability."""
        return self.device.split("|")[1] if "|" in self.device else self.device


def new(rows: list[Row]) -> Document:
    """A document of this device, these versions and this moment."""
    from ejkernel.ops import device_fingerprint

    return Document(
        owner=OWNER,
        schema=SCHEMA,
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        device=device_fingerprint(),
        machine=platform.processor() or platform.machine(),
        versions=versions(),
        source=source_hash(),
        rows=rows,
    )


def continued(old: Document | None) -> Document:
    """A new document, or an earlier one of this device, source and versions to add rows to."""
    made = new([])
    if old is None:
        return made
    for name in ("device", "source"):
        was, now = getattr(old, name), getattr(made, name)
        if was != now:
            raise ValueError(f"the results to resume are of another {name}: {was}, not {now}")
    both = {n: (v, made.versions[n]) for n, v in old.versions.items() if n in made.versions}
    if other := [f"{n} {was}, not {now}" for n, (was, now) in both.items() if was != now]:
        raise ValueError(f"the results to resume are of other versions: {'; '.join(other)}")
    old.versions |= made.versions
    return old


def versions() -> dict[str, str]:
    """Versions of this package and of what may have been compiled with or compared to."""
    from ejkernel import __version__

    found = {"python": platform.python_version(), "ejkernel": __version__}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def source_hash() -> str:
    """A hash of all Python files of this package."""
    root, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def encode(document: Document) -> str:
    """The JSON text of a document."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def read(path: str | os.PathLike[str]) -> Document:
    """The document in a file; ValueError says what is wrong with it."""
    data = pathlib.Path(path).read_bytes()
    try:
        document = msgspec.json.decode(data, type=Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} holds no results of `ejkernel bench`: {error}") from None
    if (document.owner, document.schema) != (OWNER, SCHEMA):
        raise ValueError(f"{path} is of {document.owner!r}, schema {document.schema}")
    return document


def fill_rates(document: Document) -> None:
    """Says of every row which ceiling bounds it, and of every program its rate and share."""
    for row in document.rows:
        if row.unit != "ms":
            continue
        row.bound = row.bound or _bound(document, row)
        work = row.flops if row.bound == "compute" else row.bytes
        ceiling = document.ceiling(row.bound, row.dtype)
        for program in row.programs:
            if program.median and work and program.same_work:
                program.rate = work / program.median / (1e9 if row.bound == "compute" else 1e6)
                program.share = None if ceiling is None else program.rate / ceiling


def _bound(document: Document, row: Row) -> str:
    """The ceiling under which the row would take the longer time."""
    rates = {name: document.ceiling(name, row.dtype) for name in ("compute", "memory")}
    if not row.flops or not row.bytes or None in rates.values():
        return "compute" if row.flops else "memory" if row.bytes else ""
    compute = row.flops / (rates["compute"] or 1.0) / 1e9
    memory = row.bytes / (rates["memory"] or 1.0) / 1e6
    return "compute" if compute >= memory else "memory"


def describe(value: Any) -> str:
    """Dtypes and shapes of an argument."""
    import jax

    leaves = [x for x in jax.tree.leaves(value) if hasattr(x, "shape")]
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in leaves)
