"""`ejkernel aot` and `ejkernel tune --static`: compilers of devices that are not here."""

import argparse
import json
import pathlib
from typing import Any

from ejkernel import _cli_call, _folders
from ejkernel._cli_call import UsageError
from ejkernel._cli_text import say, table, tell

_EXAMPLE = """example:
  ejkernel aot flash_attention --target tpu:v5e --shape 1,4096,8,128 --set causal=true
"""


def add_command(commands: Any) -> None:
    """The parser of `aot`."""
    aot = commands.add_parser(
        "aot",
        help="compiles an operation for a device that is not here",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    aot.add_argument("op", metavar="OP")
    add_common(aot, required=True)
    aot.add_argument(
        "--configs",
        choices=("heuristic", "all"),
        default="heuristic",
        help="the first guess, or all",
    )
    aot.set_defaults(run=_aot)


def add_common(parser: argparse.ArgumentParser, required: bool) -> None:
    """Options of every command that compiles for a target."""
    many: dict[str, Any] = {"action": "append", "default": []}
    known = "tpu:v5e, tpu:v5e:16x16, cuda:sm_90, hip:gfx942, …"
    parser.add_argument("--target", required=required, help=known, **many)
    _cli_call.add_arguments(parser, dtype="bfloat16")
    parser.add_argument("--entry", metavar="NAME", help="pallas/tpu, or a platform", **many)
    parser.add_argument("--import", metavar="MODULE", dest="imports", help="own kernels", **many)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a target (600)")
    parser.add_argument("--json", action="store_true", help="for programs")


def _compile(arguments: argparse.Namespace, configs: str, entries: list[str] | None) -> list[Any]:
    from ejkernel import aot

    if not arguments.timeout > 0:
        raise _cli_call.UsageError(f"--timeout must be positive; got {arguments.timeout}")

    def progress(target: str, text: str) -> None:
        tell(f"{target}: {text}")

    return aot.compile(
        arguments.op,
        targets=arguments.target,
        call=_cli_call.values(arguments) or None,
        dtype=arguments.dtype,
        entries=entries,
        configs=configs,
        imports=arguments.imports,
        timeout=arguments.timeout,
        progress=progress,
    )


def _aot(arguments: argparse.Namespace) -> int:
    from ejkernel.aot import _reports

    reports = _compile(arguments, arguments.configs, arguments.entry or None)
    if arguments.json:
        say(_reports.to_json(reports))
    else:
        for number, (title, columns, rows) in enumerate(_reports.tables(reports)):
            if number:
                say()
            table(columns, rows, title)
    states = {report.status for report in reports}
    return 0 if _reports.COMPILED in states and _reports.FAILED not in states else 1


def tune_static(arguments: argparse.Namespace) -> int:
    """`ejkernel tune --static`, for one operation."""
    from ejkernel.aot import _reports, _table, _targets

    if foreign := [t for t in arguments.target if _targets.parse(t).kind != "tpu"]:
        raise UsageError(f"{foreign[0]} has no static cycles; --static is for tpu:… targets")
    if arguments.out is not None and not _folders.can_write(pathlib.Path(arguments.out)):
        raise UsageError(f"--out {arguments.out} is no folder that can be made or written to")
    reports = _compile(arguments, "all", arguments.entry or ["pallas"])
    chosen = _table.choose(reports)
    if arguments.out is not None:
        _table.write(pathlib.Path(arguments.out), chosen)
    if arguments.json:
        say(json.dumps(_table.rows(chosen), indent=2))
    else:
        for title, columns, rows in _reports.tables(reports):
            table(columns, rows, title)
            say()
        best = [
            (
                r.target,
                r.direction,
                r.entry,
                _reports.config_text(r.config),
                f"{(r.cycles or 0) / 1e3:.1f}k",
            )
            for r in chosen
        ]
        table(("target", "direction", "entry", "config", "cycles"), best, "chosen")
    wanted = {(r.target, r.direction) for r in reports}
    return 0 if wanted and len(chosen) == len(wanted) else 1
