"""`ejkernel tune`: measures configurations in a process of its own, and keeps the best."""

import argparse
import json
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from ejkernel import _cli_aot, _cli_call, _folders
from ejkernel._cli_call import UsageError
from ejkernel._cli_text import is_terminal, say, table, tell

_EXAMPLE = """examples:
  ejkernel tune flash_attention --only "S1024"
  ejkernel tune flash_attention --shape 4,4096,16,128 --set causal=true --budget 120
  ejkernel tune --recorded calls.json --out tuned.json
  ejkernel tune --from-hlo program.txt
  ejkernel cache import tuned.json
  ejkernel tune flash_attention --static --target tpu:v5e --out FOLDER
"""


def add_command(commands: Any) -> None:
    """The parser."""
    tune = commands.add_parser(
        "tune",
        help="measures configurations and keeps the best",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = tune.add_argument
    add("ops", nargs="*", metavar="OP", help="operations, with their benchmark shapes")
    add("--recorded", metavar="FILE", help="calls that `ejkernel.ops.save_invocations` wrote")
    add("--from-hlo", metavar="FILE", help="a program's text with json stamps")
    add("--only", default="", metavar="TEXT", help="benchmark shapes whose name contains this")
    add("--shapes", choices=("auto", "small", "full"), default="auto", help="small on a CPU (auto)")
    add("--platform", action="append", metavar="NAME", help="auto, or one such as triton (auto)")
    add("--direction", action="append", choices=("forward", "backward"), help="both by default")
    add("--budget", type=float, default=60.0, metavar="SECONDS", help="for a call (60)")
    add("--total", type=float, default=0.0, metavar="SECONDS", help="for all calls; 0: no limit")
    add("--again", action="store_true", help="also calls that are tuned already")
    add("--workers", type=int, default=0, help="processes that compile Triton candidates first")
    add("--static", action="store_true", help="by the cycles of compiled schedules, for --target")
    add("--out", metavar="PATH", help="a table instead of the cache; a folder for those that ship")
    _cli_aot.add_common(tune, required=False)
    tune.set_defaults(run=_tune, dtype=None)


def _tune(arguments: argparse.Namespace) -> int:
    if arguments.static:
        return _static(arguments)
    if arguments.target:
        raise UsageError("--target is for --static; without it the device that is here is measured")
    request = _request(arguments)
    out = None if arguments.out is None else _Table(arguments.out)
    if out is not None:
        request |= {"folder": str(out.folder)}
    from ejkernel.bench._tune_job import Job

    job = Job(request, arguments.timeout, _Shown())
    results = job.run()
    if out is not None:
        tell(out.write())
    _show(arguments, results)
    good = ("tuned", "known already", "not tuned: fewer than two candidates")
    return 0 if all(r["state"] in good for r in results) else 1


def _static(arguments: argparse.Namespace) -> int:
    if len(arguments.ops) != 1:
        raise UsageError(f"--static takes one operation; got {len(arguments.ops)}")
    if not arguments.target:
        raise UsageError("--static needs --target, such as tpu:v5e")
    arguments.op = arguments.ops[0]
    arguments.dtype = arguments.dtype or "bfloat16"
    return _cli_aot.tune_static(arguments)


def _request(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the worker is asked to do; refuses what it could not."""
    sources = [bool(arguments.ops), bool(arguments.recorded), bool(arguments.from_hlo)]
    if sum(sources) != 1:
        raise UsageError("name operations, or give one of --recorded and --from-hlo")
    for name in ("budget", "timeout"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise UsageError(f"--{name} must be positive; got {getattr(arguments, name)}")
    if arguments.total < 0 or arguments.workers < 0:
        raise UsageError("--total and --workers must not be negative")
    from ejkernel import _settings
    from ejkernel.kernels import Platform, kernel_registry

    platforms = arguments.platform or ["auto"]
    if unknown := [p for p in platforms if p not in ("auto", *Platform)]:
        known = ", ".join(("auto", *Platform))
        raise UsageError(f"--platform {unknown[0]!r} is none of {known}")
    if not arguments.imports:
        for op in arguments.ops:
            kernel_registry.spec(op)  # refuses what there is not
    return {
        "ops": arguments.ops,
        "call": _call(arguments),
        "documents": _documents(arguments),
        "only": arguments.only,
        "shapes": arguments.shapes,
        "dtype": arguments.dtype,
        "platforms": platforms,
        "directions": arguments.direction or ["forward", "backward"],
        "budget_s": arguments.budget,
        "total_s": arguments.total,
        "again": arguments.again,
        "workers": arguments.workers,
        "imports": arguments.imports,
        "folder": None,
        "cache_dir": _settings.current().cache_dir,
    }


def _call(arguments: argparse.Namespace) -> Any:
    """The call that --shape and --set describe, if they do."""
    if not arguments.shape and not arguments.options:
        return None
    if len(arguments.ops) != 1:
        raise UsageError("--shape and --set describe a call of one operation")
    from ejkernel.aot import _calls

    arguments.op = arguments.ops[0]
    described = argparse.Namespace(**vars(arguments) | {"dtype": arguments.dtype or "float32"})
    values = _cli_call.values(described)
    if not arguments.shape:
        raise UsageError("--set needs --shape, or the op's benchmark shapes without --set")
    return _calls.encode(values)


def _documents(arguments: argparse.Namespace) -> list[dict[str, Any]] | None:
    """The calls of a file."""
    if arguments.recorded:
        from ejkernel.ops import registry

        found = registry.load_calls(arguments.recorded)
    elif arguments.from_hlo:
        from ejkernel.ops import extract_labels_from_hlo_text

        text = pathlib.Path(arguments.from_hlo).read_text(errors="replace")
        labels = extract_labels_from_hlo_text(text)
        found = [x.document["call"] for x in labels if x.document is not None]
    else:
        return None
    if not found:
        file = arguments.recorded or arguments.from_hlo
        hint = "" if arguments.recorded else "; EJKERNEL_OPS_STAMP=json writes them"
        raise UsageError(f"{file} holds no calls{hint}")
    return found


class _Table:
    """A table, and the folder beside it that holds its records until the job is done.

    A path that is a folder gets tables in the form that ships with the package.
    """

    def __init__(self, path: str):
        self.path = pathlib.Path(path)
        self.ships = self.path.is_dir()
        parent = self.path if self.ships else self.path.parent
        if not parent.is_dir() or not _folders.can_write(parent):
            raise UsageError(f"--out {path} is no file that can be written")
        self.folder = parent / f"{'tables' if self.ships else self.path.name}.partial"
        self.earlier = [] if self.ships else self._read()

    def _read(self) -> list[Any]:
        from ejkernel import cli

        if not self.path.exists():
            return []
        return cli._checked_records(self.path.read_bytes(), str(self.path))

    def write(self) -> str:
        """Adds the folder's records to the table, and removes the folder; what was written."""
        from ejkernel.aot import _table
        from ejkernel.ops import PersistentCache
        from ejkernel.ops.config.persistent import export_text

        identity = lambda record: (record.device, record.op, record.key)
        records = {identity(record): record for record in self.earlier}
        records |= {identity(r): r for r in PersistentCache(self.folder).records()}
        if self.ships:
            files = _table.write_records(self.path, list(records.values()))
            said = f"{len(records)} rows in {', '.join(map(str, files)) or 'no file'}"
        else:
            _folders.write_whole(self.path, export_text(list(records.values())))
            said = f"{len(records)} records in {self.path}; `ejkernel cache import` installs them"
        shutil.rmtree(self.folder, ignore_errors=True)
        return said


def _show(arguments: argparse.Namespace, results: Sequence[dict[str, Any]]) -> None:
    if arguments.json:
        say(json.dumps(results, indent=2))
        return
    rows = []
    for result in results:
        best = result.get("best_ms")
        tried = f"{result.get('measured', 0)}, {result.get('failed', 0)} failed"
        config = "" if result.get("config") is None else json.dumps(result["config"])
        time = "" if best is None else f"{best:.4g}"
        call = result["call"]
        rows.append((call, result.get("entry", ""), config, time, tried, result["state"]))
    table(("call", "entry", "config", "best ms", "measured", ""), rows)


class _Shown:
    """Lines on the standard error; on a terminal, the candidates of a call are one line."""

    def __init__(self) -> None:
        self.total = self.count = 0
        self.live = is_terminal(sys.stderr)

    def calls(self, device: str, labels: list[str]) -> None:
        self.total = len(labels)
        tell(f"tuning {len(labels)} calls on {device}")

    def start(self, call: str) -> None:
        self.call = call

    def candidates(self, done: int, count: int, least_ms: float | None) -> None:
        if self.live:
            best = "" if least_ms is None else f", best {least_ms:.3g} ms"
            tell(f"\r[{self.count + 1}/{self.total}] {done} of {count} candidates{best}   ", end="")

    def result(self, result: dict[str, Any]) -> None:
        self.count += 1
        best = result.get("best_ms")
        said = "" if best is None else f", {result['entry']} {best:.3g} ms"
        start = "\r" if self.live else ""
        tell(f"{start}[{self.count}/{self.total}] {result['call']}: {result['state']}{said}")

    def died(self, call: str, reason: str) -> None:
        tell(f"{call}: {reason}; another process goes on")
