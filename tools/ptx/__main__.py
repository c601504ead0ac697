"""Runs a generated case of an operation's Triton kernel, compiled for Hopper, without a GPU."""

import argparse
import sys
from collections.abc import Sequence

from tools.ptx import candidates, case


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ptx", description=__doc__)
    parser.add_argument("op", help="an operation with a Triton kernel, e.g. page_attention")
    parser.add_argument("case", nargs="?", help="default: the first that the kernel serves")
    parser.add_argument("--dtype", default="bfloat16", help="of the arrays; default: bfloat16")
    parser.add_argument("--forward", action="store_true", help="without gradients")
    parser.add_argument("--testing", action="store_true", help="with the small blocks of the tests")
    parser.add_argument(
        "--candidates",
        action="store_true",
        help="each configuration of the tuner, on longer calls; CASE is then one of these",
    )
    given = parser.parse_args(argv)
    try:
        if given.candidates:
            return _candidates(given)
        report = case.run(
            given.op,
            given.case,
            given.dtype,
            gradients=not given.forward,
            testing=given.testing,
        )
    except LookupError as error:
        parser.error(str(error))
    print("\n".join(report.lines()))
    return int(not report.clean)


def _candidates(given: argparse.Namespace) -> int:
    """Runs every configuration and prints as it goes; 1 if one of them is not clean."""
    found = candidates.names(given.op) if given.case is None else (given.case,)
    bad = total = 0
    for name in found:
        made = candidates.run(given.op, name, given.dtype, gradients=not given.forward)
        for report in made:
            print("\n".join(report.lines()), flush=True)
            total, bad = total + 1, bad + (not report.clean)
    print(f"{total} configurations, {bad} not clean")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
