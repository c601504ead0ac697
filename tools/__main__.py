"""Writes the generated parts of the documentation, or checks that they are up to date."""

import argparse
import sys

from tools import measured, pictures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files, instead of checking")
    write = parser.parse_args().write
    stale = []
    for generator in (measured, pictures):
        for path, text in generator.files().items():
            if path.exists() and path.read_text() == text:
                continue
            stale.append(path)
            if write:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    return int(bool(stale) and not write)


if __name__ == "__main__":
    sys.exit(main())
