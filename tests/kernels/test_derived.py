"""Derived ops: what serves the base serves them, with its key, its rows and its configurations."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import _device, aot, cli
from ejkernel.aot import _calls, _programs
from ejkernel.errors import EjkernelWarning, UnsupportedError
from ejkernel.kernels import kernel_registry
from ejkernel.modules import (
    GLA,
    LightningAttention,
    LinearRecurrence,
    RaggedPageAttention,
    RaggedPageAttentionV3,
    gla,
    lightning_attention,
    lightning_decay,
    linear_recurrence,
    ragged_page_attention_v3,
)
from ejkernel.ops import (
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    autotune_recorded,
    clear_invocations,
    find_labels_in_lowered,
    record_invocation,
    vmap_with_config,
)
from ejkernel.ops.config.cache import Stored
from ejkernel.ops.execution.tuning import Result, Tuner
from tests.kernels import harness

RNG = np.random.default_rng(4)
Q, K, V = (RNG.standard_normal((1, 20, 2, 8)).astype(np.float32) for _ in range(3))
G = -np.logaddexp(0.0, RNG.standard_normal(Q.shape)).astype(np.float32)
DERIVED = {
    "gla": "linear_recurrence",
    "lightning_attention": "linear_recurrence",
    "ragged_page_attention_v3": "ragged_page_attention",
}


def step() -> dict[str, Any]:
    """A call of `ragged_page_attention_v3` by name."""
    case = harness.find_case("ragged_page_attention_v3", "plain")
    values = case.values(jnp.float32, jax.random.key(0))
    return {n: x for n, x in values.items() if isinstance(x, jax.Array)}


def as_ragged(values):
    """The arguments of `ragged_page_attention` that the call above becomes."""
    made = {n: x for n, x in values.items() if n not in ("keys", "values")}
    ends = made.pop("distribution")
    return made | {"context_lens": made.pop("kv_lens"), "num_seqs": ends[2:]}


def pair(name):
    """A call of a derived op, the same of its base, (kernel, arguments), and arrays by name."""
    values = {"query": Q, "key": K, "value": V}
    if name == "gla":
        ours, base = {"g": G, "reverse": True}, {"gk": G, "reverse": True}
        renamed = {"g": "gk", "query": "query"}
        return (GLA, values | ours), (LinearRecurrence, values | base), renamed
    if name == "lightning_attention":
        ours, base = {"layer_idx": 1, "num_layers": 4}, {"g_gamma": lightning_decay(2, 1, 4)}
        same = {"g_gamma": "g_gamma"}
        return (LightningAttention, values | ours), (LinearRecurrence, values | base), same
    return (RaggedPageAttentionV3, step()), (RaggedPageAttention, as_ragged(step())), {}


@pytest.fixture(autouse=True)
def restored():
    """Takes out again what a test registers, and forgets recorded calls."""
    before = kernel_registry.list()
    clear_invocations()
    yield
    clear_invocations()
    for entry in kernel_registry.list():
        if entry not in before and entry.base is None:
            kernel_registry.unregister(entry)
    assert kernel_registry.list() == before


def register_copy(op, calls, **options):
    """Registers XLA's kernel of an op as cuda/cpu, which notes the calls that it serves."""
    xla = harness.find_entry(op, "xla/any")

    def forward(args, cfg):
        calls.append(("forward", type(args).__name__))
        return xla.fn(args, cfg)

    def backward(args, cfg, *rest):
        calls.append(("backward", type(args).__name__))
        return xla.backward(args, cfg, *rest)

    both = {"backward": backward, "config": xla.config} if xla.backward else {"config": xla.config}
    kernel_registry.register(op, "cuda", "cpu", **both | options)(forward)


def names_here(op):
    """The entries that may run on a CPU; those of other devices are not what these tests count."""
    return [e.name for e in kernel_registry.list(op) if e.backend in ("any", "cpu")]


# Keys


@pytest.mark.parametrize("op", DERIVED)
def test_a_call_has_the_key_of_the_call_that_it_becomes(op):
    (kernel, call), (base, same), names = pair(op)
    executor = Executor()
    mine, theirs = executor.invocation(kernel(), **call), executor.invocation(base(), **same)
    assert mine.key == theirs.key
    assert mine.op == theirs.op == DERIVED[op]
    for name, other in names.items():
        there = {"direction": "backward"}
        mine = executor.invocation(kernel(), **call, wanted=frozenset({name}), **there)
        theirs = executor.invocation(base(), **same, wanted=frozenset({other}), **there)
        assert mine.key == theirs.key
        assert mine.document["wanted"] == [other]


def test_options_are_in_the_key():
    executor = Executor()
    key = lambda **more: executor.invocation(GLA(), Q, K, V, G, **more).key
    keys = [key(), key(reverse=True), key(softmax_scale=0.3), key(platform="xla")]
    assert len({*keys, executor.invocation(GLA(), Q, K, V).key}) == 5


@pytest.mark.parametrize("op", DERIVED)
def test_documents_of_aot_tables_are_those_of_calls(op):
    (kernel, call), _, _ = pair(op)
    described = _calls.decode(op, _calls.encode(call))
    found = _programs.Programs(described, aot.parse("tpu:v5e")).document("forward")
    document = Executor().invocation(kernel(), **call).document
    assert found == {n: x for n, x in document.items() if n != "device"}


# Rows


class FirstCandidate(Tuner):
    """Measures nothing: the second candidate wins. Notes what it was asked to measure."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def tune(self, inv, implementations, budget_s, **more):
        self.asked.append((inv.kernel.name, inv.direction, sorted(inv.wanted)))
        made, config = self.candidates(inv, implementations)[1]
        rivals = {i.name: i.version for i in implementations}
        return Result(Stored(made.name, made.version, config, {"x": 1.0}, rivals=rivals), {})


def chain(folder, tuner=None):
    return ConfigSelectorChain(persistent=PersistentCache(folder), autotune=False, tuner=tuner)


@pytest.mark.parametrize("op", DERIVED)
@pytest.mark.parametrize("first", ["derived", "base"])
def test_a_row_tuned_through_one_serves_the_other(op, first, tmp_path):
    both, tuner = list(pair(op)[:2]), FirstCandidate()
    (kernel, call), (other, same) = both if first == "derived" else reversed(both)
    tuned = chain(tmp_path, tuner).tune(Executor().invocation(kernel(), **call), budget_s=1)
    assert tuner.asked == [(DERIVED[op], "forward", [])]
    (file,) = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["op"] == DERIVED[op]
    choice = Executor(chain(tmp_path)).choose(other(), **same)
    assert (choice.source, choice.row) == ("persistent", "")
    assert choice.cfg == tuned.cfg
    assert Executor(chain(tmp_path)).choose(kernel(), **call).cfg == tuned.cfg


def test_the_row_of_a_near_call_of_the_base_serves_a_derived_one(tmp_path):
    made = chain(tmp_path, FirstCandidate())
    longer = [jnp.concatenate([x, x], 1) for x in (Q, K, V)]
    gates = jnp.concatenate([G, G], 1)
    made.tune(Executor().invocation(LinearRecurrence(), *longer, gk=gates), budget_s=1)
    choice = Executor(chain(tmp_path)).choose(GLA(), Q, K, V, G)
    assert choice.source == "persistent"
    assert "near row" in choice.row
    # a gate of another kind is another call
    assert Executor(chain(tmp_path)).choose(GLA(), Q, K, V).source == "heuristics"


def test_recorded_calls_are_tuned_as_calls_of_the_base(tmp_path):
    tuner = FirstCandidate()
    made, there = chain(tmp_path, tuner), {"direction": "backward"}
    for name in ("g", "query"):
        inv = Executor().invocation(GLA(), Q, K, V, G, wanted=frozenset({name}), **there)
        record_invocation(inv.kernel, inv)
    found = autotune_recorded(chain=made, budget_s=1)
    assert tuner.asked == [
        ("linear_recurrence", "backward", ["gk"]),
        ("linear_recurrence", "backward", ["query"]),
    ]
    assert {choice.source for choice in found.values()} == {"autotune"}
    wanted = {"wanted": frozenset({"gk"}), **there}
    choice = Executor(made).choose(LinearRecurrence(), Q, K, V, gk=G, **wanted)
    assert choice.source == "memory"


@pytest.mark.usefixtures("without_jax_cache")
def test_stamps_name_the_op_that_was_called_and_restore_the_base(tmp_path):
    with ejkernel._settings.override(ops_stamp="json"):
        lowered = jax.jit(lambda *xs: Executor()(GLA(), *xs)).lower(Q, K, V, G)
    (label,) = (found for found in find_labels_in_lowered(lowered) if found.kind == "json")
    assert label.name == "gla"
    assert "ejkernel.gla.xla/any" in lowered.as_text(debug_info=True)
    tuner = FirstCandidate()
    assert list(autotune_recorded(lowered, chain=chain(tmp_path, tuner), budget_s=1)) == [label.key]
    assert tuner.asked == [("linear_recurrence", "forward", [])]


def test_an_eager_call_is_measured_on_its_own_arguments():
    inv = Executor().invocation(GLA(), Q, K, V, G).keyed
    np.testing.assert_array_equal(inv.kernel.example_inputs(inv).gk, G)


# Kernels


def test_a_kernel_of_the_base_serves_what_lowers_to_it():
    """Registered once for `linear_recurrence`, it runs `gla` and `lightning_attention`."""
    run = {
        "gla": lambda q, **more: Executor()(GLA(), q, K, V, G, **more),
        "lightning_attention": lambda q, **more: Executor()(
            LightningAttention(), q, K, V, layer_idx=1, num_layers=4, **more
        ),
    }
    for call in run.values():
        with pytest.raises(UnsupportedError, match=r"nor one of `linear_recurrence`"):
            call(Q, platform="cuda")
    expected = {op: jax.value_and_grad(lambda q, f=f: f(q).sum())(Q) for op, f in run.items()}
    calls = []
    register_copy("linear_recurrence", calls)
    for op, call in run.items():
        assert names_here(op) == ["cuda/cpu", "xla/any"]
        found = jax.value_and_grad(lambda q, f=call: f(q, platform="cuda").sum())(Q)
        jax.tree.map(np.testing.assert_array_equal, found, expected[op])
        assert {*calls} == {(way, "LinearRecurrenceArgs") for way in ("forward", "backward")}
        calls.clear()


def test_gradients_have_the_names_of_the_derived_op():
    loss = lambda run, **gates: (run(Q, K, V, **gates) ** 2).sum()
    mine = jax.grad(lambda g: loss(gla, g=g))(G)
    theirs = jax.grad(lambda g: loss(linear_recurrence, gk=g))(G)
    np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    spec, entry = kernel_registry.spec("gla"), harness.find_entry("gla", "xla/any")
    args = spec.canonicalize(spec.complete({"query": Q, "key": K, "value": V, "g": G}))
    outputs, residuals = entry.fn(args, entry.heuristic(args))
    wanted = frozenset({"g", "key"})
    cfg = entry.heuristic(args, "backward")
    assert entry.backward(args, cfg, outputs, residuals, outputs, wanted).keys() == wanted


def test_a_new_kernel_of_the_base_is_seen_by_calls_that_ran_before():
    before, calls = gla(Q, K, V, G), []
    register_copy("linear_recurrence", calls, priority=3)
    np.testing.assert_array_equal(gla(Q, K, V, G), before)
    assert calls


def test_refusals_are_in_the_words_of_the_derived_op():
    register_copy("linear_recurrence", [], honours={"reverse"})
    spec = kernel_registry.spec("gla")
    values = {"query": Q, "key": K, "value": V}
    args = spec.canonicalize(spec.complete(values | {"g": G}))
    assert kernel_registry.why_not("gla", args)["cuda/cpu"] == "does not honour ['g']"
    plain = spec.canonicalize(spec.complete(values | {"reverse": True}))
    assert kernel_registry.why_not("gla", plain)["cuda/cpu"] is None
    # the decays of a layer are an argument of the base alone
    spec = kernel_registry.spec("lightning_attention")
    args = spec.canonicalize(spec.complete(values | {"layer_idx": 0, "num_layers": 2}))
    assert kernel_registry.why_not("lightning_attention", args)["cuda/cpu"] == (
        "does not honour ['g_gamma'] (as a call of `linear_recurrence`)"
    )
    found = {op: kernel_registry.list(op)[0] for op in ("gla", "lightning_attention")}
    assert found["gla"].honours == {"reverse"}
    assert found["lightning_attention"].honours == {"reverse", "layer_idx", "num_layers"}


def test_what_a_kernel_requires_is_asked_of_the_base_and_its_device():
    register_copy(
        "linear_recurrence",
        [],
        requires=lambda args: "no gates" if args.gk is not None else None,
        backward_requires=lambda args: "not this way" if args.reverse else None,
        device_requires=lambda args, target: None if args.gk is None else f"not on {target.kind}",
    )
    entry = kernel_registry.list("gla")[0]
    spec = kernel_registry.spec("gla")
    make = lambda **more: spec.canonicalize(
        spec.complete({"query": Q, "key": K, "value": V} | more)
    )
    assert entry.why_not(make(g=G)) == "no gates (as a call of `linear_recurrence`)"
    assert entry.why_not(make(g=G), _device.find()) == "not on cpu"
    assert entry.why_not(make(reverse=True)) is None
    assert entry.why_not(make(reverse=True), direction="backward") == "not this way"
    assert entry.why_not(make(), _device.find()) is None


def own_gla(query, key, value, g=None):
    return jnp.full_like(query, 7.0)


def test_a_kernel_of_the_derived_op_itself_competes_under_a_key_of_its_own():
    shared = Executor().invocation(GLA(), Q, K, V, G).key
    kernel_registry.register("gla", "cuda", "cpu", priority=2)(own_gla)
    assert names_here("gla") == ["cuda/cpu@2", "xla/any"]
    np.testing.assert_array_equal(gla(Q, K, V, G), 7.0)
    choice = Executor().choose(GLA(), Q, K, V, G, reverse=True)
    assert choice.implementation.name == "xla/any"
    assert choice.refused["cuda/cpu@2"] == "does not honour ['reverse']"
    mine = Executor().invocation(GLA(), Q, K, V, G)
    assert (mine.op, mine.keyed) == ("gla", mine)
    assert mine.key != shared
    # among kernels of the base alone, the choice is still the base's
    named = Executor().invocation(GLA(), Q, K, V, G, platform="xla")
    assert named.op == "linear_recurrence"
    assert Executor().invocation(LinearRecurrence(), Q, K, V, gk=G).key == shared


def test_a_kernel_may_take_the_place_of_one_of_the_base():
    with pytest.raises(ValueError, match=r"`gla`: xla/any is registered already"):
        kernel_registry.register("gla", "xla", "any")(own_gla)
    kernel_registry.register("gla", "xla", "any", replace=True)(own_gla)
    entry = harness.find_entry("gla", "xla/any")
    assert entry.base is None
    np.testing.assert_array_equal(gla(Q, K, V, G), 7.0)
    assert (linear_recurrence(Q, K, V, gk=G) != 7.0).all()
    kernel_registry.unregister(entry)
    entry = harness.find_entry("gla", "xla/any")
    with pytest.raises(ValueError, match=r"kernel of `linear_recurrence`.*unregister that"):
        kernel_registry.unregister(entry)


def test_one_entry_is_a_function():
    function = kernel_registry.get("gla", "xla")
    assert (function.entry.op, function.entry.base.op) == ("gla", "linear_recurrence")
    assert function.entry is kernel_registry.get("gla").entry
    np.testing.assert_array_equal(function(Q, K, V, G), gla(Q, K, V, G, platform="xla"))


# The step before the base


def test_the_write_of_a_step_runs_on_the_platform_of_its_attention():
    values, calls = step(), []
    run = jax.jit(lambda call: Executor()(RaggedPageAttentionV3(), **call, platform="cuda"))
    expected = jax.jit(lambda call: ragged_page_attention_v3(**call))(values)
    register_copy("ragged_page_attention", calls)
    # no such kernel writes: XLA's does
    jax.tree.map(np.testing.assert_array_equal, run(values), expected)
    assert calls == [("forward", "RaggedPageAttentionArgs")]
    calls.clear()
    register_copy("update_kv_pages", calls)
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, run(values), expected)
    assert calls == [("forward", "UpdateKVPagesArgs"), ("forward", "RaggedPageAttentionArgs")]


def test_a_step_without_a_kernel_that_writes_is_refused(monkeypatch):
    values = step()
    for entry in list(kernel_registry.list("update_kv_pages")):
        never = dataclasses.replace(entry, requires=lambda args: "never writes")
        monkeypatch.setitem(kernel_registry._entries, "update_kv_pages", [never])
    reason = "no kernel of `update_kv_pages`, which runs first: xla/any: never writes"
    with pytest.raises(UnsupportedError, match=reason):
        Executor()(RaggedPageAttentionV3(), **values)


def test_a_step_is_measured_without_its_write():
    """A copy of the whole cache would hide the differences between configurations."""
    inv = Executor().invocation(RaggedPageAttentionV3(), **step()).keyed
    assert inv.kernel.name == "ragged_page_attention"
    found = inv.kernel.implementations(inv)
    implementation = next(i for i in found if i.name == "xla/any")
    args = inv.kernel.example_inputs(inv)
    outputs, _ = implementation.forward(args, implementation.heuristic(args, "forward"))
    assert len(outputs) == 1


# What is told


def test_explanations_name_the_base():
    made = ejkernel.explain("gla", Q, K, V, G)
    assert str(made).splitlines()[1] == "gla lowers to linear_recurrence"
    assert json.loads(made.to_json())["lowers_to"] == "linear_recurrence"
    assert made.forward.key == ejkernel.explain(linear_recurrence, Q, K, V, gk=G).forward.key
    assert ejkernel.explain("linear_recurrence", Q, K, V).lowers_to == ""
    step_text = str(ejkernel.explain(ragged_page_attention_v3, **step()))
    assert "lowers to update_kv_pages, then ragged_page_attention" in step_text


def test_the_command_line_names_the_base(capsys):
    assert cli.main(["list", "gla"]) == 0
    out = capsys.readouterr().out
    assert "gla lowers to linear_recurrence\n" in out
    assert "which serves it" in out
    assert cli.main(["explain", "gla", "--shape", "1,16,2,8"]) == 0
    assert "gla lowers to linear_recurrence" in capsys.readouterr().out
    assert cli.main(["list", "linear_recurrence"]) == 0
    assert "lowers" not in capsys.readouterr().out


@pytest.mark.parametrize("op", ["gla", "lightning_attention"])
def test_names_for_remat_are_the_derived_op_s_own(op):
    more = {"layer_idx": 1, "num_layers": 4} if op == "lightning_attention" else {}
    run = {"gla": gla, "lightning_attention": lightning_attention}[op]
    text = str(jax.make_jaxpr(jax.grad(lambda q: run(q, K, V, **more).sum()))(Q))
    assert f"name={op}.out" in text
    assert "linear_recurrence.out" not in text


def test_vmap_with_config():
    stacked = jnp.stack([Q, 2 * Q])
    found = vmap_with_config(GLA(), in_axes=(0, None, None, None))(stacked, K, V, G)
    for actual, query in zip(found, stacked, strict=True):
        np.testing.assert_allclose(actual, gla(query, K, V, G), rtol=1e-5, atol=1e-6)


def test_a_cache_with_more_slots_than_32_bits_number_is_refused():
    values = step()
    huge = jax.ShapeDtypeStruct((2**20, 2**11, *values["kv_pages"].shape[2:]), jnp.float32)
    with pytest.raises(ValueError, match=r"`kv_pages` must have fewer than 2\*\*31 slots"):
        jax.eval_shape(lambda call: ragged_page_attention_v3(**call), values | {"kv_pages": huge})


def test_a_step_outside_a_jit_warns():
    values = step()
    before = np.array(values["kv_pages"])
    with pytest.warns(EjkernelWarning, match="`ragged_page_attention_v3`: .* copied"):
        ragged_page_attention_v3(**values)
    np.testing.assert_array_equal(values["kv_pages"], before)
