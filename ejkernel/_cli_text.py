"""Text of the `ejkernel` command."""

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any


def say(text: str = "") -> None:
    """Writes a line to stdout; to nobody where that is closed, which Python shows as None."""
    if sys.stdout is not None:
        sys.stdout.write(f"{text}\n")


def tell(text: str, end: str = "\n") -> None:
    """Writes to stderr, as `say` does to stdout."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}{end}")
        sys.stderr.flush()


def is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def _rich() -> bool:
    """Whether tables are drawn: on a terminal, when the extra `cli` is installed."""
    return is_terminal(sys.stdout) and importlib.util.find_spec("rich") is not None


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> None:
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if _rich():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(*columns, title=title or None, title_justify="left")
        for row in cells:
            drawn.add_row(*map(Text, row))  # text, for brackets are no markup here
        Console(file=sys.stdout).print(drawn)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if title:
        say(title)
    for row in [columns, *cells]:
        say("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip())
