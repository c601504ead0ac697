"""Two processes: nothing is timed while tracing; one measures ahead of time and both agree."""

import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
WORKER = """
import dataclasses, json, sys

import jax

jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[1]))
import jax.numpy as jnp

from ejkernel.ops import (
    AutotunePolicy, ConfigSelectorChain, Executor, Kernel, PersistentCache, autotune_recorded,
)


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int


class Slow(Kernel):
    def run(self, x, *, cfg):
        return x + 0 * jax.lax.fori_loop(0, cfg.steps, lambda _, y: jnp.sin(y), x)

    def heuristic_cfg(self, inv):
        return Config(3000)

    def config_space(self, inv):
        return [Config(3000), Config(1)]


kernel = Slow(name="slow")
folder = PersistentCache(f"{sys.argv[3]}/{sys.argv[1]}")
chain = ConfigSelectorChain(persistent=folder, policy=AutotunePolicy(mode="autotune"))
executor = Executor(chain)
x = jnp.ones((64, 64))
traced = executor.choose(kernel, x).source
autotune_recorded([executor.invocation(kernel, x)], chain=chain)
choice = executor.choose(kernel, x)
print(json.dumps([traced, choice.source, choice.cfg.steps, chain._get_tuner().measured,
                  len(list(folder.records()))]))
"""


def test_one_process_measures_and_all_agree(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(i), address, str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    first, second = (json.loads(out.strip().splitlines()[-1]) for out, _ in outputs)
    assert first == ["heuristics", "memory", 1, 2, 1]
    assert second == ["heuristics", "memory", 1, 0, 0]
