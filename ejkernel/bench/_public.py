"""The public package of the same name, measured in a process that never imports ours."""

import json
import pathlib
import subprocess
import sys
from typing import Any

from ejkernel.bench import _apart, _tune_job
from ejkernel.bench._programs import Call

_WORKER = pathlib.Path(__file__).with_name("_public_worker.py")
_TIMER = pathlib.Path(__file__).parents[1] / "ops" / "execution" / "benchmark.py"
# The folder goes before everything else, and the folder of the script stays out of the path.
_START = (
    f"{_apart.ROOMY}import sys, runpy; folder, worker = sys.argv[1:3]; sys.path.insert(0, folder); "
    "sys.argv = [worker, *sys.argv[1:]]; runpy.run_path(worker, run_name='__main__')"
)
_LENGTHS = ("context_lens", "query_start_loc", "num_seqs")
# The arguments that its programs take, by op; a call that sets another one is not its business.
_TAKES = {
    "flash_attention": {"query", "key", "value", "causal"},
    "page_attention": {"query", "key_cache", "value_cache", "context_lens", "block_tables"},
    "ragged_page_attention": {"queries", "kv_pages", "block_tables", *_LENGTHS},
    "gla": {"query", "key", "value", "g"},
    "mean_pooling": {"inputs", "chunk_size"},
    "native_sparse_attention": {
        *("query", "key", "value", "g_cmp", "g_slc", "block_counts", "block_size"),
    },
}
# Seconds for an answer. Some of its kernels are unrolled over all keys and never end compiling.
_ANSWER_S, _BUILD_S = 60.0, 60.0
_ENDED = "its process ended"


class Public:
    """A worker process; each request is a line of JSON, and so is each answer.

    A process that dies or says nothing is replaced by another one.
    """

    def __init__(self, folder: str, build_s: float = _BUILD_S):
        if not (pathlib.Path(folder) / "ejkernel").is_dir():
            raise ValueError(f"--public {folder} holds no package `ejkernel`")
        self._folder, self._build_s = folder, build_s
        self._process: subprocess.Popen[str] | None = None
        answer = self._ask({"hello": True})
        if "error" in answer:
            self.close()
            raise ValueError(f"--public {folder}: {answer['error']}")
        self.version: str = answer["version"]

    def why_not(self, call: Call) -> str | None:
        """Why it does not take part in a call."""
        if call.op not in _TAKES:
            return "it has no such op"
        given = {n for n, x in call.values.items() if x is not None and x is not False}
        unknown = sorted(given - _TAKES[call.op])
        return f"it has no {', '.join(unknown)}" if unknown else None

    def prepare(self, call: Call, mode: str) -> dict[str, str]:
        """Compiles its programs for a call; why each failed, or "" for those that can be timed."""
        shapes = {n: [list(x.shape), str(x.dtype)] for n, x in call.args.arrays().items()}
        statics = {n: v for n, v in call.static.items() if isinstance(v, int | float | str | None)}
        # lengths and starts matter to the time of a call; tables are drawn anew
        known = {n: call.args.arrays()[n].tolist() for n in _LENGTHS if n in shapes}
        request = {"op": call.op, "mode": mode, "arrays": shapes, "static": statics}
        request |= {"known": known, "repeats": call.workload.repeats}
        said: dict[str, str] = {}
        while True:  # until a process lives through all that is left
            answer = self._ask(request)
            if "programs" not in answer:
                return said or {"public": answer.get("error", "no answer")}
            fresh = [name for name in answer["programs"] if not said.get(name)]
            for name in fresh:
                built = self._ask({"build": name}, self._build_s)
                said[name] = built.get("error", built.get("failed", "no answer"))
                if self._process is None:
                    break  # with the programs that were built before
            else:
                return said

    def milliseconds(self, name: str) -> float:
        """One more time of a program that was prepared last."""
        answer = self._ask({"time": name})
        if "ms" not in answer:
            raise RuntimeError(answer.get("error", _ENDED))
        return answer["ms"]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-c", _START, self._folder, str(_WORKER), str(_TIMER)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, text=True, bufsize=1, **pipes)

    def _ask(self, request: dict[str, Any], most_s: float = _ANSWER_S) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        watch = _tune_job._Watch(most_s, process.kill)
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line, how = stdout.readline(), ""
        except (BrokenPipeError, ValueError) as error:
            line, how = "", f": {error}"
        finally:
            watch.stop()
        if line:
            return json.loads(line)
        self.close()
        return {"error": f"took more than {most_s:g} s" if watch.fired else f"{_ENDED}{how}"}
