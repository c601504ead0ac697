"""Every kernel against its op's oracle: outputs and gradients, generated from the registry."""

import collections
import os
import pathlib
import subprocess
import zlib

import jax
import pytest

from ejkernel import _settings
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import _op_kernel, _oracle, kernel_registry
from tests.backend import BACKEND
from tests.kernels import harness

ROOT = pathlib.Path(__file__).parents[2]
CORE = harness.matrix("core")
REST = [row for row in harness.matrix("full") if row not in CORE]
HALVES = [
    row for row in CORE if row[2] in ("causal_window_sinks", "cover00", harness.instead(*row[:2]))
]
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
    if BACKEND != "cpu" and _oracle.mismatch(actual, made) is not None:
        # The bound is that of naive code, which adds in another order on this device.
        made = harness.problem(op, case, dtype, here=True)
        actual = run(made)
    if _oracle.mismatch(actual, made) is not None:
        more = [harness.problem(op, case, dtype, seed) for seed in range(5)]
        actual, made = harness.pooled([(actual, made), *((run(x), x) for x in more)])
    harness.assert_close_to_oracle(actual, made)


def commit():
    """A number that changes from commit to commit."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return 0
    return zlib.crc32(found)


def quick_cases(entry, names):
    """The cases that `make test` runs of an entry; `make test-all` runs all of them.

    An interpreter is slow: everything at once on TPUs, and in Triton one of the others too, which
    changes with the commit; of `flash_attention`, whose kernels serve other ops too, also the plain
    call and what is special about attention. XLA has the first five, and nine of `flash_attention`.
    """
    slow, leading = harness.interpreted(entry), entry.op == "flash_attention"
    if entry.base is not None:  # a derived op, whose base has the cases of its own
        rich = ("cover00",) if harness.computes_first(entry) else ()
        found = [n for n in names if n in ("packed", "plain", *rich)] or names[:2]
        return set(found[:1] if slow else found)
    if slow and harness.is_schedule(entry):
        return {n for n in names if n == "cover00"}
    if slow:
        special = ("plain", "causal_window_sinks") if leading else ()
        special += (harness.instead(entry.op, entry.name),)
        fixed = [n for n in names if n in ("cover00", *special)] or names[:1]
        more = leading or entry.platform == "triton"
        others = [n for n in names if n not in fixed and more]
        return {*fixed, *others[commit() % len(others) :][:1]} if others else set(fixed)
    return set(names[: 9 if leading else 5])


def in_core():
    by_entry = collections.defaultdict(list)
    for op, entry_name, case in CORE:
        by_entry[op, entry_name].append(case)
    for (op, entry_name), names in by_entry.items():
        entry = harness.find_entry(op, entry_name)
        quick = quick_cases(entry, names)
        for case in names:
            late = [] if case in quick else [pytest.mark.slow]
            yield pytest.param(op, entry_name, case, marks=[*harness.marks(entry), *late])


@pytest.mark.parametrize(("op", "entry", "case"), list(in_core()))
def test_matches_oracle(op, entry, case, record_property):
    check(op, entry, case, "float32", "testing", record_property)


def in_plain_interpreter():
    """A case of each TPU kernel; quick, those that differ most in what they ask a program."""
    for op in kernel_registry.ops():
        for entry in kernel_registry.list(op):
            if (entry.platform, entry.backend) == ("pallas", "tpu"):
                late = [] if op in ("lightning_attention", "mean_pooling") else [pytest.mark.slow]
                case = next(name for o, e, name in CORE if (o, e) == (op, entry.name))
                yield pytest.param(op, entry.name, case, marks=[*harness.marks(entry), *late])


@pytest.mark.parametrize(("op", "entry", "case"), list(in_plain_interpreter()))
def test_matches_oracle_under_the_setting_interpret(op, entry, case, record_property):
    """Then JAX's plain interpreter runs it, which takes less than the one that watches memory."""
    with _settings.override(interpret=True):
        check(op, entry, case, "float32", "testing", record_property)


# take no case of the spec, whose arrays are small: tests/kernels/test_pallas_gpu*.py have their own
OWN_CASES = [(op, "pallas/gpu") for op in ("flash_attention", "grouped_matmul", "ring_attention")]


def interpreted_entries():
    entries = (entry for op in kernel_registry.ops() for entry in kernel_registry.list(op))
    found = [(e.op, e.name) for e in entries if harness.interpreted(e) and e.base is None]
    return [row for row in found if row not in OWN_CASES]


@pytest.mark.parametrize(("op", "entry"), interpreted_entries())
def test_a_call_with_everything_is_not_all_that_is_tried_and_refused(op, entry):
    """A kernel that refuses `cover00` needs another case in `make test`: `harness.instead`."""
    found, case = harness.find_entry(op, entry), harness.instead(op, entry) or "cover00"
    assert found.why_not(harness.problem(op, case, "float32").args) is None


def in_halves():
    """Halves of each kind; in `make test` float16 on Triton alone, which reduces it otherwise."""
    for row in HALVES:
        entry = harness.find_entry(*row[:2])
        marks, slow = harness.marks(entry), [pytest.mark.slow]
        rich = row[2] in ("cover00", harness.instead(*row[:2]))
        own = entry.base is None and not (harness.is_schedule(entry) and harness.interpreted(entry))
        quick = not harness.interpreted(entry) or row[0] == "flash_attention"
        quick |= row[1].startswith("triton")
        late = [] if rich and own and quick else slow
        yield pytest.param(*row, "bfloat16", marks=[*marks, *late])
        own &= row[0] == "flash_attention"
        late = [] if row[1].startswith("triton") and not rich and own else slow
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
    # what tests switch off, where this jaxlib has it
    flag = "xla_cpu_use_fusion_emitters"
    options = {flag: True} if flag in os.environ.get("XLA_FLAGS", "") else None
    harness.assert_close_to_oracle(
        harness.run_entry(found, made, cfg, compiler_options=options), made
    )


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
