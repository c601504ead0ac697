"""Runs a generated case of an operation's Triton kernel, compiled for Hopper, without a GPU."""

import argparse
import sys
from collections.abc import Sequence

from tools.ptx import case


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ptx", description=__doc__)
    parser.add_argument("op", help="an operation with a Triton kernel, e.g. page_attention")
    parser.add_argument("case", nargs="?", help="default: the first that the kernel serves")
    parser.add_argument("--dtype", default="bfloat16", help="of the arrays; default: bfloat16")
    parser.add_argument("--forward", action="store_true", help="without gradients")
    parser.add_argument("--testing", action="store_true", help="with the small blocks of the tests")
    given = parser.parse_args(argv)
    try:
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


if __name__ == "__main__":
    sys.exit(main())
