"""The public package of the same name, measured in a process that never imports ours."""

import json
import pathlib
import subprocess
import sys
from typing import Any

from ejkernel.bench._programs import Call

_WORKER = pathlib.Path(__file__).with_name("_public_worker.py")
_TIMER = pathlib.Path(__file__).parents[1] / "ops" / "execution" / "benchmark.py"
# The folder goes before everything else, and the folder of the script stays out of the path.
_START = (
    "import sys, runpy; folder, worker = sys.argv[1:3]; sys.path.insert(0, folder); "
    "sys.argv = [worker, *sys.argv[1:]]; runpy.run_path(worker, run_name='__main__')"
)
_LENGTHS = ("context_lens", "query_start_loc", "num_seqs")


class Public:
    """A worker process; each request is a line of JSON, and so is each answer."""

    def __init__(self, folder: str):
        if not (pathlib.Path(folder) / "ejkernel").is_dir():
            raise ValueError(f"--public {folder} holds no package `ejkernel`")
        command = [sys.executable, "-P", "-c", _START, folder, str(_WORKER), str(_TIMER)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        answer = self._ask({"hello": True})
        if "error" in answer:
            self.close()
            raise ValueError(f"--public {folder}: {answer['error']}")
        self.version: str = answer["version"]
        self.ops: list[str] = answer["ops"]

    def prepare(self, call: Call, mode: str) -> dict[str, str]:
        """Compiles its programs for a call; why each failed, or "" for those that can be timed."""
        shapes = {n: [list(x.shape), str(x.dtype)] for n, x in call.args.arrays().items()}
        statics = {n: v for n, v in call.static.items() if isinstance(v, int | float | str | None)}
        # lengths and starts matter to the time of a call; tables are drawn anew
        known = {n: call.args.arrays()[n].tolist() for n in _LENGTHS if n in shapes}
        request = {"op": call.op, "mode": mode, "arrays": shapes, "static": statics}
        request |= {"known": known, "repeats": call.workload.repeats}
        answer = self._ask(request)
        return answer.get("programs") or {"public": answer.get("error", "no answer")}

    def milliseconds(self, name: str) -> float:
        """One more time of a program that was prepared last."""
        answer = self._ask({"time": name})
        if "ms" not in answer:
            raise RuntimeError(answer.get("error", "the process of the public package ended"))
        return answer["ms"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            return json.loads(stdout.readline() or '{"error": "its process ended"}')
        except (BrokenPipeError, ValueError) as error:
            return {"error": f"its process ended: {error}"}
