"""What a GPU run of the tests needs can be made on a machine without a GPU."""

import pytest

from tests.kernels import ahead, oracles

pytest.importorskip("triton")


def test_oracles_and_kernels_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(oracles, "FOLDER", tmp_path / "oracles")
    monkeypatch.setattr(ahead, "CACHE", tmp_path)
    command = ["--op", "update_paged_cache", "--dtype", "bfloat16", "--kind", "heuristic"]
    assert ahead.main([*command, "--part", "1/4", "--target", "cuda:sm_90"]) == 0
    assert "update_paged_cache, plain, bfloat16: 1 launches" in capsys.readouterr().out
    assert list((tmp_path / "oracles").glob("*.pickle"))
    assert list((tmp_path / "triton").rglob("*.ptx"))


def test_what_fails_is_told_and_the_rest_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(oracles, "FOLDER", tmp_path)
    first, second, *_ = ahead.cases(["update_paged_cache"], ["bfloat16"])
    monkeypatch.setattr(
        ahead, "cases", lambda ops, dtypes: [(first[0], "none", "bfloat16"), second]
    )
    assert ahead.main([]) == 1
    assert "none, bfloat16: StopIteration" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 1


def test_a_tpu_is_no_target():
    with pytest.raises(ValueError, match="must be a GPU"):
        ahead.gpu("tpu:v5e")
