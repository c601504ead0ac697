"""The `ejkernel` command, in this process and as a user starts it."""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import re
import stat
import subprocess
import sys

import jax
import pytest

from ejkernel import __version__, _cli_call, _device, _settings, cli
from ejkernel.errors import EjkernelWarning
from ejkernel.kernels import kernel_registry
from ejkernel.ops import PersistentCache
from ejkernel.ops.config.cache import Stored

ROOT = pathlib.Path(__file__).parents[1]
CALL = ("explain", "flash_attention", "--shape", "2,64,4,16")


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """A cache folder that is not there yet."""
    path = tmp_path / "configs"
    with _settings.override(cache_dir=str(path)):
        yield path


@pytest.fixture
def run(capsys):
    def run(*argv):
        code = cli.main(argv)
        done = capsys.readouterr()
        return code, done.out, done.err

    return run


@pytest.fixture
def refused(run):
    """Runs a command that must fail with one line."""

    def check(*argv):
        code, out, err = run(*argv)
        assert code == 2
        assert out == ""
        assert err.startswith("ejkernel: error: ")
        assert err.count("\n") == 1
        return err

    return check


CONFIG = {"block_q": 32, "block_k": 32, "block_b": 1, "block_h": 1}


def put(folder, *keys, op="flash_attention", config=CONFIG):
    for key in keys:
        stored = Stored("xla/any", 1, config, {"xla/any {}": 1.25})
        PersistentCache(folder).put(key, stored, op=op, device="cpu|here")


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# doctor and list


def test_doctor_tells_versions_devices_platforms_and_the_cache(run, folder):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert __version__ in rows["ejkernel"]
    assert {"python", "jax", "jaxlib", "triton", "libtpu"} <= set(rows)
    assert "yes" in rows["xla"]
    assert "flash_attention" in rows["xla"]
    assert str(folder) in rows["folder"]
    assert rows["exists"].endswith("no")
    assert rows["writable"].endswith("yes")
    assert rows["records"].endswith("0")
    assert not folder.exists()


def test_doctor_counts_records_and_bad_files(run, folder):
    put(folder, "a", "b")
    bad = next(folder.rglob("a.json"))
    bad.write_text("{")
    code, out, err = run("doctor")
    assert code == 0
    assert err.startswith("ejkernel: warning: ejkernel cache: ")
    assert err.count("\n") == 1
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if len(line.split()) == 2)
    assert rows["records"] == "1"
    assert rows["bad"] == str(bad.with_suffix(".bad"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_doctor_sees_a_folder_that_cannot_be_written(run, folder):
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    _, out, _ = run("doctor")
    assert "no: configurations stay in memory" in out


def test_doctor_sees_a_file_in_place_of_the_folder(run, folder):
    folder.write_text("")
    code, out, _ = run("doctor")
    assert code == 0
    assert "no: configurations stay in memory" in out


def test_doctor_without_a_device(run, monkeypatch):
    def none(platform=None):
        raise RuntimeError("Unable to initialize backend 'x'\nfor a reason")

    monkeypatch.setattr("jax.devices", none)
    code, out, _ = run("doctor")
    assert code == 1
    assert "JAX finds no device: Unable" in out
    assert "folder" in out


def test_explain_without_a_device(refused, monkeypatch):
    def none(platform=None):
        raise RuntimeError("Unable to initialize backend 'x'\nfor a reason")

    monkeypatch.setattr("jax.devices", none)
    assert "no device" in refused(*CALL)


def test_a_platform_without_a_device_is_named(refused, monkeypatch):
    """With JAX_PLATFORMS=cuda and no CUDA, JAX stops with an assertion that has no text."""

    def none(platform=None):
        raise AssertionError

    monkeypatch.setattr("jax.devices", none)
    with jax_platforms("cuda"):
        told = refused(*CALL)
        with pytest.raises(RuntimeError, match="'cuda'"):
            _device.default_device()
    assert "JAX finds no device: none of the platforms 'cuda' has one" in told
    assert "set it to cpu" in told


@contextlib.contextmanager
def jax_platforms(value):
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", value)
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)


# Streams that are closed, which Python shows as None


@pytest.mark.parametrize(
    "argv", [("cache", "path"), ("cache", "clear", "--yes"), ("list", "flash_attention")]
)
def test_a_closed_stdout_changes_no_result(monkeypatch, capsys, argv):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(argv) == 0
    assert capsys.readouterr().err == ""


def test_an_export_to_a_closed_stdout_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(("cache", "export", "-")) == 2
    assert "standard output is closed; name a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "way_out"), [(("cache", "clear"), "--yes"), (("cache", "import", "-"), "name a file")]
)
def test_a_closed_stdin_is_an_error_of_one_line(refused, monkeypatch, argv, way_out):
    monkeypatch.setattr(sys, "stdin", None)
    assert way_out in refused(*argv)


def test_errors_and_warnings_without_a_stderr(monkeypatch, folder):
    folder.mkdir()
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(("no such command",)) == 2
    assert cli.main(("cache", "show")) == 0


def test_list_has_every_entry(run):
    code, out, _ = run("list")
    assert code == 0
    assert len(out.splitlines()) == 1 + len(kernel_registry.list())
    assert re.search(r"flash_attention +xla/any", out)


def test_list_of_one_op_tells_what_is_missing(run):
    code, out, _ = run("list", "flash_attention")
    assert code == 0
    assert "\nattention " not in out
    assert "not here" in out
    assert "cudnn" in out


# explain


def test_explain(run):
    options = ("--dtype", "bfloat16", "--set", "causal=true", "--set", "sliding_window=(16, 0)")
    code, out, err = run(*CALL, *options, "--platform", "xla")
    assert (code, err) == (0, "")
    assert "query bfloat16[2, 64, 4, 16]" in out
    assert "forward: xla/any" in out
    assert "platform xla" in out
    assert "sliding_window=[16, 0]" in out


def test_explain_named_shapes_and_dtypes(run):
    shapes = ("query=2,8,4,16", "key=2,16,2,16", "value=2,16,2,8", "attention_mask=2,1,8,16")
    ids = ("q_segment_ids=2,8", "kv_segment_ids=2,16:int16")
    argv = [part for text in (*shapes, *ids) for part in ("--shape", text)]
    code, out, _ = run("explain", "flash_attention", *argv, "--dtype", "float16", "--json")
    made = json.loads(out)
    assert code == 0
    assert made["arrays"]["value"] == "float16[2, 16, 2, 8]"
    assert made["arrays"]["attention_mask"] == "bool[2, 1, 8, 16]"
    assert made["arrays"]["q_segment_ids"] == "int32[2, 8]"
    assert made["forward"]["entry"] == made["backward"]["entry"] == "xla/any"


def test_explain_what_nothing_can_run(run):
    code, out, _ = run(*CALL, "--platform", "cudnn")
    assert code == 1
    assert "nothing can run this call" in out


def test_warnings_are_one_line(run):
    code, _, err = run(*CALL, "--set", "dropout_prob=0.5")
    assert code == 0
    assert err.startswith("ejkernel: warning: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("none", None),
        ("256", 256),
        ("0.5", 0.5),
        ("16,0", (16, 0)),
        ("(16, -1)", (16, -1)),
        ("word", "word"),
        ("import os", "import os"),
    ],
)
def test_values_of_options(text, value):
    assert _cli_call.value(text) == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "COMMAND"),
        (("nope",), "invalid choice"),
        (("list", "nope"), "no op 'nope'"),
        (("list", "a", "b"), "unrecognized"),
        (("explain",), "OP"),
        (("explain", "nope", "--shape", "1,2"), "no op 'nope'"),
        (("explain", "flash_attention"), "query"),
        (("explain", "flash_attention", "--shape"), "expected one argument"),
        (("explain", "flash_attention", "--shape", "query=2,x"), "sizes such as"),
        (("explain", "flash_attention", "--shape", "query="), "sizes such as"),
        (("explain", "flash_attention", "--shape", "2,-3,4,5"), "sizes such as"),
        (("explain", "flash_attention", "--shape", "=2,3"), "NAME=VALUE"),
        (("explain", "flash_attention", "--shape", "other=2,3"), "no array 'other'"),
        (("explain", "flash_attention", "--shape", "query=2,3"), "missing"),
        (("explain", "flash_attention", "--shape", "2,3"), "4 axes"),
        ((*CALL, "--shape", "query=2,64,4,16"), "given twice"),
        ((*CALL, "--shape", "bias=2,64,4"), "4 axes"),
        ((*CALL, "--shape", "bias=1,1,1,1:floaty"), "no dtype"),
        ((*CALL, "--dtype", "floaty"), "no dtype"),
        ((*CALL, "--dtype", "int32"), "query"),
        ((*CALL, "--dtype", "float64"), "jax_enable_x64"),
        ((*CALL, "--set", "causal"), "NAME=VALUE"),
        ((*CALL, "--set", "nope=3"), "nope"),
        ((*CALL, "--set", "query=3"), "given twice"),
        ((*CALL, "--set", "causal=true", "--set", "causal=true"), "given twice"),
        ((*CALL, "--set", "causal=17"), "causal"),
        ((*CALL, "--set", "sliding_window=-5"), "sliding_window"),
        ((*CALL, "--platform", "nope"), "platform"),
        (("cache",), "ACTION"),
        (("cache", "nope"), "invalid choice"),
        (("cache", "export"), "FILE"),
        (("cache", "import", "/nope/nope.json"), "No such file"),
        (("cache", "export", "/nope/nope.json"), "No such file"),
    ],
)
def test_bad_input_is_one_line(refused, argv, words):
    assert words in refused(*argv)


def test_a_bad_setting_is_one_line(refused, monkeypatch):
    def bad():
        raise _settings.SettingsError("EJKERNEL_DEBUG='x' is not allowed: it must be 0 or 1.")

    monkeypatch.setattr(_settings, "current", bad)
    assert "EJKERNEL_DEBUG" in refused("cache", "path")


@pytest.mark.parametrize("command", ["path", "clear --yes"])
def test_a_folder_of_nobody_is_one_line(refused, command):
    with _settings.override(cache_dir="~nosuchuser/x"):
        assert "EJKERNEL_CACHE_DIR='~nosuchuser/x'" in refused("cache", *command.split())


@pytest.mark.parametrize("argv", [("--help",), ("--version",), ("explain", "--help")])
def test_help_and_version(run, argv):
    code, out, err = run(*argv)
    assert (code, err) == (0, "")
    assert "ejkernel" in out


# cache


def test_path(run, folder):
    assert run("cache", "path") == (0, f"{folder}\n", "")


def test_show(run, folder):
    assert run("cache", "show") == (0, "no records\n", "")
    put(folder, "a", "b")
    code, out, _ = run("cache", "show")
    assert code == 0
    assert out.count("flash_attention  cpu|here  xla/any") == 2
    assert "1.25" in out


def test_export_and_import_give_the_same_files(run, folder, tmp_path):
    put(folder, "a", "b")
    before, target = files(folder), tmp_path / "out.json"
    assert run("cache", "export", str(target))[:2] == (0, f"exported 2 records to {target}\n")
    assert run("cache", "export", "-")[1] == target.read_text()
    assert run("cache", "clear", "--yes")[0] == 0
    assert files(folder) == {}
    assert run("cache", "import", str(target))[1] == "imported 2 records, 2 of them new\n"
    assert {name: json.loads(data) for name, data in files(folder).items()} == {
        name: json.loads(data) for name, data in before.items()
    }
    assert run("cache", "import", str(target))[1] == "imported 2 records, 0 of them new\n"


def test_import_from_the_standard_input(run, folder, monkeypatch):
    put(folder, "a")
    text = run("cache", "export", "-")[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run("cache", "import", "-")[1] == "imported 1 records, 0 of them new\n"


def exported(run, folder):
    put(folder, "a", "b")
    document = json.loads(run("cache", "export", "-")[1])
    assert run("cache", "clear", "--yes")[0] == 0
    return document


def change(**fields):
    def apply(document):
        document["records"][1].update(fields)

    return apply


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: d.update(owner="other"), "is not of ejkernel"),
        (lambda d: d.update(schema=99), "schema"),
        (lambda d: d.update(more=1), "more"),
        (lambda d: d.pop("records"), "records"),
        (lambda d: d["records"].append(3), "records[2]"),
        (lambda d: d["records"].append(d["records"][0]), "record 2 is there twice"),
        (lambda d: d["records"][1].pop("config"), "config"),
        (change(owner="other"), "record 1 is not of ejkernel"),
        (change(schema=99), "record 1"),
        (change(unknown=3), "unknown"),
        (change(version="1"), "version"),
        (change(key="../../../escape"), "record 1 has a key"),
        (change(key=""), "record 1 has a key"),
        (change(times_ms={"x": -1.0}), "record 1 has times"),
        (change(config={"block_q": -3}), "record 1 has a config"),
        (change(config={"block_q": "eval"}), "record 1 has a config"),
        (change(config=None), "record 1 has a config"),
        (change(op="attention"), "record 1 has a config"),
    ],
)
def test_one_bad_record_refuses_the_file(refused, run, folder, tmp_path, damage, words):
    document, source = exported(run, folder), tmp_path / "in.json"
    damage(document)
    source.write_text(json.dumps(document))
    assert words in refused("cache", "import", str(source))
    assert files(folder) == {}
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("configs", "in.json")] == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"owner": NaN}'])
def test_files_that_are_no_document(refused, folder, tmp_path, data):
    source = tmp_path / "in.json"
    source.write_bytes(data)
    assert "nothing imported" in refused("cache", "import", str(source))
    assert not folder.exists()


def test_records_of_kernels_that_are_not_here_are_kept(run, folder, tmp_path):
    document, source = exported(run, folder), tmp_path / "in.json"
    document["records"][0].update(op="elsewhere", config=7)
    document["records"][1].update(implementation="triton/gpu@9", config={"any": 1})
    source.write_text(json.dumps(document))
    assert run("cache", "import", str(source))[0] == 0
    assert len(files(folder)) == 2


def test_an_import_that_fails_half_way_is_taken_back(refused, run, folder, tmp_path, monkeypatch):
    document, source = exported(run, folder), tmp_path / "in.json"
    source.write_text(json.dumps(document))
    put(folder, "a", config=CONFIG | {"block_q": 64})
    before, replace, calls = files(folder), os.replace, []

    def second_fails(old, new):
        if ".import-" in str(old) and pathlib.Path(old).suffix == ".json":
            calls.append(new)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
        replace(old, new)

    monkeypatch.setattr(os, "replace", second_fails)
    assert "No space left" in refused("cache", "import", str(source))
    assert len(calls) == 2
    assert files(folder) == before


def test_an_import_that_cannot_be_written(run, folder, tmp_path, monkeypatch):
    document, source = exported(run, folder), tmp_path / "in.json"
    source.write_text(json.dumps(document))

    def full(self, file, data):
        self._tell("cannot write")

    monkeypatch.setattr(PersistentCache, "_write", full)
    code, _, err = run("cache", "import", str(source))
    assert code == 2
    assert "nothing imported" in err
    assert files(folder) == {}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_clear_needs_a_yes(refused, folder, monkeypatch):
    put(folder, "a")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert "--yes" in refused("cache", "clear")
    assert len(files(folder)) == 1


@pytest.mark.parametrize(
    ("answer", "code", "left"),
    [("y\n", 0, 0), ("YES\n", 0, 0), ("n\n", 1, 1), ("\n", 1, 1), ("", 1, 1)],
)
def test_clear_asks_on_a_terminal(run, folder, monkeypatch, answer, code, left):
    put(folder, "a")
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    done, _, err = run("cache", "clear")
    assert "remove 1 records" in err
    assert (done, len(files(folder))) == (code, left)


def test_clear_says_what_it_could_not_remove(refused, folder, monkeypatch):
    put(folder, "a")
    monkeypatch.setattr(PersistentCache, "clear", lambda self: 0)
    assert "1 files" in refused("cache", "clear", "--yes")


# Tables


def on_a_terminal(monkeypatch, capsys, *argv):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.main(argv) == 0
    return capsys.readouterr().out


def test_tables_are_plain_without_rich(monkeypatch, capsys):
    find = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "rich" else find(name, *more)
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    monkeypatch.setitem(sys.modules, "rich", None)
    out = on_a_terminal(monkeypatch, capsys, "list")
    assert out.startswith("op ")
    assert out.isascii()


def test_tables_are_drawn_with_rich(monkeypatch, capsys, folder):
    pytest.importorskip("rich")
    put(folder, "a", config=[1])  # brackets are no markup
    out = on_a_terminal(monkeypatch, capsys, "cache", "show")
    assert "─" in out
    assert "[1]" in out


def test_plain_tables_in_a_pipe(run):
    assert run("list")[1].isascii()


# How it ends


def test_an_interrupt_is_quiet(run, monkeypatch):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_list", interrupt)
    assert run("list") == (130, "", "")


def test_a_broken_pipe_is_quiet(run, monkeypatch):
    def broken(arguments):
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_list", broken)
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)
    assert run("list") == (141, "", "")


def test_other_warnings_stay_what_they_are(run):
    import warnings

    with pytest.warns(EjkernelWarning):
        warnings.warn("after", EjkernelWarning, stacklevel=1)
    assert run("cache", "path")[0] == 0


def start(*argv, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("environment", {})
    command = [sys.executable, "-m", "ejkernel", *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def test_as_a_process(tmp_path):
    where = {"EJKERNEL_CACHE_DIR": str(tmp_path)}
    done = start(*CALL, "--json", environment=where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["forward"]["entry"] == "xla/any"
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_of_a_process(tmp_path):
    command = f"{sys.executable} -m ejkernel --help | true; echo ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")


@pytest.mark.parametrize(
    "command",
    [
        *("doctor", "list", "explain", "aot", "bench", "tune", "cache"),
        *(f"cache {action}" for action in ("show", "path", "clear", "export", "import")),
    ],
)
def test_every_help_has_an_example(run, command):
    code, out, err = run(*command.split(), "--help")
    assert (code, err) == (0, "")
    examples = " ".join(out.rpartition("example")[2].split())
    assert f"ejkernel {command}" in examples
