"""Near calls: whose configuration a new call takes without a wait, and which axes may differ."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import modules
from ejkernel.errors import EjkernelWarning
from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    policy_override,
)
from ejkernel.ops.config import table
from ejkernel.ops.config.cache import Stored
from ejkernel.ops.core.sharding import Layout
from ejkernel.ops.execution import executor as executors


@dataclasses.dataclass(frozen=True)
class Config:
    factor: int = 1


class Scale(Kernel):
    """A kernel that names the axes of its array: tokens and features."""

    def __init__(self, name="scale", versions=None):
        super().__init__(name=name)
        self.versions = versions

    def run(self, x, *, cfg, option=0):
        return x * 2

    def heuristic_cfg(self, inv):
        return Config(1)

    def config_space(self, inv):
        return [Config(1), Config(2)]

    def layout(self, args):
        axes = {"0": ("t", "d")}
        return Layout(axes, (("t", "d"),), frozenset(), {}, lambda args, offsets: args, "")

    def implementations(self, inv):
        made = super().implementations(inv)
        return made if self.versions is None else [self._versioned(i) for i in made]

    def _versioned(self, implementation):
        return dataclasses.replace(implementation, version=self.versions)


class Unnamed(Scale):
    def layout(self, args):
        return None


def invocation(shape=(48, 16), dtype=jnp.float32, kernel=None, **options):
    made = Executor(ConfigSelectorChain(autotune=False))
    return made.invocation(kernel or Scale(), jnp.ones(shape, dtype), **options)


def store(cache, factor=7, stored=None, **call):
    """A row as a tuning of another call leaves it."""
    inv = invocation(**call)
    made = stored or Stored("run/any", 1, Config(factor), {"run/any": 0.5})
    where = {"op": inv.kernel.name, "device": inv.device_fingerprint}
    cache.put(inv.key, made, call=inv.document, **where)
    return inv


def chain_of(cache, mode="autotune", **kwargs):
    policy = AutotunePolicy(mode=mode, **kwargs)
    return ConfigSelectorChain(persistent=cache, policy=policy)


def answer(cache, inv=None, mode="heuristics"):
    choice = chain_of(cache, mode).choose(inv or invocation())
    return choice.source, choice.cfg.factor


@pytest.fixture
def cache(tmp_path):
    return PersistentCache(tmp_path)


@pytest.fixture
def shipped(monkeypatch):
    """Rows in the place of those that ship for this device."""
    content = []
    monkeypatch.setattr(table, "rows", lambda device, op: tuple(content))

    def ship(factor, **call):
        document = json.loads(json.dumps(invocation(**call).document))
        content.append(table.Row(document, "run/any", 1, {"factor": factor}))

    return ship


NEAR = [(48, 16), (96, 16), (192, 16), (12, 16), (33, 16)]
FAR = [(193, 16), (11, 16), (48, 32), (48, 8), (96, 32)]


@pytest.mark.parametrize("shape", NEAR)
@pytest.mark.parametrize("where", ["cache", "table"])
@pytest.mark.parametrize("mode", ["autotune", "heuristics"])
def test_a_near_row_counts_as_measured(cache, shipped, shape, where, mode):
    store(cache, 7, shape=shape) if where == "cache" else shipped(7, shape=shape)
    chain = chain_of(cache, mode)
    choice = chain.choose(invocation())
    assert (choice.source, choice.cfg.factor) == ("persistent", 7)
    assert chain._get_tuner().measured == 0
    near = f"row of the {'user' if where == 'cache' else 'table shipped for'}"
    if shape != (48, 16):
        assert near in choice.row
        assert f"0=float32[{shape[0]}, 16]" in choice.row
        assert len(chain.cache) == 0  # nothing was measured of this call


@pytest.mark.parametrize("shape", FAR)
@pytest.mark.parametrize("where", ["cache", "table"])
def test_a_farther_row_does_not_spare_the_tuning(cache, shipped, shape, where):
    store(cache, 2, shape=shape) if where == "cache" else shipped(2, shape=shape)
    assert answer(cache, mode="autotune")[0] == "autotune"


@pytest.mark.parametrize(
    "call", [{"dtype": jnp.bfloat16}, {"option": 1}, {"shape": (48, 16, 1)}, {"kernel": "other"}]
)
def test_rows_of_other_calls_are_never_near(cache, call):
    if "kernel" in call:
        call = {"kernel": Scale("other")}
    elif call.get("shape"):
        call = {**call, "kernel": Unnamed()}
    store(cache, 7, **call)
    assert answer(cache) == ("heuristics", 1)


def test_rows_of_the_other_direction_are_never_near(cache):
    inv = dataclasses.replace(invocation((96, 16)), direction="backward")
    where = {"op": "scale", "device": inv.device_fingerprint}
    cache.put(inv.key, Stored("run/any", 1, Config(7)), call=inv.document, **where)
    assert answer(cache) == ("heuristics", 1)


def test_always_tunes_unless_the_row_is_of_this_very_call(cache, shipped):
    store(cache, 7, shape=(96, 16))
    shipped(8, shape=(64, 16))
    assert answer(cache, mode="always")[0] == "autotune"
    assert answer(cache, mode="always")[0] == "persistent"  # what was tuned just now
    other = PersistentCache(cache.path / "other")
    shipped(9)
    assert answer(other, mode="always") == ("persistent", 9)


def test_always_takes_a_near_row_where_it_cannot_measure(cache):
    store(cache, 7, shape=(96, 16))
    chain = chain_of(cache, "always", allow_in_trace=False)
    choice = chain.choose(invocation())
    assert (choice.source, choice.cfg.factor) == ("persistent", 7)
    assert any("not while tracing" in said for said in choice.trail)


def test_the_nearest_row_wins_and_the_users_goes_first(cache, shipped):
    store(cache, 5, shape=(150, 16))
    shipped(6, shape=(60, 16))
    assert answer(cache) == ("persistent", 6)
    store(cache, 8, shape=(60, 16))
    assert answer(cache) == ("persistent", 8)
    assert {answer(PersistentCache(cache.path)) for _ in range(2)} == {("persistent", 8)}


@pytest.mark.parametrize(
    "stored",
    [
        Stored("run/any", 2, Config(7)),  # another version of the kernel
        Stored("gone/any", 1, Config(7)),
        Stored("run/any", 1, Config(7), rivals={"other": 1}),  # chosen among others
        Stored("run/any", 1, {"size": 7}),  # no config of this kernel
    ],
)
def test_a_near_row_that_no_longer_holds_hides_no_other(cache, stored):
    store(cache, stored=stored, shape=(50, 16))
    assert answer(cache) == ("heuristics", 1)
    store(cache, 6, shape=(90, 16))
    assert answer(cache) == ("persistent", 6)


def test_a_near_tuning_that_was_cut_short_spares_a_wait_too(cache):
    store(cache, stored=Stored("run/any", 1, Config(7), complete=False), shape=(96, 16))
    assert answer(cache, mode="autotune") == ("persistent", 7)


def test_an_unfinished_tuning_of_this_call_goes_before_near_rows(cache):
    store(cache, 6, shape=(96, 16))
    cut = Stored("run/any", 1, Config(7), complete=False, rivals={"run/any": 1})
    store(cache, stored=cut)
    assert answer(cache) == ("persistent", 7)
    assert answer(cache, mode="autotune")[0] == "autotune"


def test_a_new_shape_is_tuned_once_and_then_answers_for_its_neighbours(cache):
    chain = chain_of(cache)
    lengths = {n: chain.choose(invocation((n, 16))).source for n in (8, 16, 24, 32, 64, 128)}
    tuned = [n for n, source in lengths.items() if source == "autotune"]
    assert tuned == [8, 64]
    later = chain_of(PersistentCache(cache.path))
    assert {later.choose(invocation((n, 16))).source for n in (10, 100)} == {"persistent"}
    assert later._get_tuner().measured == 0


def test_a_kernel_that_names_no_axes_has_only_exact_rows(cache):
    store(cache, 7, shape=(64, 16), kernel=Unnamed())
    assert answer(cache, invocation((48, 16), kernel=Unnamed())) == ("heuristics", 1)
    assert answer(cache, invocation((64, 16), kernel=Unnamed())) == ("persistent", 7)


@pytest.mark.timeout(20)  # to read a pipe is to wait for ever
def test_bad_files_do_not_hide_near_rows(cache):
    inv = store(cache, 7, shape=(96, 16))
    (file,) = cache.path.rglob("*.json")
    document = json.loads(file.read_text())
    folder = file.parent
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    (folder / "text.json").write_text("{")
    for number, call in enumerate(({"arrays": 3}, {**inv.document, "op": "another"})):
        (folder / f"bad{number}.json").write_text(
            json.dumps(document | {"key": f"bad{number}", "call": call})
        )
    with pytest.warns(EjkernelWarning) as told:
        assert answer(PersistentCache(cache.path)) == ("persistent", 7)
    assert len(told) == 1
    assert {p.stem for p in folder.glob("*.bad")} == {"text", "bad0", "bad1"}
    assert (folder / "pipe.json").exists()


def test_a_folder_is_read_once_a_process(cache, monkeypatch):
    store(cache, 7, shape=(96, 16))
    later, loaded = PersistentCache(cache.path), []
    load = PersistentCache._load_all
    monkeypatch.setattr(
        PersistentCache, "_load_all", lambda *where: loaded.append(where) or load(*where)
    )
    for length in (50, 60, 70):
        assert answer(later, invocation((length, 16))) == ("persistent", 7)
    assert len(loaded) == 1


def test_a_rejected_and_a_cleared_row_say_nothing(cache):
    store(cache, 7, shape=(96, 16))
    (row,) = cache.rows(op="scale", device=invocation().device_fingerprint)
    with pytest.warns(EjkernelWarning, match="does not hold"):
        cache.reject(row, "it does not hold")
    assert answer(cache) == ("heuristics", 1)
    store(cache, 7, shape=(96, 16))
    cache.clear()
    assert answer(cache) == ("heuristics", 1)


# Operations: the letters of their axes say what may differ


def attention(b=2, t=32, s=64, h=4, g=2, d=16, e=16, **options):
    arrays = {"query": (b, t, h, d), "key": (b, s, g, d), "value": (b, s, g, e)}
    return "flash_attention", arrays, options


def paged(b=8, h=4, g=2, d=16, p=32, w=16, m=4):
    arrays = {"query": (b, h, d), "key_cache": (p, g, w, d), "value_cache": (p, g, w, d)}
    return "page_attention", arrays | {"context_lens": (b,), "block_tables": (b, m)}, {}


def ragged(n=64, i=4, m=4, h=4, g=2, p=32, w=16):
    arrays = {"queries": (n, h, 16), "kv_pages": (p, w, 2 * g, 16), "context_lens": (i,)}
    arrays |= {"block_tables": (i, m), "query_start_loc": (i + 1,)}
    return "ragged_page_attention", arrays, {"num_seqs": i}


def grouped(m=64, k=32, groups=4, n=48):
    arrays = {"lhs": (m, k), "rhs": (groups, k, n), "group_sizes": (groups,)}
    return "grouped_matmul", arrays, {}


def biased(b=2, h=4, bias=(1, 1)):
    op, arrays, options = attention(b=b, h=h)
    return op, {**arrays, "bias": (*bias, 32, 64)}, options


INTEGERS = {"context_lens", "block_tables", "query_start_loc", "group_sizes"}
KERNELS = {
    "flash_attention": modules.FlashAttention,
    "page_attention": modules.PageAttention,
    "ragged_page_attention": modules.RaggedPageAttention,
    "grouped_matmul": modules.GroupedMatmul,
}


def document(made):
    op, shapes, options = made
    arrays = {
        name: jnp.zeros(shape, jnp.int32 if name in INTEGERS else jnp.float32)
        for name, shape in shapes.items()
    }
    inv = Executor().invocation(KERNELS[op](), **arrays, **options)
    return table._call(inv.document), inv.kernel.layout(inv.call).arrays


@pytest.mark.parametrize(
    ("make", "change", "near"),
    [
        (attention, {"b": 8}, True),
        (attention, {"b": 9}, False),
        (attention, {"t": 128, "s": 256}, True),
        (attention, {"t": 130}, False),
        (attention, {"h": 8}, False),
        (attention, {"h": 8, "g": 4}, False),
        (attention, {"d": 32}, False),
        (attention, {"e": 32}, False),
        (attention, {"causal": True}, False),
        (attention, {"return_lse": True}, False),
        (paged, {"b": 24}, True),
        (paged, {"p": 128, "m": 16}, True),
        (paged, {"w": 32}, False),
        (ragged, {"n": 128}, True),
        (ragged, {"i": 16}, True),
        (ragged, {"i": 40}, False),
        (ragged, {"g": 1}, False),
        (grouped, {"m": 256}, True),
        (grouped, {"k": 64}, False),
        (grouped, {"n": 96}, False),
        (grouped, {"groups": 8}, False),
        (biased, {"b": 4}, True),
        (biased, {"bias": (2, 1)}, False),  # another bias for every row of the batch
        (biased, {"bias": (1, 4)}, False),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_what_may_differ_in_a_near_call(make, change, near):
    (one, axes), (other, _) = document(make()), document(make(**change))
    assert table._is_near(one, other, axes) is near
    assert table._is_near(other, one, axes) is near


def test_batch_and_lengths_may_all_be_four_times_as_large(monkeypatch):
    """How far each size is apart counts, not their sum over the arrays of a call."""

    def call(batch, length):
        arrays = dict.fromkeys(("query", "key", "value"), jnp.zeros((batch, length, 4, 16)))
        return Executor().invocation(modules.FlashAttention(), **arrays)

    inv = call(4, 256)
    guess = ConfigSelectorChain(autotune=False).choose(inv)
    config = dataclasses.asdict(guess.cfg)
    said = (guess.implementation.name, guess.implementation.version, config)
    row = table.Row(json.loads(json.dumps(call(1, 1024).document)), *said)
    monkeypatch.setattr(table, "rows", lambda device, op: (row,))
    assert ConfigSelectorChain(autotune=False).choose(inv).source == "persistent"
    farther = ConfigSelectorChain(autotune=False).choose(call(8, 256))
    assert farther.source == "heuristics"


def test_explain_names_the_row(cache, monkeypatch):
    executor = Executor(chain_of(cache))
    monkeypatch.setattr(executors, "default_executor", lambda: executor)
    shape = lambda t: [jax.ShapeDtypeStruct((2, t, 4, 16), jnp.float32)] * 3
    executor.chooser.policy = AutotunePolicy(mode="heuristics")
    inv = executor.invocation(modules.FlashAttention(), *(jnp.zeros(x.shape) for x in shape(1024)))
    guess = executor.chooser.choose(inv)
    stored = Stored(guess.implementation.name, guess.implementation.version, guess.cfg)
    where = {"op": inv.kernel.name, "device": inv.device_fingerprint}
    cache.put(inv.key, stored, call=inv.document, **where)
    with policy_override(mode="autotune"):
        made = ejkernel.explain("flash_attention", *shape(2048)).forward
        assert (made.source, made.would_measure) == ("persistent", False)
        assert made.row.startswith("near row of the user's cache: query=float32[2, 1024, 4, 16]")
        text = str(ejkernel.explain("flash_attention", *shape(2048)))
        assert f"  taken from a {made.row}\n" in text
        assert ejkernel.explain("flash_attention", *shape(1024)).forward.row == ""
    with policy_override(mode="always"):
        made = ejkernel.explain("flash_attention", *shape(2048)).forward
    assert made.would_measure
    assert any("a call would measure" in said for said in made.trail)
