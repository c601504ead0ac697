"""Every kernel against its op's oracle: outputs and gradients, generated from the registry."""

import collections

import jax
import pytest

from ejkernel.errors import UnsupportedError
from ejkernel.kernels import _op_kernel, _oracle, kernel_registry
from tests.kernels import harness

CORE = harness.matrix("core")
REST = [row for row in harness.matrix("full") if row not in CORE]
HALVES = [row for row in CORE if row[2] in ("causal_window_sinks", "cover00")]
ON_XLA = [row for row in CORE if row[1] == "xla/any"]
ON_XLA_HALVES = [row for row in ON_XLA if row in HALVES]


def check(op, entry_name, case, dtype, kind, record_property):
    entry, made = harness.find_entry(op, entry_name), harness.problem(op, case, dtype)
    if entry.why_not(made.args) is not None:
        refuse = _op_kernel.keyword_function(kernel_registry.spec(op), entry)
        with pytest.raises(UnsupportedError):  # what is declared unsupported must refuse
            refuse(**kernel_registry.spec(op).publish(made.args))
        record_property("refused", True)  # no number was checked
        return
    cfg = harness.configs(entry, made.args, kind)
    run = lambda made: harness.run_entry(entry, made, cfg, compiler_options=harness.QUICK)
    actual = run(made)
    if _oracle.mismatch(actual, made) is not None:
        more = [harness.problem(op, case, dtype, seed) for seed in range(5)]
        actual, made = harness.pooled([(actual, made), *((run(x), x) for x in more)])
    harness.assert_close_to_oracle(actual, made)


def in_core(most=5, most_on_tpu=9):
    """Core cases; where one XLA kernel serves an op, and on TPUs, `make test-all` has the last."""
    seen = collections.Counter()
    for row in CORE:
        entry = harness.find_entry(*row[:2])
        alone = len(kernel_registry.list(entry.op)) == 1
        limit = most if alone else most_on_tpu if entry.backend == "tpu" else len(CORE)
        seen[row[:2]] += 1
        late = [pytest.mark.slow] if seen[row[:2]] > limit else []
        yield pytest.param(*row, marks=[*harness.marks(entry), *late])


@pytest.mark.parametrize(("op", "entry", "case"), list(in_core()))
def test_matches_oracle(op, entry, case, record_property):
    check(op, entry, case, "float32", "testing", record_property)


def in_halves():
    """Halves of each kind; float16 is quick only where bfloat16 is not exact."""
    for row in HALVES:
        marks = harness.marks(harness.find_entry(*row[:2]))
        late = [] if row[1].startswith("triton") else [pytest.mark.slow]
        yield pytest.param(*row, "bfloat16", marks=marks)
        yield pytest.param(*row, "float16", marks=[*marks, *late])


@pytest.mark.parametrize(("op", "entry", "case", "dtype"), list(in_halves()))
def test_matches_oracle_in_half_precision(op, entry, case, dtype, record_property):
    check(op, entry, case, dtype, "testing", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["testing", "heuristic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("op", "entry", "case"), harness.marked(CORE + REST))
def test_matches_oracle_everywhere(op, entry, case, dtype, kind, record_property):
    check(op, entry, case, dtype, kind, record_property)


@pytest.mark.parametrize(("op", "entry", "case"), harness.marked(ON_XLA[:1] + ON_XLA_HALVES[:2]))
def test_matches_oracle_as_users_compile_it(op, entry, case):
    """The heuristic config at XLA's default optimization."""
    made = harness.problem(op, case, "float32")
    found = harness.find_entry(op, entry)
    cfg = harness.configs(found, made.args, "heuristic")
    harness.assert_close_to_oracle(harness.run_entry(found, made, cfg), made)


@pytest.mark.parametrize(("op", "entry", "case"), ON_XLA_HALVES[:1])
def test_same_inputs_give_the_same_bits(op, entry, case):
    made, found = harness.problem(op, case, "float32"), harness.find_entry(op, entry)
    cfg = harness.configs(found, made.args, "testing")
    first, second = (
        harness.run_entry(found, made, cfg, compiler_options=harness.QUICK) for _ in range(2)
    )
    same = jax.tree.map(
        lambda a, b: (a == b).all(),
        (first.outputs | first.gradients),
        (second.outputs | second.gradients),
    )
    assert all(same.values())
