"""The cache on disk: whole entries or none, nobody else's files, and never a call that fails."""

import dataclasses
import errno
import json
import os
import pathlib
import pwd
import stat
import subprocess
import sys
import tempfile
import warnings

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_allclose

from ejkernel import _settings
from ejkernel.errors import EjkernelWarning
from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, Kernel, PersistentCache
from ejkernel.ops.config import persistent
from ejkernel.ops.config.cache import Stored

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def arrays():
    # JAX arrays cannot be made while tests are collected: see conftest.py
    global X
    X = jax.random.normal(jax.random.key(0), (4,))


@dataclasses.dataclass(frozen=True)
class Config:
    block: int

    def __post_init__(self):
        if not 0 < self.block <= 1024:
            raise ValueError(f"{self.block=} is out of range.")


class Double(Kernel):
    def run(self, x, *, cfg):
        return x * 2 if cfg.block == 1 else x + x

    def heuristic_cfg(self, inv):
        return Config(1)

    def config_space(self, inv):
        return [Config(1), Config(2)]


def tuning(cache):
    """An executor that measures and keeps its results in a cache."""
    policy = AutotunePolicy(mode="autotune")
    return Executor(ConfigSelectorChain(persistent=cache, policy=policy))


def snapshot(folder):
    """Names, contents and times of all files under a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {p.relative_to(folder): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def python(program, *arguments, cwd=ROOT, **environment):
    given = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def cache(tmp_path):
    return PersistentCache(tmp_path / "cache")


# The mapping


def test_a_config_comes_back_with_its_type(cache):
    cache.put("key", Config(7))
    assert cache.get("key") == Config(7)
    assert "key" in cache
    assert cache.get("other") is None
    assert "other" not in cache
    for key in ("a/../../b", "ü" * 300, ("a", 1), ""):
        cache.put(key, {"plain": [1, 2.5, None]})
        assert PersistentCache(cache.path).get(key) == {"plain": [1, 2.5, None]}
    assert all(cache.path in path.parents for path in cache.path.rglob("*"))


def test_entries_say_what_they_are(cache):
    stored = Stored("run/any", 3, Config(2), {"a": 1.5}, {"b": "too big"})
    cache.put("key", stored, op="op", device="cpu|some model")
    (file,) = cache.path.rglob("*.json")
    assert file.relative_to(cache.path).parts == ("v1", "cpu-some-model", "op", "key.json")
    content = json.loads(file.read_bytes())
    assert content["config"] == {"block": 2}
    assert (content["implementation"], content["version"]) == ("run/any", 3)
    assert (content["times_ms"], content["failures"]) == ({"a": 1.5}, {"b": "too big"})
    assert content["versions"]["jax"] == jax.__version__
    assert content["date"]


def test_clear_counts_what_it_removes(cache):
    for i in range(3):
        cache.put(f"key{i}", Config(1))
    assert cache.clear() == 3
    assert list(cache.records()) == []


def test_created_folders_are_private(cache):
    old = os.umask(0o022)
    try:
        cache.put("key", Config(1), op="op", device="device")
    finally:
        os.umask(old)
    folders = [cache.path, *(path for path in cache.path.rglob("*") if path.is_dir())]
    modes = {
        str(path.relative_to(cache.path)): stat.S_IMODE(path.stat().st_mode) for path in folders
    }
    assert modes == dict.fromkeys(modes, 0o700)
    (file,) = cache.path.rglob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


# Many writers, and writers that die

WRITERS = """
import os, sys, warnings
warnings.simplefilter("error")
from ejkernel.ops.config.persistent import PersistentCache

warnings.filterwarnings("ignore", "os.fork")
children = []
for number in range(8):
    child = os.fork()
    if child == 0:
        cache = PersistentCache(sys.argv[1])
        for i in range(20):
            cache.put("shared", {"writer": number, "payload": "x" * 2000})
            cache.put(f"own-{number}-{i}", {"writer": number, "i": i})
            found = cache.get("shared")
            if found is None or found["payload"] != "x" * 2000:
                os._exit(1)
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_eight_processes_lose_nothing(tmp_path):
    assert python(WRITERS, tmp_path) == f"{[0] * 8}\n"
    cache = PersistentCache(tmp_path)
    assert len(list(cache.records())) == 8 * 20 + 1
    for number in range(8):
        for i in range(20):
            assert cache.get(f"own-{number}-{i}") == {"writer": number, "i": i}
    assert cache.get("shared")["writer"] in range(8)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json"}


KILLED = """
import os, random, signal, sys, time, warnings
from ejkernel.ops.config.persistent import PersistentCache

warnings.filterwarnings("ignore", "os.fork")
chance = random.Random(0)
for number in range(40):
    child = os.fork()
    if child == 0:
        cache = PersistentCache(sys.argv[1])
        i = 0
        while True:
            i += 1
            cache.put(f"key{i % 5}", {"i": i, "payload": "x" * chance.randrange(20_000)})
    time.sleep(chance.uniform(0.0, 0.025))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print("done")
"""


def test_a_killed_writer_leaves_only_whole_entries(tmp_path):
    assert python(KILLED, tmp_path) == "done\n"
    cache = PersistentCache(tmp_path)
    files = list(tmp_path.rglob("*.json"))
    assert 1 <= len(files) <= 5
    for file in files:
        assert set(cache.get(file.stem)) == {"i", "payload"}
    assert not list(tmp_path.rglob("*.bad"))
    cache.clear()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# Damage


def changed(**fields):
    return lambda content: json.dumps({**content, **fields}).encode()


def without(field):
    return lambda content: json.dumps({k: v for k, v in content.items() if k != field}).encode()


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: json.dumps(content).encode()[:-20],
    "binary": lambda content: bytes(range(256)),
    "zeros": lambda content: bytes(300),
    "a list": lambda content: b"[1, 2]",
    "null": lambda content: b"null",
    "a number too long": lambda content: b"9" * 10_000,
    "not a string": changed(implementation=3),
    "not an int": changed(version="1"),
    "times of text": changed(times_ms={"a": "fast"}),
    "an unknown field": changed(surprise=1),
    "a missing field": without("config"),
    "another key": changed(key="other"),
    "deeply nested": lambda content: b"[" * 100_000 + b"]" * 100_000,
    "deeply nested config": lambda content: (
        json.dumps(content).replace('{"block": 1}', "[" * 100_000 + "]" * 100_000).encode()
    ),
}
BAD_CONFIGS = {
    "config of another type": changed(config=[1]),
    "text for a number": changed(config={"block": "1"}),
    "out of range": changed(config={"block": -5}),
    "far out of range": changed(config={"block": 10**30}),
    "missing in config": changed(config={}),
    "null config": changed(config=None),
    "true for a number": changed(config={"block": True}),
    "fraction": changed(config={"block": 1.5}),
    "nested config": changed(config={"block": [[[[]]]]}),
}


def damaged(cache, damage, key, **where):
    cache.put(key, Stored("run/any", 1, Config(1)), **where)
    (file,) = cache.path.rglob("*.json")
    file.write_bytes(damage(json.loads(file.read_bytes())))
    return file


@pytest.mark.parametrize("damage", [*DAMAGE, *BAD_CONFIGS])
def test_a_damaged_entry_is_a_miss_with_one_warning_and_set_aside(cache, damage):
    file = damaged(cache, (DAMAGE | BAD_CONFIGS)[damage], "key")
    before = file.read_bytes()
    with pytest.warns(EjkernelWarning, match="damaged") as told:
        found = [cache.get("key"), cache.get("key")]
    assert found == [None, None]
    assert len(told) == 1
    assert not file.exists()
    assert file.with_suffix(".bad").read_bytes() == before
    cache.put("key", Config(3))
    assert cache.get("key") == Config(3)


@pytest.mark.parametrize("damage", [*DAMAGE, *BAD_CONFIGS])
def test_a_damaged_entry_does_not_stop_a_call(cache, damage):
    executor, kernel = tuning(cache), Double()
    inv = executor.invocation(kernel, X)
    where = {"op": kernel.name, "device": inv.device_fingerprint}
    file = damaged(cache, (DAMAGE | BAD_CONFIGS)[damage], inv.key, **where)
    with pytest.warns(EjkernelWarning) as told:
        assert_allclose(executor(kernel, X), 2 * X)
    assert len(told) == 1
    assert file.with_suffix(".bad").exists()
    choice = tuning(PersistentCache(cache.path)).choose(kernel, X)
    assert choice.source == "persistent"


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), ValueError(), TypeError("no"), AssertionError("no"), ZeroDivisionError()],
    ids=repr,
)
def test_a_config_that_refuses_its_values_in_any_way_is_a_miss(cache, error):
    @dataclasses.dataclass(frozen=True)
    class Picky:
        block: int

        def __post_init__(self):
            if self.block > 2:
                raise error

    class PickyDouble(Double):
        def heuristic_cfg(self, inv):
            return Picky(1)

        def config_space(self, inv):
            return [Picky(1), Picky(2)]

    executor, kernel = tuning(cache), PickyDouble()
    inv = executor.invocation(kernel, X)
    where = {"op": kernel.name, "device": inv.device_fingerprint}
    damaged(cache, changed(config={"block": 3}), inv.key, **where)
    with pytest.warns(EjkernelWarning, match="damaged") as told:
        assert_allclose(executor(kernel, X), 2 * X)
    assert len(told) == 1


def test_a_folder_in_the_place_of_an_entry_does_not_stop_a_call(cache):
    executor, kernel = tuning(cache), Double()
    inv = executor.invocation(kernel, X)
    cache._file(inv.key, kernel.name, inv.device_fingerprint).mkdir(parents=True)
    with pytest.warns(EjkernelWarning) as told:
        assert_allclose(executor(kernel, X), 2 * X)
    assert len(told) == 1


# Files of others


@pytest.fixture
def foreign(cache):
    """A cache with an entry, and a function that changes that entry to be somebody else's."""
    cache.put("key", Config(1))
    (file,) = cache.path.rglob("*.json")

    def change(**fields):
        file.write_bytes(changed(**fields)(json.loads(file.read_bytes())))
        return snapshot(cache.path)

    return change


OTHERS = [{"owner": "somebody"}, {"schema": 999}, {"schema": 0, "config": 3, "extra": 1}]


@pytest.mark.parametrize("fields", OTHERS)
def test_entries_of_other_owners_and_schemas_are_not_read_or_moved(cache, foreign, fields):
    before = foreign(**fields)
    assert cache.get("key") is None
    assert list(cache.records()) == []
    assert snapshot(cache.path) == before


@pytest.mark.parametrize("fields", OTHERS)
def test_entries_of_other_owners_and_schemas_are_not_overwritten(cache, foreign, fields):
    before = foreign(**fields)
    cache.put("key", Config(2))
    assert snapshot(cache.path) == before


@pytest.mark.parametrize("fields", OTHERS)
def test_entries_of_other_owners_and_schemas_are_not_removed(cache, foreign, fields):
    before = foreign(**fields)
    cache.clear()
    assert snapshot(cache.path) == before


def test_folders_of_other_schemas_are_left_alone(cache):
    other = cache.path / "v0" / "any" / "any"
    other.mkdir(parents=True)
    (other / "key.json").write_bytes(b"\x00 not even json")
    (cache.path / "notes.json").write_text("mine")
    before = snapshot(cache.path)
    assert cache.get("key") is None
    assert list(cache.records()) == []
    cache.clear()
    assert snapshot(cache.path) == before
    cache.put("key", Config(2))
    assert before.items() <= snapshot(cache.path).items()


@pytest.mark.parametrize("damage", ["none", "truncated"])
@pytest.mark.parametrize("use", ["get", "records", "clear", "call"])
def test_files_of_another_user_are_left_alone(cache, monkeypatch, damage, use):
    executor, kernel = tuning(cache), Double()
    inv = executor.invocation(kernel, X)
    where = {"op": kernel.name, "device": inv.device_fingerprint}
    harm = DAMAGE[damage] if damage in DAMAGE else changed()
    damaged(cache, harm, inv.key, **where)
    before = snapshot(cache.path)
    monkeypatch.setattr(persistent, "_uid", lambda: os.getuid() + 1)
    if use == "get":
        assert cache.get(inv.key, **where) is None
    elif use == "records":
        assert list(cache.records()) == []
    elif use == "clear":
        assert cache.clear() == 0
    else:
        assert executor.choose(kernel, X).source == "autotune"
    assert snapshot(cache.path) == before


# Trouble with the disk


def check_one_warning(cache):
    executor, kernel = tuning(cache), Double()
    with pytest.warns(EjkernelWarning, match="cache") as told:
        found = [executor(kernel, x) for x in (X, jnp.ones(7))]
    assert_allclose(found[0], 2 * X)
    assert_allclose(found[1], jnp.full(7, 2.0))
    assert [str(warning.message) for warning in told] == [str(told[0].message)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert executor.choose(kernel, X).source == "memory"


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    check_one_warning(PersistentCache(tmp_path / "file" / "cache"))
    check_one_warning(PersistentCache(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("module", "function", "code"),
    [
        (tempfile, "mkstemp", errno.EROFS),
        (pathlib.Path, "mkdir", errno.EACCES),
        (os, "fsync", errno.ENOSPC),
        (os, "replace", errno.EROFS),
        (os, "fdopen", errno.EMFILE),
    ],
)
def test_a_disk_that_refuses(cache, monkeypatch, module, function, code):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(module, function, refuse)
        check_one_warning(cache)
    assert not [path for path in cache.path.rglob("*") if path.is_file()]


def test_a_file_that_cannot_be_read(cache, monkeypatch):
    read_bytes = pathlib.Path.read_bytes

    def refuse(self):
        if cache.path not in self.parents:
            return read_bytes(self)  # JAX's own cache
        raise PermissionError(errno.EACCES, "Permission denied")

    tuning(cache)(Double(), X)
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_bytes", refuse)
        check_one_warning(PersistentCache(cache.path))


@pytest.mark.timeout(20)  # to read a pipe is to wait for ever
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_in_place_of_a_record_is_a_miss_and_stays(cache, make):
    tuning(cache)(Double(), X)
    (file,) = cache.path.rglob("*.json")
    file.unlink()
    make(file)
    again = PersistentCache(cache.path)
    check_one_warning(again)
    assert file.exists()
    assert not file.is_file()
    assert again.clear() == 1  # that of the other call


FULL = """
import resource, sys, warnings
import jax.numpy as jnp
from tests.reliability import test_persistent_cache as tests

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
cache = tests.PersistentCache(sys.argv[1])
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print(tests.tuning(cache)(tests.Double(), jnp.arange(3.0)))
print([type(w.message).__name__ for w in told])
"""


def test_a_disk_that_takes_only_half_an_entry(tmp_path):
    lines = python(FULL, tmp_path, JAX_COMPILATION_CACHE_DIR="").splitlines()
    assert lines == ["[0. 2. 4.]", "['EjkernelWarning']"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_home_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with _settings.override(cache_dir=None):
        check_one_warning(PersistentCache())


@pytest.mark.parametrize("given", [None, "~/cache"])
def test_a_user_without_a_home(tmp_path, monkeypatch, given):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    with _settings.override(cache_dir=given):
        check_one_warning(PersistentCache())
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home_may_call_under_heuristics(tmp_path, monkeypatch):
    monkeypatch.setattr(persistent, "default_path", no_home)
    executor = Executor(ConfigSelectorChain(persistent=PersistentCache(), autotune=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EjkernelWarning)
        assert_allclose(executor(Double(), X), 2 * X)


def no_home():
    raise RuntimeError("could not determine the home directory")


# Files are data


def test_no_module_that_can_run_a_file_is_used():
    source = pathlib.Path(persistent.__file__).read_text()
    for word in ("pickle", "marshal", "eval(", "exec(", "import_module", "__import__", "shelve"):
        assert word not in source


TYPES = """
import json, pathlib, sys, warnings
from ejkernel.ops.config.persistent import PersistentCache

warnings.simplefilter("ignore")
cache = PersistentCache(sys.argv[1])
cache.put("key", {"block": 1})
(file,) = pathlib.Path(sys.argv[1]).rglob("*.json")
found = []
for name in json.loads(sys.argv[2]):
    content = json.loads(file.read_text()) if file.exists() else content
    file.write_text(json.dumps({**content, "config_type": name}))
    before = set(sys.modules)
    got = cache.get("key")
    assert got in (None, {"block": 1}), got
    found += sorted(set(sys.modules) - before)
print(json.dumps(found))
"""


def test_a_type_named_in_a_file_imports_nothing(tmp_path):
    (tmp_path / "intruder.py").write_text("raise SystemExit('imported')")
    names = [
        "intruder:Config",
        "tests.reliability.test_persistent_cache:Config",
        "this:s",
        "turtle:Turtle",
        "os:system",
        "subprocess:Popen",
        "builtins:eval",
        "builtins:dict",
        "numpy:f2py.Config",  # an attribute that numpy imports when it is asked for
        "numpy:testing.Config",
        "nothing",
        ":",
        "",
        ":" * 50,
        "a:b.c.d.e",
    ]
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    assert json.loads(python(TYPES, tmp_path / "cache", json.dumps(names), **environment)) == []


# When the disk is not touched

UNTOUCHED = """
import os, sys
import ejkernel, ejkernel.modules, ejkernel.ops
assert not os.path.exists(sys.argv[1]), "import"
import jax
q, k, v = (jax.random.normal(key, (1, 8, 1, 4)) for key in jax.random.split(jax.random.key(0), 3))
ejkernel.modules.flash_attention(q, k, v).block_until_ready()
assert not os.path.exists(sys.argv[1]), "call"
print("fine")
"""


def test_import_and_calls_under_heuristics_create_nothing(tmp_path):
    place = tmp_path / "none" / "cache"
    environment = {
        "EJKERNEL_CACHE_DIR": str(place),
        "EJKERNEL_AUTOTUNE_POLICY": "heuristics",
        "HOME": str(tmp_path / "home"),
    }
    assert python(UNTOUCHED, place, **environment) == "fine\n"
    assert list(tmp_path.iterdir()) == []


def test_heuristics_and_overrides_are_never_written(cache):
    executor = Executor(ConfigSelectorChain(persistent=cache, autotune=False))
    assert_allclose(executor(Double(), X), 2 * X)
    assert_allclose(tuning(cache)(Double(), X, cfg=Config(2)), 2 * X)
    assert not cache.path.exists()
