"""The `ejkernel` command: what is here, what a call would run, and what was measured."""

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ejkernel import _cli_aot, _cli_bench, _cli_call, _cli_mask, _cli_tune, _folders, _no_tpu
from ejkernel._cli_call import UsageError
from ejkernel._cli_text import is_terminal
from ejkernel._cli_text import say as _say
from ejkernel._cli_text import table as _table
from ejkernel._cli_text import tell as _tell

# JAX and the rest of the package are imported by the commands that need them: `--help` is quick,
# and an interrupt during an import ends as quietly as any other.

_DISTRIBUTIONS = ("jax", "jaxlib", "triton", "libtpu")
_KEY = re.compile(r"[0-9a-zA-Z_-]{1,80}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code."""
    try:
        with _told_briefly():
            code = _run(argv)
            if sys.stdout is not None:
                sys.stdout.flush()  # a closed pipe is met here, not when Python ends
            return code
    except BrokenPipeError:
        _forget_stdout()
        return 141
    except KeyboardInterrupt:
        return 130
    except (UsageError, ValueError, TypeError, NotImplementedError, OSError) as error:
        # also what the library says about wrong arguments, settings and platforms
        text = " ".join(str(error).split()) or type(error).__name__
        _tell(f"ejkernel: error: {text}")
        return 2


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit:  # after --help or --version
        return 0
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    _no_tpu.name_platforms()
    return arguments.run(arguments)


@contextlib.contextmanager
def _told_briefly() -> Iterator[None]:
    """Shows the package's warnings as one line each."""
    from ejkernel.errors import EjkernelWarning

    def brief(message: Any, *where: Any, **more: Any) -> None:
        _tell(f"ejkernel: warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = brief
        warnings.simplefilter("always", EjkernelWarning)
        yield


def _forget_stdout() -> None:
    """Keeps Python from flushing into a closed pipe on exit."""
    with contextlib.suppress(OSError, io.UnsupportedOperation):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _parser() -> argparse.ArgumentParser:
    from ejkernel import __version__

    parser = _Parser(prog="ejkernel", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ejkernel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = _add(commands, "doctor", "devices, versions, platforms and the cache", "")
    doctor.set_defaults(run=_doctor)
    listing = _add(commands, "list", "which kernels there are", "flash_attention")
    listing.add_argument("op", nargs="?", metavar="OP", help="one operation, in detail")
    listing.set_defaults(run=_list)
    call = "flash_attention --shape 2,1024,8,64 --set causal=true"
    explain = _add(commands, "explain", "what a call would run, and why", call)
    explain.add_argument("op", metavar="OP")
    _cli_call.add_arguments(explain, dtype="float32")
    explain.add_argument("--platform", default="auto", help="auto, or one that must serve the call")
    explain.add_argument("--json", action="store_true", help="for programs")
    explain.set_defaults(run=_explain)
    _cli_aot.add_command(commands)
    _cli_bench.add_command(commands)
    _cli_tune.add_command(commands)
    _cli_mask.add_command(commands)
    cache = _add(commands, "cache", "configurations measured on this machine", "show")
    actions = cache.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add(actions, "show", "all records", "").set_defaults(run=_cache_show)
    _add(actions, "path", "the folder", "").set_defaults(run=_cache_path)
    clear = _add(actions, "clear", "removes all records", "--yes")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.set_defaults(run=_cache_clear)
    file = "tuned.json"
    export = _add(actions, "export", "writes all records to a file; - is stdout", file)
    add = _add(actions, "import", "adds the records of a file, or none if one is bad", file)
    for action, run in ((export, _cache_export), (add, _cache_import)):
        action.add_argument("file", metavar="FILE")
        action.set_defaults(run=run)
    return parser


def _add(commands: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    """A command whose help ends with an example."""
    parser = commands.add_parser(name, help=text, description=text)
    parser.epilog = f"example: {parser.prog} {example}".rstrip()
    return parser


# doctor


def _doctor(arguments: argparse.Namespace) -> int:
    from ejkernel import __version__

    versions = [("python", platform.python_version()), ("ejkernel", __version__)]
    versions += [(name, _version(name)) for name in _DISTRIBUTIONS]
    _table(("package", "version"), versions)
    _say()
    code = 0
    try:
        rows = [(d.id, d.platform, d.device_kind) for d in _devices()]
    except UsageError as error:
        code = 1
        _say(str(error))
    else:
        _table(("device", "platform", "kind"), rows)
        _say()
        _table(("platform", "usable", "why"), _platforms())
    _say()
    _table(("cache", ""), _cache_state())
    return code


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[Any]:
    from ejkernel import _device

    try:
        return _device.devices()
    except RuntimeError as error:
        raise UsageError(str(error)) from None


def _platforms() -> list[tuple[str, str, str]]:
    """Each platform, whether a call here can use it, and with which ops or why not."""
    from ejkernel import _device
    from ejkernel.kernels import Backend, Platform, kernel_registry

    here = _device.device_kind()
    rows = []
    for one in Platform:
        entries = [entry for entry in kernel_registry.list() if entry.platform == one]
        usable = sorted({e.op for e in entries if e.backend in (Backend.ANY, here)})
        if usable:
            rows.append((str(one), "yes", f"{len(usable)} ops: {', '.join(usable)}"))
        elif entries:
            needed = sorted({e.backend.upper() for e in entries})
            rows.append((str(one), "no", f"needs {' or '.join(needed)}; the device is a {here}"))
        else:
            reasons = {kernel_registry.missing(op, one) for op in kernel_registry.ops()}
            told = sorted(r for r in reasons if "is registered" not in r)
            rows.append((str(one), "no", told[0] if told else "no kernel of it is registered"))
    return rows


def _cache_state() -> list[tuple[str, Any]]:
    cache = _cache()
    records, bad = _survey(cache)
    writable = _folders.can_write(cache.path)
    state = [
        ("folder", cache.path),
        ("exists", "yes" if cache.path.is_dir() else "no"),
        ("writable", "yes" if writable else "no: configurations stay in memory"),
        ("records", len(records)),
        ("bad files", len(bad)),
    ]
    return state + [("bad", file) for file in bad]


# list


def _list(arguments: argparse.Namespace) -> int:
    from ejkernel.kernels import Platform, _support, kernel_registry

    op = arguments.op
    rows = []
    if op is not None:
        kernel_registry.spec(op)  # refuses what there is not
    for name, cells in _support.matrix().items():
        for entry, cell in cells.items() if op in (None, name) else ():
            honours = cell["honours"] if cell["honours"] == "all" else ", ".join(cell["honours"])
            backward = {"own": "own", "jax": "JAX's", None: "none"}[cell["backward"]]
            only = ["only by its name"] if cell.get("by_name") else []
            checked = ", ".join([*cell["checked"], *only])
            row = (name, entry, backward, honours, checked, cell["version"])
            rows.append((*row, cell.get("through", "")))
    _table(("op", "entry", "backward", "acts on", "checked", "version", "through"), rows)
    if op is not None:
        there = {entry.platform for entry in kernel_registry.list(op)}
        absent = [(str(p), kernel_registry.missing(op, p)) for p in Platform if p not in there]
        _say()
        if (lowering := kernel_registry.spec(op).lowers_to) is not None:
            also = ", or runs kernels of its own" if lowering.beside else ""
            _say(f"{op} lowers to {', then '.join(lowering.ops())}{also}\n")
        _table(("not here", "why"), absent)
    return 0


# explain


def _explain(arguments: argparse.Namespace) -> int:
    from ejkernel._explain import explain

    _devices()  # none is a matter of one line, too
    values = _cli_call.values(arguments)
    made = explain(arguments.op, platform=arguments.platform, **values)
    _say(made.to_json(indent=2) if arguments.json else made.to_text())
    return 0 if made.forward.entry is not None else 1


# cache


def _cache() -> Any:
    from ejkernel.ops import PersistentCache

    return PersistentCache()


def _survey(cache: Any) -> tuple[list[Any], list[pathlib.Path]]:
    """Whole records, and the damaged files that were set aside, now or earlier."""
    return list(cache.records()), sorted(cache.path.glob("v*/*/*/*.bad"))


def _cache_path(arguments: argparse.Namespace) -> int:
    _say(str(_cache().path))
    return 0


def _cache_show(arguments: argparse.Namespace) -> int:
    records, bad = _survey(_cache())
    rows = []
    for record in records:
        best = f"{min(record.times_ms.values()):.4g}" if record.times_ms else ""
        what = (record.op, record.device, record.implementation, json.dumps(record.config))
        rows.append((*what, best, record.date, "" if record.complete else "cut short"))
    if rows:
        _table(("op", "device", "entry", "config", "best ms", "date", ""), rows)
    else:
        _say("no records")
    if bad:
        _say(f"{len(bad)} bad files; `ejkernel doctor` names them")
    return 0


def _cache_clear(arguments: argparse.Namespace) -> int:
    cache = _cache()
    records, bad = _survey(cache)
    if not arguments.yes:
        if not is_terminal(sys.stdin):
            raise UsageError("`cache clear` removes all records; say so with --yes")
        _tell(f"remove {len(records)} records from {cache.path}? [y/N] ", end="")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            _say("nothing removed")
            return 1
    cache.clear()
    if left := sum(map(len, _survey(cache))):
        raise UsageError(f"{left} files in {cache.path} could not be removed")
    _say(f"removed {len(records)} records and {len(bad)} bad files")
    return 0


def _cache_export(arguments: argparse.Namespace) -> int:
    from ejkernel.ops.config.persistent import export_text

    records = list(_cache().records())
    text = export_text(records)
    if arguments.file == "-":
        if sys.stdout is None:
            raise UsageError("the standard output is closed; name a file to export to")
        sys.stdout.write(text)
    else:
        _folders.write_whole(arguments.file, text)
        _say(f"exported {len(records)} records to {arguments.file}")
    return 0


def _cache_import(arguments: argparse.Namespace) -> int:
    standard = arguments.file == "-"
    if standard and sys.stdin is None:
        raise UsageError("the standard input is closed; name a file to import")
    data = sys.stdin.buffer.read() if standard else pathlib.Path(arguments.file).read_bytes()
    records = _checked_records(data, "the standard input" if standard else arguments.file)
    cache = _cache()
    _folders.make_private(cache.path)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=cache.path) as staging:
        _say(f"imported {len(records)} records, {_move_in(cache, staging, records)} of them new")
    return 0


def _move_in(cache: Any, staging: str, records: Sequence[Any]) -> int:
    """Writes all records beside the cache, then moves them in; takes all back if one move fails."""
    staged = type(cache)(staging)
    for record in records:
        staged.add(record)
    if len(list(staged.records())) != len(records):
        raise UsageError(f"cannot write {len(records)} records to {cache.path}; nothing imported")
    undo: list[tuple[pathlib.Path, bytes | None]] = []
    try:
        for file in sorted(pathlib.Path(staging).glob("*/*/*/*.json")):
            final = cache.path / file.relative_to(staging)
            _folders.make_private(final.parent)
            if final.exists() and not final.is_file():  # to read a pipe is to wait
                raise UsageError(f"{final} is no file; nothing imported")
            undo.append((final, final.read_bytes() if final.exists() else None))
            os.replace(file, final)
    except BaseException:
        for final, before in reversed(undo):
            with contextlib.suppress(OSError):
                final.unlink(missing_ok=True) if before is None else final.write_bytes(before)
        raise
    return sum(before is None for _, before in undo)


def _checked_records(data: bytes, name: str) -> list[Any]:
    """The records of an exported document; one that is bad refuses them all."""
    import msgspec

    from ejkernel.ops.config.persistent import OWNER, Record
    from ejkernel.ops.utils import fingerprint

    class Document(msgspec.Struct, forbid_unknown_fields=True):
        owner: str
        schema: int
        records: list[Record]

    try:
        document = msgspec.json.decode(data, type=Document)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"{name}: {error}; nothing imported") from None
    if (document.owner, document.schema) != (OWNER, fingerprint.SCHEMA):
        raise UsageError(f"{name} is not of {OWNER}, schema {fingerprint.SCHEMA}")
    seen = set()
    for place, record in enumerate(document.records):
        identity = (record.device, record.op, record.key)
        problem = "is there twice" if identity in seen else _record_problem(record)
        if problem is not None:
            raise UsageError(f"{name}: record {place} {problem}; nothing imported")
        seen.add(identity)
    return document.records


def _record_problem(record: Any) -> str | None:
    """What is wrong with a record, apart from the types of its fields."""
    from ejkernel.kernels import kernel_registry
    from ejkernel.ops.config.persistent import OWNER
    from ejkernel.ops.utils import fingerprint

    if (record.owner, record.schema) != (OWNER, fingerprint.SCHEMA):
        return f"is not of {OWNER}, schema {fingerprint.SCHEMA}"
    if _KEY.fullmatch(record.key) is None:  # a key is a file name
        return f"has a key that is none: {record.key[:80]!r}"
    if any(not 0 <= time < float("inf") for time in record.times_ms.values()):
        return "has times that are no times"
    if record.op not in kernel_registry.ops():
        return None  # of a kernel that is not here; it is checked when it is used
    for entry in kernel_registry.list(record.op):
        if (entry.name, entry.version) == (record.implementation, record.version):
            if entry.config is None:
                return None if record.config is None else "has a config, and its entry has none"
            try:
                entry.decode(None, "forward", record.config)
            except (ValueError, TypeError) as error:
                return f"has a config that does not hold: {error}"
    return None
