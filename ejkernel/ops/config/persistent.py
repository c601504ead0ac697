"""Measured configurations on disk: one small JSON file a key, whole or absent."""

import contextlib
import dataclasses
import datetime as dt
import hashlib
import json
import math
import os
import pathlib
import re
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import msgspec

from ejkernel import _folders, _settings
from ejkernel.errors import EjkernelWarning
from ejkernel.ops.config.cache import Stored
from ejkernel.ops.utils import fingerprint, serialize

OWNER = "ejkernel"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds; configs are plain values, checked again when they are used."""

    owner: str
    schema: int
    key: str
    op: str
    device: str
    implementation: str
    version: int
    config: Any
    config_type: str
    times_ms: dict[str, float] = {}
    failures: dict[str, str] = {}
    complete: bool = True
    rivals: dict[str, int] = {}
    versions: dict[str, str] = {}
    date: str = ""
    call: dict[str, Any] = {}  # what the key is the hash of, so that near calls find the record


class _Array(msgspec.Struct):
    shape: list[int]
    dtype: str


class _Call(msgspec.Struct):
    """What the nearness of two calls is computed from."""

    arrays: dict[str, _Array]


def default_path() -> pathlib.Path:
    """`EJKERNEL_CACHE_DIR`, or `configs/` in the user's cache folder for ejkernel."""
    given = _settings.current().cache_dir
    if given is not None:
        try:
            return pathlib.Path(given).expanduser()
        except RuntimeError as error:
            raise OSError(f"EJKERNEL_CACHE_DIR={given!r}: {error}") from None
    import platformdirs

    return pathlib.Path(platformdirs.user_cache_dir(OWNER)) / "configs"


class PersistentCache:
    """Configurations that outlive the process.

    Reading never fails a call: a damaged file is a miss, set aside with one warning; files of other
    schemas or owners are left alone. Without a writable folder, nothing is kept.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self._path = None if path is None else pathlib.Path(path).expanduser()
        self._told = False
        # records that hold their call, by folder and key; read once a process
        self._rows: dict[pathlib.Path, dict[str, Record]] = {}

    @property
    def path(self) -> pathlib.Path:
        return self._path if self._path is not None else default_path()

    # The mapping that a user sees

    def put(
        self,
        key: Any,
        cfg: Any,
        *,
        op: str = "any",
        device: str = "any",
        call: Any = None,
    ) -> None:
        """Remembers a configuration, or a `Stored` choice, under a key; `call` is its document."""
        stored = cfg if isinstance(cfg, Stored) else Stored("", 0, cfg)
        try:
            plain = serialize.to_builtins(stored.config)
        except TypeError as error:
            return self._tell(f"a configuration of {op} has no JSON ({error}); it stays in memory")
        record = Record(
            owner=OWNER,
            schema=fingerprint.SCHEMA,
            key=_text(key),
            op=op,
            device=device,
            implementation=stored.implementation,
            version=stored.version,
            config=plain,
            config_type=_type_name(stored.config),
            times_ms=dict(stored.times_ms),
            failures=dict(stored.failures),
            complete=stored.complete,
            rivals=dict(stored.rivals),
            versions={"jax": jax.__version__},
            date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            call=call or {},
        )
        self.add(record)

    def get(self, key: Any, *, op: str = "any", device: str = "any") -> Any | None:
        """The configuration under a key, of the type it was put with; None when there is none."""
        record = self.read(key, op=op, device=device)
        if record is None:
            return None
        try:
            return revive(record)
        except LookupError:  # as plain values
            return record.config
        except Exception as error:  # noqa: BLE001 - a config checks itself in any way it likes
            self.reject(record, str(error))
            return None

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    # Records

    def read(self, key: Any, *, op: str = "any", device: str = "any") -> Record | None:
        """The record of a key; damage is a miss."""
        try:
            file = self._file(_text(key), op, device)
        except (RuntimeError, OSError) as error:  # no home, no folder
            self._tell(f"there is no cache folder: {error}")
            return None
        return self._load(file, _text(key))

    def reject(self, record: Record, reason: str) -> None:
        """Sets aside a record whose configuration does not hold."""
        file = self._file(record.key, record.op, record.device)
        self._rows.get(file.parent, {}).pop(record.key, None)
        self._set_aside(file, reason)

    def records(self) -> Iterator[Record]:
        """All whole records of this schema."""
        with contextlib.suppress(OSError, RuntimeError):
            yield from self._load_all(self._root(), "*/*/*.json")

    def rows(self, *, op: str, device: str) -> list[Record]:
        """The records of an op on a device that hold their call, in the order of their keys.

        The folder is read once a process; later come only the records that this process adds.
        """
        try:
            found = self._indexed(self._file("any", op, device).parent)
        except (RuntimeError, OSError):  # `read` has told why there is no folder
            return []
        same = (r for _, r in sorted(found.items()) if (r.op, r.device) == (op, device))
        return list(same)

    def _indexed(self, folder: pathlib.Path) -> dict[str, Record]:
        if folder not in self._rows:
            loaded = self._load_all(folder, "*.json")
            self._rows[folder] = {record.key: record for record in loaded if record.call}
        return self._rows[folder]

    def clear(self) -> int:
        """Removes all records of this schema, and what was set aside; how many there were."""
        removed = 0
        self._rows.clear()
        for record in list(self.records()):
            with contextlib.suppress(OSError):
                self._file(record.key, record.op, record.device).unlink()
                removed += 1
        for pattern in ("*/*/*.bad", "*/*/.tmp-*"):
            for file in list(self._root().glob(pattern)):
                with contextlib.suppress(OSError):
                    if file.stat().st_uid == _uid():
                        file.unlink()
        return removed

    def add(self, record: Record) -> None:
        """Writes a record; somebody else's file in its place stays."""
        try:
            file = self._file(record.key, record.op, record.device)
        except (RuntimeError, OSError) as error:
            return self._tell(f"there is no cache folder: {error}; configurations stay in memory")
        if record.call:
            self._indexed(file.parent)[record.key] = record
        if not _is_foreign(file):
            # not msgspec's own JSON, which has no infinite numbers
            self._write(file, json.dumps(msgspec.to_builtins(record)).encode())

    # Files

    def _root(self) -> pathlib.Path:
        return self.path / f"v{fingerprint.SCHEMA}"

    def _file(self, key: str, op: str, device: str) -> pathlib.Path:
        return self._root() / _slug(device) / _slug(op) / f"{_text(key)}.json"

    def _load(self, file: pathlib.Path, key: str) -> Record | None:
        """The record in a file; None where there is none, or only somebody else's."""
        try:
            data = _own_bytes(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(f"cannot read {file}: {error}")
            return None
        return None if data is None else self._parse(file, data, key)

    def _load_all(self, folder: pathlib.Path, pattern: str) -> Iterator[Record]:
        for file in sorted(folder.glob(pattern)):
            if (record := self._load(file, file.stem)) is not None:
                yield record

    def _parse(self, file: pathlib.Path, data: bytes, key: str) -> Record | None:
        try:
            document = json.loads(data)
            if _foreign(document):
                return None
            record = msgspec.convert(document, Record)
            if record.key != key:
                raise ValueError(f"it holds the key {record.key[:12]}…")
            if wrong := [ms for ms in record.times_ms.values() if not 0 <= ms < math.inf]:
                raise ValueError(f"it holds a time of {wrong[0]} ms")
            if record.call:
                msgspec.convert(record.call, _Call)
                if fingerprint.key(record.call) != key:
                    raise ValueError("its call is not that of its key")
        except (ValueError, TypeError, RecursionError) as error:
            self._set_aside(file, str(error))
            return None
        return record

    def _write(self, file: pathlib.Path, data: bytes) -> None:
        temporary = None
        try:
            _folders.make_private(file.parent)
            handle, temporary = tempfile.mkstemp(prefix=".tmp-", dir=file.parent)
            with os.fdopen(handle, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, file)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._tell(f"cannot write {file.parent}: {error}; configurations stay in memory")

    def _set_aside(self, file: pathlib.Path, reason: str) -> None:
        moved = "and could not be moved"
        with contextlib.suppress(OSError):
            os.replace(file, file.with_suffix(".bad"))
            moved = f"and was moved to {file.with_suffix('.bad').name}"
        self._tell(f"{file} is damaged ({reason.strip().partition(chr(10))[0][:120]}) {moved}")

    def _tell(self, text: str) -> None:
        """One warning a cache: trouble with files never stops a call."""
        if not self._told:
            self._told = True
            warnings.warn(f"ejkernel cache: {text}.", EjkernelWarning, stacklevel=2)


def export_text(records: Sequence[Record]) -> str:
    """Records as one document, which `ejkernel cache import` reads."""
    document = {"owner": OWNER, "schema": fingerprint.SCHEMA, "records": list(records)}
    return json.dumps(msgspec.to_builtins(document), indent=2, sort_keys=True) + "\n"


def revive(record: Record) -> Any:
    """The config of a record, of the type it names; LookupError where that is not loaded."""
    if (cls := _known_type(record.config_type)) is None:
        raise LookupError(f"there is no {record.config_type} here")
    return serialize.from_builtins(record.config, cls)


def _foreign(document: Any) -> bool:
    return isinstance(document, dict) and (
        document.get("owner", OWNER) != OWNER
        or document.get("schema", fingerprint.SCHEMA) != fingerprint.SCHEMA
    )


def _is_foreign(file: pathlib.Path) -> bool:
    """Whether a file is another user's, owner's or schema's, or no file at all."""
    try:
        data = _own_bytes(file)
        return data is None or _foreign(json.loads(data))
    except NoFileError:
        return True
    except (OSError, ValueError, RecursionError):
        return False


class NoFileError(OSError):
    """Something else has the name of a file: a pipe, a socket, a device, a folder."""


def _own_bytes(file: pathlib.Path) -> bytes | None:
    """The content of a file of this user, else None; never waits for a writer of a pipe."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise NoFileError("it is no regular file")
    return file.read_bytes() if found.st_uid == _uid() else None


def _text(key: Any) -> str:
    text = key if isinstance(key, str) else serialize.stable_json(key)
    plain = re.fullmatch(r"[0-9a-zA-Z_-]{1,80}", text)
    return text if plain else hashlib.sha256(text.encode()).hexdigest()


def _slug(text: str) -> str:
    return re.sub(r"[^0-9a-zA-Z]+", "-", text).strip("-").lower() or "any"


def _uid() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _known_type(name: str) -> type | None:
    """A dataclass by name, from modules that are loaded already: a file imports nothing."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # not getattr: a module may import another one to answer it
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None
