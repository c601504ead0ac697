"""`ejkernel mask`: which blocks of queries and keys a pattern computes, drawn."""

import argparse
import ast
import json
import pathlib
from typing import Any

from ejkernel import _folders
from ejkernel._cli_call import UsageError, value
from ejkernel._cli_text import say

_EXAMPLE = """example:
  ejkernel mask 'local(2) | global_(1)' --length 4096 --block-size 128 --causal --png mask.png
"""
_MOST_BLOCKS = 1 << 26


def add_command(commands: Any) -> None:
    """The parser of `mask`."""
    text = "draws which blocks a pattern of blocksparse_attention computes"
    parser = commands.add_parser(
        "mask",
        help=text,
        description=text,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    builders = "builders of ejkernel.modules.block_mask, joined by | & ~; all blocks without one"
    parser.add_argument("pattern", nargs="?", metavar="PATTERN", help=builders)
    parser.add_argument("--length", type=int, default=4096, help="queries (4096)")
    parser.add_argument("--keys", type=int, help="keys; as many as queries without it")
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a block (64)")
    parser.add_argument("--causal", action="store_true", help="hide later keys, inside blocks too")
    window = "sliding_window; --window=-1,0 for no limit on the left"
    parser.add_argument("--window", metavar="LEFT[,RIGHT]", help=window)
    parser.add_argument("--documents", metavar="N,N,…", help="lengths of packed documents")
    parser.add_argument("--rows", type=int, default=32, help="most rows of characters (32)")
    parser.add_argument("--cols", type=int, default=64, help="most columns of characters (64)")
    parser.add_argument("--png", metavar="FILE", help="writes a picture too")
    parser.add_argument("--json", action="store_true", help="the counts, for programs")
    parser.set_defaults(run=_mask)


def _mask(arguments: argparse.Namespace) -> int:
    from ejkernel.types import block_picture

    kinds = _kinds(arguments)
    counts = block_picture.counts(kinds)
    if arguments.png is not None:
        file = pathlib.Path(arguments.png)
        if not (file.parent.is_dir() and _folders.can_write(file.parent)):
            raise UsageError(f"--png {arguments.png}: {file.parent} is no folder to write to")
        _folders.write_whole(file, block_picture.png(kinds))
    if arguments.json:
        say(json.dumps(counts))
        return 0
    groups, height, width = block_picture.pooled(kinds, arguments.rows, arguments.cols)
    size, (nq, nk) = arguments.block_size, kinds.shape
    say(
        f"{nq} x {nk} blocks of {size}; a character is {height} x {width} blocks: "
        f"{block_picture.LEGEND}"
    )
    for line in block_picture.lines(groups):
        say(line)
    say(
        f"{counts['kept']} of {counts['blocks']} blocks are computed ({counts['density']:.1%}): "
        f"{counts['whole']} whole, {counts['cut']} with a mask inside"
    )
    return 0


def _kinds(arguments: argparse.Namespace) -> Any:
    """The kind of each block under the pattern and the masks of a command."""
    for name in ("length", "keys", "block_size", "rows", "cols"):
        number = getattr(arguments, name)
        if number is not None and number < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1; got {number}")
    t = arguments.length
    s = t if arguments.keys is None else arguments.keys
    size = arguments.block_size
    if (blocks := -(-t // size) * -(-s // size)) > _MOST_BLOCKS:
        raise UsageError(f"{blocks} blocks are too many to draw; take a larger --block-size")
    table = None if arguments.pattern is None else _pattern(arguments.pattern).build(t, s, size)
    kinds = _mask_info(arguments, t, s).block_kinds(size, t, s)
    if table is not None:
        kinds[~table] = 0
    return kinds


def _mask_info(arguments: argparse.Namespace, t: int, s: int) -> Any:
    """The masks inside blocks."""
    import numpy as np

    from ejkernel.types import MaskInfo

    info = MaskInfo()
    if arguments.documents is not None:
        lengths = _numbers("--documents", arguments.documents)
        if t != s or sum(lengths) > t or min(lengths) < 0:
            raise UsageError(
                f"--documents {arguments.documents} must be lengths >= 0 of at most {t} tokens "
                "together, with as many keys as queries"
            )
        ids = np.full((1, t), -1, np.int32)
        ids[0, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        info = MaskInfo.from_segments(ids)
    if arguments.window is not None:
        sides: Any = _numbers("--window", arguments.window)
        info = info.apply_sliding_window(sides[0] if len(sides) == 1 else sides)
    return info.apply_causal() if arguments.causal else info


def _numbers(option: str, text: str) -> tuple[int, ...]:
    numbers = value(text)
    numbers = numbers if isinstance(numbers, tuple) else (numbers,)
    if not numbers or not all(type(n) is int for n in numbers):
        raise UsageError(f"{option} {text!r} must be whole numbers, separated by commas")
    return numbers


def _pattern(text: str) -> Any:
    """A pattern from an expression of builders, `|`, `&` and `~`; nothing else is evaluated."""
    from ejkernel.types import block_mask

    builders = {
        name: getattr(block_mask, name)
        for name in ("local", "causal", "strided", "global_", "random", "bigbird")
    }

    def literal(node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError as error:
            raise UsageError(f"{text!r}: {ast.unparse(node)!r} is no number") from error

    def build(node: ast.AST) -> Any:
        match node:
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return build(left) | build(right)
            case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
                return build(left) & build(right)
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return ~build(operand)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                if name in builders and all(keyword.arg for keyword in keywords):
                    named = {str(k.arg): literal(k.value) for k in keywords}
                    return builders[name](*map(literal, args), **named)
        raise UsageError(
            f"{text!r} is no pattern: write {', '.join(builders)} with numbers, joined by | & ~, "
            "as in 'local(2) | global_(1)'"
        )

    try:
        return build(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise UsageError(f"{text!r} is no pattern: {error.args[0]}") from error
