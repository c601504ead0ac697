"""Folders of the user's own."""

import contextlib
import pathlib


def make_private(folder: pathlib.Path) -> None:
    """Makes a folder and its missing parents, readable by their owner alone."""
    if not folder.is_dir():
        make_private(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
