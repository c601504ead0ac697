"""Names of targets, and compilers that are not installed."""

import importlib.util

import pytest

from ejkernel import aot
from ejkernel.aot import _targets
from ejkernel.errors import UnsupportedError


@pytest.mark.parametrize(
    ("text", "model", "capability"),
    [
        ("tpu:v4", "TPU v4", None),
        ("tpu:v5e", "TPU v5 lite", None),
        ("tpu:v5e:16x16", "TPU v5 lite", None),
        ("tpu:v5p:8x8x8", "TPU v5", None),
        ("tpu:v6e", "TPU v6 lite", None),
        ("tpu:7x", "TPU7x", None),
        ("cuda:sm_80", "NVIDIA A100", "8.0"),
        ("cuda:sm_90", "NVIDIA H200", "9.0"),
        ("cuda:sm_100", "NVIDIA B200", "10.0"),
        ("cuda:sm_89", "cuda sm_89", "8.9"),
        ("hip:gfx942", "AMD Instinct MI300X", "gfx942"),
    ],
)
def test_targets_are_read_and_written_alike(text, model, capability):
    target = aot.parse(text)
    assert str(target) == text
    assert (target.model, target.capability) == (model, capability)


@pytest.mark.parametrize(
    "text", ["", "tpu", "tpu:v9", "cuda", "cuda:90", "cuda:sm_x", "hip:mi300", "gpu:sm_90", "v5e"]
)
def test_unknown_targets_are_refused_with_those_that_are(text):
    with pytest.raises(ValueError, match=r"is not known; there are tpu:v4, .*hip:gfx942") as found:
        aot.compile("flash_attention", targets=[text])
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("text", ["tpu:v5e:16", "tpu:v5e:4x4x4", "tpu:v5p:4x4", "tpu:v4:0x2x2"])
def test_slices_have_the_sizes_of_their_chip(text):
    with pytest.raises(ValueError, match=r"must have a slice of [23] sizes, such as 'tpu:v"):
        aot.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [("tpu:v5e", "needs libtpu.*: pip install libtpu$"), ("cuda:sm_90", ".*pip install triton$")],
)
def test_a_missing_compiler_is_one_line_with_the_remedy(text, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=words):
        aot.compile("flash_attention", targets=[text])


def test_peaks_are_those_of_the_vendor():
    peaks = {"v4": 137.5, "v5e": 197, "v5p": 459, "v6e": 918}  # of a device; on v4 half a chip
    for name, peak in peaks.items():
        chip = _targets.CHIPS[name]
        assert chip.flop_per_cycle * chip.clock_hz / 1e12 == pytest.approx(peak, rel=0.005)
