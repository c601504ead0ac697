"""Folders of the user's own."""

import contextlib
import os
import pathlib
import tempfile


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


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file whole or not at all; what was there before stays if it fails."""
    final = pathlib.Path(path)
    data = content.encode() if isinstance(content, str) else content
    if final.exists() and not final.is_file():  # a pipe or a device is written to as it is
        final.write_bytes(data)
        return
    handle, temporary = tempfile.mkstemp(prefix=f".{final.name}-", dir=final.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
