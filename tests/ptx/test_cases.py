"""Generated cases of operations in the PTX emulator."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels import kernel_registry
from tools.ptx import __main__ as command
from tools.ptx import case, table

pytest.importorskip("triton")


def test_the_command_tells_what_it_found(capsys):
    assert command.main(["mean_pooling", "--forward"]) == 0
    told = capsys.readouterr().out
    assert "agrees with the oracle" in told
    assert "mean_pooling_fwd_kernel" in told
    assert "0 races, 0 faults" in told


def test_a_fault_fails_the_command(capsys, monkeypatch):
    monkeypatch.setattr(table, "find", lambda opcode: None)
    assert command.main(["mean_pooling", "plain", "--forward"]) == 1
    told = capsys.readouterr().out
    assert "fault: UnknownInstructionError: `" in told
    assert "not finite where the oracle is" in told


@pytest.mark.parametrize("arguments", [["no_such_op"], ["mean_pooling", "no_such_case"]])
def test_the_command_refuses_what_is_not_there(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", ["linear_recurrence", "page_attention", "grouped_matmul", "mean_pooling"]
)
def test_a_case_is_clean(op):
    report = case.run(op)
    assert report.clean, "\n".join(report.lines())


@pytest.mark.slow
def test_flash_attention_is_clean():
    report = case.run("flash_attention", gradients=False)
    assert report.clean, "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("size", [40, 64, 128, 192])
def test_float32_gradients_are_close_where_products_add_term_by_term(size):
    """Values of 192 and ALiBi slopes of this size were off by 1.4 times the bound on a GPU."""
    spec = kernel_registry.spec("flash_attention")
    keys = jax.random.split(jax.random.key(11), 4)
    shapes = (1, 37, 2, 160), (1, 51, 2, 160), (1, 51, 2, size)
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False))
    given = {"query": q, "key": k, "value": v, "causal": True}
    given["alibi_slopes"] = jnp.abs(jax.random.normal(keys[3], (2,)))
    args = spec.canonicalize(spec.unpack(spec.complete(given)))
    report = case.check("flash_attention", args, spec.differentiable)
    assert report.clean, "\n".join(report.lines())


def recurrence(length, size):
    """A call whose backward takes several chunks, and several blocks of each state."""
    spec = kernel_registry.spec("linear_recurrence")
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, length, 1, size), jnp.bfloat16) for key in keys)
    given = {"query": q, "key": k, "value": v, "softmax_scale": 0.125}
    given["g_gamma"] = jnp.full((1,), -0.05)
    return spec.canonicalize(spec.unpack(spec.complete(given)))


@pytest.mark.slow
@pytest.mark.parametrize("pipelined", [False, True])
def test_the_race_of_the_recurrence_is_found(pipelined, tmp_path, monkeypatch):
    """Pipelined, the copy of the next state overtakes the product with this one."""
    from ejkernel.kernels._triton.linear_recurrence import bwd, bwd_chunk

    if pipelined:
        text = pathlib.Path(bwd_chunk.__file__).read_text()
        one_stage = "tl.range(0, (sizes.E + BE - 1) // BE, num_stages=1)"
        assert one_stage in text
        path = tmp_path / "bwd_chunk_pipelined.py"
        path.write_text(text.replace(one_stage, "range(0, (sizes.E + BE - 1) // BE)"))
        found = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        monkeypatch.setattr(bwd, "bwd_chunk", module)
    wanted = ("query", "key", "value", "g_gamma")
    report = case.check("linear_recurrence", recurrence(128, 128), wanted)
    races = [race for x in report.launches for race in x.races]
    if pipelined:
        assert any("writes what a product in flight reads" in race for race in races)
        assert report.mismatch is not None
    else:
        assert report.clean, "\n".join(report.lines())
