"""What `ejkernel bench` shows while it works."""

import importlib.util
import sys
from typing import Any

from ejkernel._cli_text import is_terminal, tell


def shown() -> Any:
    """Progress of `ejkernel bench`: a bar on a terminal with `rich`, else lines."""
    if is_terminal(sys.stderr) and importlib.util.find_spec("rich") is not None:
        return _RichProgress()
    return _PlainProgress()


class _PlainProgress:
    """A line for every row, on the standard error."""

    def __init__(self) -> None:
        self.total = self.count = self.rows_left = 0

    def __enter__(self) -> "_PlainProgress":
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def start(self, total: int) -> None:
        self.total = total
        tell(f"measuring {total} rows")

    def step(self, text: str) -> None:
        return None

    def begin(self, op: str, workload: str, mode: str, program: str) -> None:
        return None

    def ahead(self, compiled: int, failed: int) -> None:
        later = f"; {failed} failed and are tried again in their rows" if failed else ""
        tell(f"compiled {compiled} programs before the first row{later}")

    def lost(self, reason: str) -> None:
        return None

    def left(self, count: int) -> None:
        self.rows_left = count
        tell(f"{count} rows are left; the same command with --resume measures them")

    def done(self, row: Any) -> None:
        self.count += 1
        tell(f"[{self.count}/{self.total}] {summary(row)}")


class _RichProgress(_PlainProgress):
    """A bar with what is done now, and a line above it for every row."""

    def __enter__(self) -> "_RichProgress":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

        columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn())
        text = TextColumn("{task.description}", markup=False)
        self._bar = Progress(*columns, text, console=Console(stderr=True))
        self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def start(self, total: int) -> None:
        self._task = self._bar.add_task("", total=total)

    def step(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def done(self, row: Any) -> None:
        self._bar.console.print(summary(row), markup=False, highlight=False)
        self._bar.advance(self._task)


def summary(row: Any) -> str:
    """A row in one line."""
    from ejkernel.bench import _svg

    said = [f"{p.name} {_svg.number(p.median or 0.0)} {row.unit}" for p in _svg.shown(row)]
    said += [f"{p.name} failed" for p in row.programs if p.failed]
    return f"{row.op}, {row.workload}, {row.mode}: {', '.join(said) or 'nobody can run it'}"
