"""The example scripts, at small settings."""

import importlib.util
import pathlib
import re

import numpy as np
import pytest

from ejkernel import _settings

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def serve():
    spec = importlib.util.spec_from_file_location("serve_example", EXAMPLES / "serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_serving_equals_recomputation(serve, capsys):
    assert serve.main(["--requests", "5", "--tokens", "6", "--pages", "8"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"ragged_page_attention_v3 runs \w+/\w+ on \w+", text)
    assert "5 of 5 answers equal full recomputation" in text
    assert re.search(r"tokens/s  pages +0/8  running 0  waiting +0  done +5", text)
    given, most = re.search(r"(\d+) pages given out of 8, at most (\d+) at once", text).groups()
    assert int(given) > 8  # pages were used again
    assert 1 < int(most) <= 8


@pytest.mark.slow
def test_serving_runs_the_platform_that_is_asked_for(serve, capsys):
    with _settings.override(interpret=True):
        assert serve.main("--requests 2 --tokens 2 --pages 8 --platform triton".split()) == 0
    assert "ragged_page_attention_v3 runs triton/gpu on" in capsys.readouterr().out


def test_serving_stops_when_told(serve, capsys):
    assert serve.main(["--requests", "4", "--tokens", "6", "--steps", "3"]) == 1
    assert "0 of 4 answers" in capsys.readouterr().out


def test_a_broken_cache_is_noticed(serve):
    """The comparison at the end can fail: one page overwritten changes an answer."""
    params = serve.make_params(0)
    (request,) = serve.make_requests(1, 8, 1)
    server = serve.Server(params, [request], 8)
    server.step()
    server.caches = [cache.at[request.pages[0]].mul(-1.0) for cache in server.caches]
    while server.running or server.waiting:
        server.step()
    assert request.answer != serve.recompute(params, request)
    assert len(np.unique(request.answer)) > 1


def test_impossible_settings_are_refused(serve, capsys):
    with pytest.raises(SystemExit):
        serve.main(["--platform", "cuda"])
    assert "--platform cuda: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        serve.main(["--pages", "2"])
    assert "--pages at least 8" in capsys.readouterr().err
