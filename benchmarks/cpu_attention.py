"""`flash_attention` on CPU beside `jax.nn.dot_product_attention`: one run, one table, ratios.

Correctness first: nothing is timed before both agree. Results go to benchmarks/results/.
"""

import argparse
import datetime as dt
import json
import pathlib
import platform
import sys

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel.modules import flash_attention
from ejkernel.ops import device_fingerprint, policy_override
from ejkernel.ops.execution.benchmark import measure

_RESULTS = pathlib.Path(__file__).parent / "results"
# (tokens, causal, mode) -> the least ratio peer / ours that we promise
_BARS = {
    (128, True, "fwd"): 0.8,
    (256, True, "fwd"): 0.8,
    (256, False, "fwd"): 0.8,
    (256, True, "fwd+bwd"): 0.8,
    (1024, True, "fwd"): 2.5,
    (1024, True, "fwd+bwd"): 2.5,
    (1024, False, "fwd"): 0.9,
    (1024, False, "fwd+bwd"): 0.9,
    (4096, True, "fwd"): 2.5,
    (4096, True, "fwd+bwd"): 2.5,
    (4096, False, "fwd"): 0.9,
}
_MEMORY_TOKENS, _MEMORY_BAR = 16384, 8.0
_EAGER_BAR_US = 40.0
_COLUMNS = ("tokens", "mask", "mode", "peer ms", "ours ms", "ratio", "bar")


def ours(causal):
    return lambda q, k, v: flash_attention(q, k, v, causal=causal)


def peer(causal):
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation="xla"
    )


def program(fn, mode):
    if mode == "fwd":
        return jax.jit(lambda q, k, v, dout: fn(q, k, v))

    def both(q, k, v, dout):
        out, pull = jax.vjp(fn, q, k, v)
        return out, pull(dout)

    return jax.jit(both)


def arrays(tokens):
    keys = jax.random.split(jax.random.key(tokens), 4)
    return [jax.random.normal(key, (1, tokens, 8, 64)) for key in keys]


def agree(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=2e-5 * float(jnp.abs(e).max()))


def time_pair(tokens, causal, mode, rounds):
    """Medians of interleaved rounds, so that a slow moment of the machine hits both."""
    xs = arrays(tokens)
    programs = {"ours": program(ours(causal), mode), "peer": program(peer(causal), mode)}
    agree(programs["ours"](*xs), programs["peer"](*xs))
    times = {name: [] for name in programs}
    iterations = max(3, min(50, int(2e5 / tokens**1.6)))
    for _ in range(rounds):
        for name, run in programs.items():
            run_it = lambda run=run: run(*xs)
            times[name].append(measure(run_it, num_iters=iterations, budget_s=4.0).median)
    return {name: float(np.median(values)) for name, values in times.items()}


def memory(tokens):
    """Temporary bytes of forward + backward that XLA reports, without running it."""
    xs = [jax.ShapeDtypeStruct((1, tokens, 8, 64), jnp.float32)] * 4
    return {
        name: program(fn(True), "fwd+bwd").lower(*xs).compile().memory_analysis().temp_size_in_bytes
        for name, fn in (("ours", ours), ("peer", peer))
    }


def eager_overhead():
    """Microseconds that an eager call costs over the same jitted call."""
    xs = [x[:, :8, :1] for x in arrays(128)[:3]]
    jitted = jax.jit(ours(True))

    def cost(fn):
        def many():
            for _ in range(200):
                out = fn(*xs)
            return out

        return measure(many, num_iters=20).median / 200 * 1e3

    return min(cost(ours(True)) - cost(jitted) for _ in range(3))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    rows, failed = [], []
    print("{:>7} {:>7} {:>8} {:>9} {:>9} {:>6} {:>5}".format(*_COLUMNS))
    for (tokens, causal, mode), bar in _BARS.items():
        times = time_pair(tokens, causal, mode, options.rounds)
        ratio = times["peer"] / times["ours"]
        mask = "causal" if causal else "none"
        cells = (tokens, mask, mode, f"{times['peer']:.2f}", f"{times['ours']:.2f}")
        print("{:>7} {:>7} {:>8} {:>9} {:>9} {:>6.2f} {:>5}".format(*cells, ratio, bar), flush=True)
        rows.append({"tokens": tokens, "causal": causal, "mode": mode, **times, "ratio": ratio})
        failed += [f"{tokens} {mask} {mode}"] if ratio < bar else []
    used = memory(_MEMORY_TOKENS)
    saving = used["peer"] / used["ours"]
    peer_mib, ours_mib = (used[name] / 2**20 for name in ("peer", "ours"))
    print(f"temporaries at {_MEMORY_TOKENS} tokens, fwd+bwd: peer {peer_mib:.0f} MiB, ours")
    print(f"{ours_mib:.0f} MiB: {saving:.0f} times less (bar {_MEMORY_BAR:.0f})")
    failed += ["memory"] if saving < _MEMORY_BAR else []
    eager = eager_overhead()
    print(f"eager call over the jitted call: {eager:.1f} us (bar {_EAGER_BAR_US:.0f})")
    failed += ["eager"] if eager > _EAGER_BAR_US else []
    if options.save:
        _RESULTS.mkdir(exist_ok=True)
        document = {
            "date": dt.date.today().isoformat(),
            "device": device_fingerprint(),
            "machine": platform.processor() or platform.machine(),
            "versions": {"jax": jax.__version__, "ejkernel": ejkernel.__version__},
            "shape": "batch 1, 8 heads, d=64, float32; milliseconds",
            "rows": rows,
            "temporary_bytes": used,
            "eager_overhead_us": eager,
        }
        (_RESULTS / "cpu_attention.json").write_text(json.dumps(document, indent=1) + "\n")
    if failed:
        print("below the bar: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    with policy_override(autotune=False):  # what a call gets before anything was measured
        sys.exit(main())
