"""`ejkernel bench`: measures operations beside peers, and compares results."""

import argparse
import dataclasses
import pathlib
from typing import Any

from ejkernel import _cli_progress, _folders
from ejkernel._cli_call import UsageError
from ejkernel._cli_text import say, table, tell

_EXAMPLE = """examples:
  ejkernel bench mean_pooling flash_attention --report report.html
  ejkernel bench flash_attention --out new.json
  ejkernel bench flash_attention --out new.json --resume --budget 500 --timeout 120
  ejkernel bench --compare old.json new.json
"""


_CALL_S = 540.0  # of one call, where --budget does not say


def add_command(commands: Any) -> None:
    """The parser."""
    bench = commands.add_parser(
        "bench",
        help="measures operations beside peers",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    many: dict[str, Any] = {"action": "append", "metavar": "NAME"}
    add = bench.add_argument
    add("ops", nargs="*", metavar="OP", help="operations; all when none is named")
    add("--only", default="", metavar="TEXT", help="workloads whose name contains this")
    add("--shapes", choices=("auto", "small", "full"), default="auto", help="small on a CPU (auto)")
    add("--dtype", help="of arrays of floats: float32 on a CPU, else bfloat16")
    add("--mode", choices=("fwd", "fwd+bwd"), action="append", help="both when none is named")
    add("--options", action="store_true", help="also calls that show what an option costs")
    add(
        "--entry",
        help="a kernel such as triton/gpu, or a platform; all by default",
        **many,
    )
    add("--peer", help="a peer; all that are installed by default; `none` for none", **many)
    add("--public", default="", metavar="FOLDER", help="holds the public package of our name")
    add("--workloads", action="append", default=[], metavar="FILE", help="Python file of workloads")
    add("--rounds", type=int, default=5, help="times that each program is measured (5)")
    add("--seconds", type=float, default=3.0, help="that the rounds of one row may take (3)")
    add(
        "--tune",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="tune each kernel first",
    )
    add(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="compile all programs in so many threads before the first row",
    )
    add(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="begin no row after this; 1 if some are left",
    )
    add(
        "--timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="measure in a process that may die or say nothing for so long; another goes on",
    )
    add("--resume", action="store_true", help="keep the rows of --out and measure the others")
    add("--state", default="", help=argparse.SUPPRESS)  # of a worker: see `bench._apart`
    add("--bars", action="store_true", help="leave with 1 when a promise of a workload is missed")
    add(
        "--compile",
        metavar="TARGET",
        help="only compile Triton kernels, for a GPU such as cuda:sm_90 that need not be here",
    )
    add("--list", action="store_true", help="say what would be measured, and nothing else")
    add("--json", action="store_true", help="print the results for programs")
    add("--out", metavar="FILE", help="write the results, after every row")
    add("--report", metavar="FILE", help="write an HTML page with charts")
    add("--compare", nargs=2, metavar=("OLD", "NEW"), help="two results; 1 for a regression")
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.compare is not None:
        return _compare(arguments)
    _check(arguments)
    if arguments.compile is not None:
        return _compile(arguments)
    if arguments.timeout and not arguments.list:
        from ejkernel.bench import _apart

        budget = float("inf") if arguments.budget is None else arguments.budget
        silent = arguments.timeout + arguments.tune  # nothing is said while a kernel is tuned
        return _apart.run(arguments.argv, silent, budget, arguments.out)
    workloads = _workloads(arguments)  # a file of workloads may say how many devices JAX makes
    _check_devices()
    if arguments.list:
        return _list(workloads)
    from ejkernel.bench import _apart, _results, _runner

    options = _runner.Options(
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        modes=tuple(arguments.mode or ("fwd", "fwd+bwd")),
        entries=None if arguments.entry is None else tuple(arguments.entry),
        peers=_peer_names(arguments, workloads),
        public=arguments.public,
        tune_s=arguments.tune,
        threads=arguments.threads,
        budget_s=float("inf") if arguments.budget is None else arguments.budget,
        resume=_earlier(arguments),
        given_up=_apart.given_up(arguments.state) if arguments.state else {},
    )
    journal = _apart.Journal(arguments.state) if arguments.state else None

    def save(document: Any) -> None:
        if arguments.out:
            _folders.write_whole(arguments.out, _results.encode(document))

    with _cli_progress.shown() as progress:
        told: Any = progress if journal is None else _apart.Recorded(progress, journal)
        document = _runner.run(workloads, options, told, save)
    save(document)
    if journal is not None:
        journal.write(ended=True)
    _tell_compiled()
    return max(_finish(arguments, document), 1 if progress.rows_left else 0)


def _tell_compiled() -> None:
    """Says whether Triton's compiler had to work, where it was asked to."""
    import sys

    if (module := sys.modules.get("ejkernel.callib._triton_compile")) is not None:
        counts = module.counts
        if any(counts.values()):
            tell(f"Triton kernels: {counts['found']} found, {counts['compiled']} compiled")


def _earlier(arguments: argparse.Namespace) -> Any:
    """The results that are gone on with."""
    if not arguments.resume or not pathlib.Path(arguments.out).exists():
        return None
    from ejkernel.bench import _results

    return _results.read(arguments.out)


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot work before anything is measured."""
    if arguments.rounds < 1:
        raise UsageError(f"--rounds must be at least 1; got {arguments.rounds}")
    if arguments.threads < 0:
        raise UsageError(f"--threads must be at least 0; got {arguments.threads}")
    if arguments.threads and arguments.tune:
        raise UsageError(
            "--threads compiles before --tune chooses configurations: tune in a run without "
            "--threads, or by `ejkernel tune`"
        )
    if arguments.resume and arguments.out is None:
        raise UsageError("--resume needs --out, which holds the rows that are there already")
    for name in ("seconds", "tune", "timeout", "budget"):
        value = getattr(arguments, name)
        endless = name == "budget" and value == float("inf")
        if value is not None and not 0 <= value < float("inf") and not endless:
            raise UsageError(f"--{name} must be a number of seconds; got {value}")
    for name in ("out", "report"):
        path = getattr(arguments, name)
        if path is None:
            continue
        place = pathlib.Path(path)
        if place.is_dir() or not place.parent.is_dir() or not _folders.can_write(place.parent):
            raise UsageError(f"--{name} {path} is no file that can be written")


def _check_devices() -> None:
    from ejkernel import _device

    try:
        _device.devices()
    except RuntimeError as error:
        raise UsageError(str(error)) from None


def _workloads(arguments: argparse.Namespace) -> list[Any]:
    from ejkernel import _device
    from ejkernel.bench import _workloads
    from ejkernel.kernels import kernel_registry

    for op in arguments.ops:
        kernel_registry.spec(op)  # refuses what there is not
    if arguments.dtype is not None:
        from ejkernel._cli_call import _dtype

        _dtype(arguments.dtype)
    if arguments.workloads:
        found = [w for path in arguments.workloads for w in _workloads.load(path)]
        found = [w for w in found if not arguments.ops or w.op in arguments.ops]
    else:
        _check_devices()
        kind = _device.device_kind()
        more = {"shapes": arguments.shapes, "dtype": arguments.dtype, "options": arguments.options}
        found = _workloads.find(arguments.ops, kind, **more)
    found = [w for w in found if arguments.only in w.name]
    if not found:
        raise UsageError(f"no workload has {arguments.only!r} in its name; see --list")
    if arguments.entry is not None:
        _check_entries(arguments.entry, {w.op for w in found})
    return found


def _check_entries(names: list[str], ops: set[str]) -> None:
    from ejkernel.kernels import kernel_registry

    known = {e.name for op in ops for e in kernel_registry.list(op)}
    known |= {str(e.platform) for op in ops for e in kernel_registry.list(op)}
    if unknown := sorted(set(names) - known):
        raise UsageError(f"--entry {unknown[0]!r} is none of {', '.join(sorted(known))}")


def _peer_names(arguments: argparse.Namespace, workloads: list[Any]) -> tuple[str, ...] | None:
    if arguments.peer is None:
        return None
    if arguments.peer == ["none"]:
        return ()
    from ejkernel import _device
    from ejkernel.bench import _peers

    kind = _device.device_kind()
    known = {p.name for w in workloads for p in (*w.peers, *_peers.known(w.op, kind))}
    if unknown := sorted(set(arguments.peer) - known):
        here = ", ".join(sorted(known)) or "none"
        raise UsageError(f"--peer {unknown[0]!r} is not here; the peers of these ops are: {here}")
    return tuple(arguments.peer)


def _compile(arguments: argparse.Namespace) -> int:
    """Fills the cache of Triton kernels for another machine, which may then be carried there."""
    from ejkernel import _device
    from ejkernel.aot import _targets
    from ejkernel.bench import _precompile
    from ejkernel.callib import _triton_compile

    target = _targets.parse(arguments.compile)
    if target.kind == "tpu":
        raise UsageError(f"--compile takes a GPU, such as cuda:sm_90; got {arguments.compile!r}")
    _targets.require(target)
    arguments.shapes = "full" if arguments.shapes == "auto" else arguments.shapes
    arguments.dtype = arguments.dtype or "bfloat16"
    described = _device.Target("gpu", target.model, target.capability)
    found = _workloads(arguments)
    if arguments.list:
        return _estimate(arguments, found, described)
    modes = tuple(arguments.mode or ("fwd", "fwd+bwd"))
    failed = 0
    for done in _precompile.workloads(found, modes, described, bool(arguments.tune)):
        tell(f"{done.op}, {done.workload}: {done.kernels} kernels")
        failed += len(done.failed)
        for text in done.failed:
            tell(f"ejkernel: {text}")
    counts = _triton_compile.counts
    say(f"compiled {counts['compiled']} Triton kernels for {target}, found {counts['found']}")
    say(f"they are in {_triton_compile.cache_folder()}")
    return 1 if failed else 0


def _estimate(arguments: argparse.Namespace, workloads: list[Any], target: Any) -> int:
    """What a benchmark has to do on a GPU that is not here, and about how long it takes."""
    from ejkernel.bench import _estimate, _runner

    options = _runner.Options(
        seconds=arguments.seconds,
        modes=tuple(arguments.mode or ("fwd", "fwd+bwd")),
        public=arguments.public,
        tune_s=arguments.tune,
    )
    found = list(_estimate.rows(workloads, target, options, cached=True))
    columns = ("op", "workload", "mode", "ours", "peers", "candidates", "seconds")
    rows = [(*dataclasses.astuple(row)[:-1], f"{row.seconds:.0f}") for row in found]
    table(columns, rows, f"an estimate for {target.model}, with kernels that --compile has left")
    budget = arguments.budget or _CALL_S
    total, calls = _estimate.whole(found, budget)
    say(f"about {total:.0f} s: {calls} calls of at most {budget:g} s, each with --resume")
    return 0


def _list(workloads: list[Any]) -> int:
    from ejkernel import _device
    from ejkernel.bench import _peers

    kind = _device.device_kind()
    rows = []
    for w in workloads:
        peers = [*w.peers, *(_peers.known(w.op, kind) if w.known_peers else ())]
        rows.append((w.op, w.name, w.dtype, ", ".join(w.modes), ", ".join(p.name for p in peers)))
    table(("op", "workload", "dtype", "modes", "peers"), rows)
    return 0


def _finish(arguments: argparse.Namespace, document: Any) -> int:
    from ejkernel.bench import _bars, _report, _results
    from ejkernel.bench._results import OURS

    if arguments.report:
        _folders.write_whole(arguments.report, _report.page(document))
    if arguments.json:
        say(_results.encode(document).rstrip("\n"))
    else:
        _show(document)
    wrong = [
        f"{row.op}, {row.workload}, {row.mode}: {p.name}: {p.failed}"
        for row in document.rows
        for p in row.programs
        if p.kind == OURS and p.failed and not p.failed.startswith("refused")
    ]
    missed = _bars.missed(document)
    for line in (*wrong, *missed):
        tell(f"ejkernel: {line}")
    return 1 if wrong or (arguments.bars and missed) else 0


def _show(document: Any) -> None:
    from ejkernel.bench import _svg

    columns = ("workload", "mode", "program", "median", "spread", "rate", "ceiling", "")
    for op in dict.fromkeys(row.op for row in document.rows):
        rows = [row for row in document.rows if row.op == op]
        lines = [_line(row, program) for row in rows for program in _svg.ordered(row)]
        table(columns, lines, f"{op} on {document.device}, {document.date}")
        say()
    for ceiling in document.ceilings:
        rate = _svg.rate_text(ceiling.rate, ceiling.unit)
        say(f"ceiling of {ceiling.dtype}: {ceiling.name} {rate}")


def _line(row: Any, program: Any) -> tuple[str, ...]:
    from ejkernel.bench import _svg

    median = "-" if program.median is None else f"{program.median:.4g} {row.unit}"
    spread = "" if program.spread is None else f"± {program.spread / 2:.2g}"
    rate = "" if program.rate is None else _svg.rate_text(program.rate, row.rate_unit)
    share = "" if program.share is None else f"{100 * program.share:.0f} %"
    about = program.failed or ("auto" if row.auto == program.name else "")
    return row.workload, row.mode, program.name, median, spread, rate, share, about


def _compare(arguments: argparse.Namespace) -> int:
    from ejkernel.bench import _compare, _results

    old, new = (_results.read(path) for path in arguments.compare)
    changes = _compare.compare(old, new)
    if arguments.json:
        import json

        columns = ("op", "workload", "mode", "program", "old", "new", "ratio", "noise", "verdict")
        rows = [dict(zip(columns, row, strict=True)) for row in _compare.rows(changes)]
        say(json.dumps(rows, indent=1))
    else:
        columns = ("op", "workload", "mode", "program", "old", "new", "new / old", "noise", "")
        table(columns, _compare.rows(changes), f"{old.date} and {new.date} on {new.device}")
    worse = [change for change in changes if change.is_regression]
    if worse:
        tell(f"ejkernel: {len(worse)} of {len(changes)} programs are slower beyond the noise")
    return 1 if worse else 0
