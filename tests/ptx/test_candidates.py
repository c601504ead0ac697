"""Every configuration of the tuner in the PTX emulator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.callib import triton_call
from ejkernel.kernels import kernel_registry
from ejkernel.ops.core.kernel import FORWARD
from tools.ptx import __main__ as command
from tools.ptx import assembler, calls, candidates, case, hook, launch

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def double_kernel(x, out, BLOCK: tl.constexpr):
    o_n = tl.arange(0, BLOCK)
    tl.store(out + o_n, 2 * tl.load(x + o_n))


def doubled(x):
    outputs = {"out": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    return triton_call(
        double_kernel, inputs={"x": x}, outputs=outputs, grid=(1,), BLOCK=x.shape[0]
    )["out"]


@pytest.fixture
def few_configs(monkeypatch):
    """One configuration of each direction."""
    every = candidates._configs
    monkeypatch.setattr(candidates, "_configs", lambda *given: every(*given)[:1])


def test_the_command_runs_configurations(capsys, few_configs):
    assert command.main(["mean_pooling", "chunks", "--candidates", "--forward"]) == 0
    told = capsys.readouterr().out
    assert "chunks forward num_warps=4 num_stages=2" in told
    assert "1 configurations, 0 not clean" in told


def test_a_configuration_that_does_not_compile_is_not_clean(capsys, few_configs, monkeypatch):
    def fail(*_):
        raise ValueError("no such tile")

    monkeypatch.setattr(hook._triton_compile, "compile_kernel", fail)
    assert command.main(["mean_pooling", "chunks", "--candidates", "--forward"]) == 1
    told = capsys.readouterr().out
    assert "no such tile" in told
    assert "1 configurations, 1 not clean" in told


@pytest.mark.parametrize("arguments", [["ring_attention"], ["mean_pooling", "no_such_call"]])
def test_the_command_refuses_what_is_not_there(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([*arguments, "--candidates"])
    assert stop.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_every_op_with_a_kernel_of_its_own_has_calls():
    """Ring attention and derived ops run the kernels of others."""
    found = set()
    for op in kernel_registry.ops():
        own = kernel_registry.spec(op).lowers_to is None and op != "ring_attention"
        entries = [e for e in kernel_registry.list(op) if e.name == "triton/gpu"]
        found |= {op} if own and entries else set()
    assert found == set(calls.CALLS)


def test_a_kernel_without_configurations_runs_as_it_is(capsys):
    assert command.main(["update_latent_pages", "odd", "--candidates"]) == 0
    assert "odd forward without configurations: clean" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("op", [*calls.CALLS])
def test_the_first_call_is_served_with_several_configurations(op):
    entry, args = case.entry_of(op), calls.make(op, candidates.names(op)[0], "bfloat16")
    assert entry.why_not(args) is None
    many = entry.config is not None
    assert (len(candidates._configs(op, entry, args, FORWARD)) > 1) == many


def test_the_recurrence_has_the_states_of_many_rows():
    args = calls.make("linear_recurrence", "decay d128", "bfloat16")
    entry = case.entry_of("linear_recurrence")
    few, many = (
        entry.config.candidates(x, FORWARD, case.H200)[0]
        for x in (args, calls.of_tuner("linear_recurrence", args))
    )
    assert (few.state_d, many.state_d) == (32, 64)


def test_equal_launches_run_once(monkeypatch):
    seen, x = {}, jnp.arange(64.0)
    with hook.emulated(seen) as first:
        np.testing.assert_array_equal(doubled(x), 2 * x)
    monkeypatch.setattr(launch, "run", None)
    with hook.emulated(seen) as again:
        np.testing.assert_array_equal(doubled(x), 2 * x)
    assert [dataclasses.asdict(o) for o in again] == [dataclasses.asdict(o) for o in first]
    with hook.emulated(seen), pytest.raises(Exception, match="not callable"):
        jax.block_until_ready(doubled(x + 1))  # other arrays


def test_registers_are_those_of_the_assembler():
    with hook.emulated() as outcomes:
        doubled(jnp.arange(128.0))
    found = assembler.assemble(outcomes[0].code)
    assert 8 <= found.registers <= 32
    assert str(found).endswith("0 bytes spilled")


def test_a_note_of_the_assembler_is_passed_on(tmp_path, monkeypatch):
    script = tmp_path / "ptxas"
    script.write_text(
        "#!/bin/sh\n"
        "echo 'ptxas info : (C7515) Potential Performance Loss: wgmma.mma_async instructions "
        "are serialized due to ...' >&2\n"
        "echo ' 8 bytes stack frame, 64 bytes spill stores, 72 bytes spill loads' >&2\n"
        "echo 'ptxas info : Used 255 registers, used 1 barriers' >&2\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(assembler, "_ptxas", lambda: script)
    found = assembler.assemble(".target sm_90a // of this test")
    assert found == assembler.Assembled(255, 64, "C7515")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("flash_attention", "d128 causal"),
        ("linear_recurrence", "decay d256"),
        ("linear_recurrence", "gates d128"),
        ("grouped_matmul", "many rows"),
    ],
)
def test_all_configurations_are_clean(op, name):
    told = [r for r in candidates.run(op, name) if not r.clean]
    assert not told, "\n".join(line for r in told for line in r.lines())


@pytest.mark.slow
def test_products_of_latent_attention_overlap():
    """They would not if the loop over keys could be left out."""
    report = next(candidates.run("mla_page_attention", "128 heads"))
    assert report.clean, "\n".join(report.lines())
    codes = {x.kernel: x.code for x in report.launches if "wgmma" in x.code}
    assert "mla_decode_kernel" in codes
    assert [assembler.assemble(code).serialised for code in codes.values()] == [None] * len(codes)
