"""Tuning as a job: its calls, a worker that dies, and tables."""

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import msgspec
import pytest

from ejkernel import _device, _settings, cli
from ejkernel.aot import _table
from ejkernel.bench import _precompile, _tune_job, _tune_worker
from ejkernel.kernels import _op_kernel, _oracle, kernel_registry
from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.ops import (
    PersistentCache,
    clear_invocations,
    default_key_builder_with_sharding,
    registry,
    save_invocations,
)
from ejkernel.ops.config import table
from ejkernel.ops.config.cache import Stored
from ejkernel.ops.execution.executor import default_executor
from ejkernel.ops.utils import fingerprint

NAMES = ("query", "key", "value")
SMALL = {
    "arrays": {name: [[1, 256, 2, 16], "float32"] for name in NAMES},
    "options": {"causal": "True"},
}
REQUEST = {
    "ops": ["flash_attention"],
    "call": SMALL,
    "documents": None,
    "only": "",
    "shapes": "auto",
    "dtype": None,
    "platforms": ["auto"],
    "directions": ["forward", "backward"],
    "budget_s": 60.0,
    "total_s": 0.0,
    "again": False,
    "workers": 0,
    "imports": [],
    "folder": None,
    "cache_dir": None,
    "skip": [],
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "configs"
    with _settings.override(cache_dir=str(path)):
        yield path


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (1, 256, 2, 16)) for key in keys]


# Which calls


def test_a_call_given_by_shapes_has_the_key_of_the_call_itself():
    forward, backward = _tune_worker.invocations(REQUEST)
    key = default_key_builder_with_sharding(FlashAttention(), arrays(), {"causal": True})
    assert (forward.direction, forward.key) == ("forward", key)
    wanted = frozenset({"query", "key", "value"})
    more = {"causal": True, "direction": "backward", "wanted": wanted}
    inv = default_executor().invocation(FlashAttention(), *arrays(), **more)
    assert backward.key == inv.key


def test_benchmark_shapes_of_ops_are_calls_without_data():
    request = REQUEST | {"call": None, "ops": ["flash_attention", "page_attention"]}
    found = _tune_worker.invocations(request | {"only": "page"})
    assert {inv.kernel.name for inv in found} == {"page_attention"}
    assert {inv.direction for inv in found} == {"forward"}  # it has no gradient
    found = _tune_worker.invocations(request | {"platforms": ["auto", "xla"], "only": "S256"})
    assert [(inv.direction, inv.platform) for inv in found] == [
        ("forward", "auto"),
        ("backward", "auto"),
        ("forward", "xla"),
        ("backward", "xla"),
    ]
    shapes = (x for inv in found for x in inv.call.arrays().values())
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in shapes)


def test_recorded_calls_travel_in_a_file(tmp_path, folder):
    file = tmp_path / "calls.json"
    clear_invocations()
    with _settings.override(ops_record=True):
        jax.eval_shape(lambda *xs: flash_attention(*xs, causal=True), *arrays())
    recorded = registry.get_invocations()
    assert save_invocations(file) == len(recorded) == 1
    clear_invocations()
    (found,) = _tune_worker.invocations(REQUEST | {"documents": registry.load_calls(file)})
    assert found.key == recorded[0].key
    for text in ("{", "[]", '{"owner": "x", "schema": 1, "calls": []}', '{"calls": 3}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="holds no recorded calls"):
            registry.load_calls(file)


def test_stamped_programs_tell_their_calls(tmp_path, folder, capsys):
    with _settings.override(ops_stamp="json"):
        lowered = jax.jit(lambda *xs: flash_attention(*xs, causal=True)).lower(*arrays())
    file = tmp_path / "program.txt"
    file.write_text(lowered.as_text(debug_info=True))
    arguments = cli._parser().parse_args(["tune", "--from-hlo", str(file)])
    from ejkernel import _cli_tune

    request = _cli_tune._request(arguments)
    (found,) = _tune_worker.invocations(request)
    assert found.key == _tune_worker.invocations(REQUEST)[0].key


def test_an_unknown_op_in_a_file_is_refused():
    with pytest.raises(ValueError, match="there is no op 'nope' here"):
        _tune_worker.restored({"op": "nope"})


# The worker


def test_the_worker_tunes_and_a_second_one_knows(folder):
    said = []
    request = REQUEST | {"folder": str(folder), "directions": ["forward"]}
    _tune_worker.run(request, said.append)
    assert [next(iter(message)) for message in said if "progress" not in message] == [
        *("device", "start", "result", "done")
    ]
    (result,) = (m["result"] for m in said if "result" in m)
    assert (result["state"], result["entry"]) == ("tuned", "xla/any")
    assert result["best_ms"] > 0
    assert result["measured"] >= 2
    assert any(m["progress"][0] == m["progress"][1] for m in said if "progress" in m)
    (record,) = PersistentCache(folder).records()
    assert record.complete
    said.clear()
    _tune_worker.run(request, said.append)
    (again,) = (m["result"] for m in said if "result" in m)
    assert (again["state"], again["best_ms"]) == ("known already", result["best_ms"])
    said.clear()
    _tune_worker.run(request | {"again": True, "total_s": 1e-9}, said.append)
    (late,) = (m["result"] for m in said if "result" in m)
    assert late["state"] == "not started: the time for all calls is used up"


def test_an_op_without_choices_says_so(folder):
    said = []
    request = REQUEST | {"ops": ["mean_pooling"], "call": None, "folder": str(folder)}
    _tune_worker.run(request | {"directions": ["forward"]}, said.append)
    (result,) = (m["result"] for m in said if "result" in m)
    assert result["state"] == "not tuned: fewer than two candidates"


# The job: workers here are short scripts


SCRIPT = """
import json, os, pathlib, signal, sys
request = json.load(sys.stdin)
say = lambda message: print(json.dumps(message), flush=True)
say({"device": "cpu|here", "calls": ["a", "b", "c"]})
count = pathlib.Path(request["count"])
for call in ("a", "b", "c"):
    if call in request["skip"]:
        continue
    say({"start": call})
    if call == "b":
        tried = int(count.read_text() or 0) if count.exists() else 0
        count.write_text(str(tried + 1))
        if tried < request["deaths"]:
            os.kill(os.getpid(), signal.SIGKILL)
    say({"progress": [1, 2, 0.5]})
    say({"result": {"call": call, "state": "tuned", "best_ms": 1.0}})
say({"done": True})
"""


class Told(_tune_job.Progress):
    def __init__(self):
        self.deaths, self.seen = [], []

    def died(self, call, reason):
        self.deaths.append((call, reason))

    def candidates(self, done, count, least_ms):
        self.seen.append((done, count, least_ms))


@pytest.mark.parametrize("deaths", [0, 2, 9])
def test_another_worker_goes_on_where_one_died(tmp_path, monkeypatch, deaths):
    monkeypatch.setattr(_tune_job, "_START", SCRIPT)
    request = {"deaths": deaths, "count": str(tmp_path / "count")}
    told = Told()
    results = _tune_job.Job(request, 60.0, told).run()
    assert [r["call"] for r in results] == ["a", "b", "c"]
    assert results[0]["state"] == results[2]["state"] == "tuned"
    expected = (
        "tuned" if deaths < 3 else f"given up: its process ended with signal {signal.SIGKILL}"
    )
    assert results[1]["state"] == expected
    assert len(told.deaths) == min(deaths, 3)
    assert told.seen[0] == (1, 2, 0.5)


HANGING = """
import json, sys, time
request = json.load(sys.stdin)
print(json.dumps({"device": "x", "calls": ["a"]}), flush=True)
if "a" in request["skip"]:
    print(json.dumps({"done": True}), flush=True)
else:
    print(json.dumps({"start": "a"}), flush=True)
    time.sleep(600)
"""


def test_a_worker_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(_tune_job, "_START", HANGING)
    monkeypatch.setattr(_tune_job, "_MOST_DEATHS", 1)
    (result,) = _tune_job.Job({}, 5.0, Told()).run()
    assert result["state"] == "given up: it said nothing for 5 s"


def test_a_worker_that_ends_at_a_call_that_was_given_up_ends_the_job(monkeypatch):
    dies = HANGING.replace("time.sleep(600)", "pass").replace('"a" in request["skip"]', "False")
    monkeypatch.setattr(_tune_job, "_START", dies)
    with pytest.raises(ValueError, match="ended before it began"):
        _tune_job.Job({}, 60.0, Told()).run()


def test_a_worker_that_cannot_start_is_one_error(monkeypatch):
    monkeypatch.setattr(_tune_job, "_START", "raise SystemExit('no JAX here')")
    with pytest.raises(ValueError, match=r"ended before it began: .*no JAX here"):
        _tune_job.Job({}, 60.0, Told()).run()
    error = "import json; print(json.dumps({'error': 'a bad request'}))"
    monkeypatch.setattr(_tune_job, "_START", error)
    with pytest.raises(ValueError, match="a bad request"):
        _tune_job.Job({}, 60.0, Told()).run()


# The command


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "name operations, or give one of --recorded and --from-hlo"),
        (("nope",), "There is no op 'nope'"),
        (("flash_attention", "--recorded", "x"), "give one of"),
        (("--recorded", "/nowhere"), "No such file"),
        (("--from-hlo", __file__), "holds no calls; EJKERNEL_OPS_STAMP=json writes them"),
        (("flash_attention", "--budget", "0"), "--budget must be positive"),
        (("flash_attention", "--platform", "cobol"), "--platform 'cobol' is none of auto"),
        (("flash_attention", "--target", "tpu:v5e"), "--target is for --static"),
        (("flash_attention", "--static"), "--static needs --target"),
        (("--static", "--target", "tpu:v5e"), "--static takes one operation; got 0"),
        (("flash_attention", "gla", "--shape", "1,2,3,4"), "of one operation"),
        (("flash_attention", "--set", "causal=true"), "--set needs --shape"),
        (("flash_attention", "--out", "/nowhere/x"), "--out /nowhere/x is no file"),
    ],
)
def test_bad_input_is_one_line(argv, words, capsys):
    assert cli.main(["tune", *argv]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert words in said.err


@pytest.mark.slow
def test_a_table_is_made_shared_and_installed(tmp_path, folder, capsys):
    out = tmp_path / "tuned.json"
    argv = ["tune", "flash_attention", "--shape", "1,256,2,16", "--set", "causal=true"]
    assert cli.main([*argv, "--direction", "forward", "--out", str(out)]) == 0
    assert not folder.exists()  # the cache is another place
    assert [p.name for p in tmp_path.iterdir()] == ["tuned.json"]
    assert cli.main(["cache", "import", str(out)]) == 0
    assert cli.main([*argv, "--direction", "forward", "--json"]) == 0
    said = capsys.readouterr().out
    (result,) = json.loads(said[said.index("[\n") :])
    assert result["state"] == "known already"
    # a later run adds to the table
    assert cli.main([*argv, "--direction", "backward", "--out", str(out)]) == 0
    assert len(json.loads(out.read_text())["records"]) == 2


def test_tables_that_ship_are_written_from_records(tmp_path, folder):
    inv = _tune_worker.invocations(REQUEST)[0]
    (entry,) = (e for e in kernel_registry.list("flash_attention") if e.platform == "xla")
    cache = PersistentCache(folder)
    for platform, block in (("xla", 64), ("auto", 128)):
        config = dataclasses.replace(entry.heuristic(inv.call), block_q=block)
        stored = Stored("xla/any", entry.version, config, {"a": 1.0}, rivals={"xla/any": 1})
        call = inv.document | {"platform": platform}
        where = {"op": "flash_attention", "device": "gpu|NVIDIA H200|9.0"}
        cache.put(fingerprint.key(call), stored, call=call, **where)
    records = list(cache.records())
    (file,) = _table.write_records(tmp_path, records)
    assert file == tmp_path / "nvidia_h200" / "flash_attention.json"
    rows = json.loads(file.read_text())
    assert [row["config"]["block_q"] for row in rows] == [128, 64]  # what "auto" chose first
    assert [msgspec.convert(row, table.Row).rivals for row in rows] == [{"xla/any": 1}] * 2
    assert all("device" not in row["call"] for row in rows)
    devices = json.loads((tmp_path / "devices.json").read_text())
    assert devices == [{"kind": "gpu", "model": "NVIDIA H200", "capability": "9.0"}]
    _table.write_records(tmp_path, records)  # replaces, and does not add
    assert json.loads(file.read_text()) == rows


# Oracles on a GPU


def test_oracles_are_compiled_without_tuned_products_on_a_gpu(monkeypatch):
    gpu = _device.Target("gpu", "NVIDIA H200", "9.0")
    options = _oracle.compiler_options(gpu)
    assert options == {"xla_gpu_autotune_level": 0}
    assert _oracle.compiler_options(_device.Target("cpu", "here")) is None
    # the compiler knows the name, on every backend
    assert jax.jit(lambda x: x + 1, compiler_options=options)(jnp.ones(2)).sum() == 4
    asked = []

    def solve(spec, args, wanted, options=None):
        asked.append(options)
        raise RuntimeError("far enough")

    monkeypatch.setattr(_op_kernel._oracle, "solve", solve)
    monkeypatch.setattr(_op_kernel, "_solved", {})
    inv = _tune_worker.invocations(REQUEST)[0]
    (entry,) = (e for e in kernel_registry.list("flash_attention") if e.platform == "xla")
    implementation = entry.implementation(gpu)
    for target in (gpu, _device.find()):
        object.__setattr__(inv, "target", target)
        with pytest.raises(RuntimeError, match="far enough"):
            inv.kernel.check_candidate(inv, implementation, entry.heuristic(inv.call))
    assert asked == [options, None]


@pytest.mark.slow
def test_candidates_are_compiled_before_a_gpu_is_needed(folder):
    pytest.importorskip("triton")
    small = {n: [[1, 128, 1, 64], "bfloat16"] for n in ("query", "key", "value")}
    request = REQUEST | {"call": {"arrays": small, "options": {}}, "cache_dir": str(folder)}
    request |= {"target": ["NVIDIA H200", "9.0"], "share": [0, 8]}
    assert _precompile.compile_share(request) > 0
    assert any(folder.rglob("*"))
    assert os.listdir(folder)
