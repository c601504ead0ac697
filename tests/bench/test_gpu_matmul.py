"""The GPU benchmark of products and means, at sizes that a CPU can run."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest

from ejkernel.bench import Workload, _programs, _workloads
from ejkernel.bench._workloads import BOTH, FWD

FILE = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_matmul.py"
WORKLOADS = {w.name: w for w in _workloads.load(str(FILE))}


SMALL = {
    "grouped_matmul": {"m": 96, "k": 16, "n": 8},
    "mean_pooling": {"shape": (1, 640, 2, 4)},
}


def small(name):
    """The call of a workload with few rows and columns; what makes it special stays."""
    workload = WORKLOADS[name]
    values = functools.partial(workload.values, **SMALL[workload.op])
    return Workload(workload.op, name, values, peers=workload.peers)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("mode", [FWD, BOTH])
def test_peers_run_and_calls_are_of_our_function(name, mode):
    workload = small(name)
    call = _programs.Call.of(workload)
    function = type(_programs.kernel_of(workload.op)).function
    call.with_cotangent(lambda values: function(**values))
    ours = jax.eval_shape(lambda traced: function(**call.static, **traced), call.traced)
    assert jax.tree.leaves(call.cotangent)[0].shape == ours.shape
    (peer,) = workload.peers
    result = peer.build(call.values, call.grads, mode, call.cotangent)()
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(result))
    flops, moved = call.work(mode)
    copied = sum(2 * x.nbytes for x in jax.tree.leaves(result))
    if workload.op == "mean_pooling":
        assert copied == pytest.approx(moved, rel=0.05)
    else:
        assert flops == 2 * 96 * 16 * 8 * (1 if mode == FWD else 3)


def test_skewed_groups_use_all_rows():
    sizes = small("M65536 E64 4096x4096 skewed").values(jnp.float32, jax.random.key(0))
    sizes = sizes["group_sizes"]
    assert sizes.sum() == 96
    assert sizes[0] == 0
    assert sizes.max() > 10
