"""Launches of whole GPU programs: counted in XLA's text, and of programs compiled without a GPU."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel import aot
from ejkernel.aot import _reports, _targets, _xla_gpu

H200 = _targets.parse("cuda:sm_90")
WHY_NOT = _xla_gpu.why_not(H200, "programs are")
needs_plugin = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

PROGRAM = """
HloModule jit_f

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %add.1 = f32[4]{0} add(%p, %p)
}

%body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], f32[4]{0}) parameter(0)
  %gte.1 = f32[4]{0} get-tuple-element(%arg), index=1
  %step.1 = (bf16[2,3]{1,0}, f32[4]{0}, /*index=5*/f32[1]{0}) custom-call(%gte.1), other="k"
  %step.2 = f32[4]{0} fusion(%gte.1), kind=kLoop, calls=%fused
  ROOT %tuple.1 = (s32[], f32[4]{0}) tuple(%gte.1, %step.2)
}

%condition (arg.2: (s32[], f32[4])) -> pred[] {
  ROOT %less = pred[] fusion(%arg.2), kind=kLoop, calls=%fused
}

%one (p.3: f32[4]) -> f32[4] {
  ROOT %copy.3 = f32[4]{0} copy(%p.3)
}

%two (p.4: f32[4]) -> f32[4] {
  %sort.4 = f32[4]{0} sort(%p.4), dimensions={0}, to_apply=%fused
  ROOT %copy.4 = f32[4]{0} copy(%sort.4)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %bitcast.5 = f32[2,2]{1,0} bitcast(%x)
  %empty.5 = f32[4]{0} custom-call(), custom_call_target="AllocateBuffer", metadata={op="e"}
  %while.5 = (s32[], f32[4]{0}) while(%x), condition=%condition, body=%body, backend_config={TRIPS}
  %branch = f32[4]{0} conditional(%x, %x, %x), branch_computations={%one, %two}
  %call.5 = f32[4]{0} call(%x), to_apply=%one
  %start = (f32[4]{0}, f32[4]{0}) copy-start(%x)
  %done = f32[4]{0} copy-done(%start)
  ROOT %last = f32[4]{0} fusion(%branch), kind=kLoop, calls=%fused
}
"""


def test_launches_of_a_program():
    text = PROGRAM.replace("{TRIPS}", '{"known_trip_count":{"n":"10"},"other":{}}')
    # 10 times two in the loop, two of the longer branch, one of the call, a copy and a fusion
    assert _xla_gpu.launches(text) == 10 * 2 + 2 + 1 + 1 + 1


def test_a_loop_of_unknown_length():
    assert _xla_gpu.launches(PROGRAM.replace("{TRIPS}", "{}")) is None


def test_a_table_counts_equal_kernels_and_all_launches():
    kernel = _reports.KernelReport(name="step", registers=40, shared_bytes=0, spill_bytes=0)
    given = {"op": "recurrent", "target": "cuda:sm_90", "direction": "forward"}
    status = {"status": _reports.COMPILED, "launches": 553, "temp_bytes": 1 << 20}
    ours = _reports.Report(entry="triton/gpu", kernels=(kernel,) * 16, **given, **status)
    plain = _reports.Report(entry="xla/any", **given, **status)
    text = _reports.format_table([ours, plain])
    assert "step (16 times)" in text
    assert "in all: 553 launches, 1 MiB of temporaries" in text
    assert "XLA's own: 1 MiB of temporaries, 553 launches" in text
    assert _reports.Report.from_dict(ours.as_dict()) == ours


def compile_one(op, entry, direction="forward", **call):
    (report,) = aot.compile(
        op, targets=["cuda:sm_90"], call=call, entries=[entry], directions=[direction]
    )
    assert report.status == "compiled", report.reason
    return report


@pytest.mark.slow
@needs_plugin
def test_attention_is_two_launches():
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    call = {"query": x, "key": x, "value": x, "causal": True}
    assert compile_one("flash_attention", "triton/gpu", **call).launches == 2
    assert compile_one("flash_attention", "xla/any", **call).launches > 2


@pytest.mark.slow
@needs_plugin
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_recurrent_step_is_hardly_more_than_a_launch(direction):
    """512 steps: one launch each, a counter for 16 of them, and what comes before and after."""
    report = compile_one("recurrent", "triton/gpu", direction)
    assert 512 < report.launches < 512 + 512 // 16 + 25
