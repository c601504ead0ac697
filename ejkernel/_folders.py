"""Folders of the user's own."""

import contextlib
import os
import pathlib


def make_private(folder: pathlib.Path) -> None:
    """Makes a folder and its missing parents, readable by their owner alone."""
    if not folder.is_dir():
        make_private(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def can_write(folder: pathlib.Path) -> bool:
    """Whether files can be written to a folder that is there, or that could be made."""
    try:
        nearest = next((p for p in (folder, *folder.parents) if p.exists()), None)
    except OSError:  # a part of the path is a file, or must not be looked into
        return False
    return nearest is not None and nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
