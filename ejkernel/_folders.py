"""Folders of the user's own."""

import atexit
import contextlib
import functools
import os
import pathlib
import shutil
import tempfile
import warnings

from ejkernel.errors import EjkernelWarning


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


def problem(folder: pathlib.Path) -> str | None:
    """Why nothing can be written in a folder; None when something can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)  # the same each time: no name of a file


@functools.cache
def of_this_process(folder: pathlib.Path, what: str, problem: str) -> pathlib.Path:
    """A folder of this process alone, in place of one that cannot be used; one warning."""
    warnings.warn(
        f"{what} cannot be kept in {folder}: {problem}. This process keeps them to itself; set "
        "EJKERNEL_CACHE_DIR to a folder that can be written.",
        EjkernelWarning,
        stacklevel=2,
    )
    own = tempfile.mkdtemp(prefix="ejkernel-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return pathlib.Path(own)
