"""`flash_attention` on CPU beside `jax.nn.dot_product_attention`: one run, one table, ratios.

Correctness first: nothing is timed before both agree. Results go to benchmarks/results/.
"""

import sys

import common
import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention
from ejkernel.ops import policy_override
from ejkernel.ops.execution.benchmark import measure

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
        return lambda q, k, v, dout: fn(q, k, v)
    return common.with_gradient(fn, 3)


def arrays(tokens):
    keys = jax.random.split(jax.random.key(tokens), 4)
    return [jax.random.normal(key, (1, tokens, 8, 64)) for key in keys]


def time_pair(tokens, causal, mode, rounds):
    fns = (program(fn(causal), mode) for fn in (ours, peer))
    iterations = max(3, min(50, int(2e5 / tokens**1.6)))
    return common.time_pair(*fns, arrays(tokens), rounds, iterations)


def memory(tokens):
    """Temporary bytes of forward + backward that XLA reports, without running it."""
    xs = [jax.ShapeDtypeStruct((1, tokens, 8, 64), jnp.float32)] * 4
    return {
        name: common.temporaries(program(fn(True), "fwd+bwd"), *xs)
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
    options = common.options(__doc__)
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
        common.save(
            "cpu_attention",
            "batch 1, 8 heads, d=64, float32; milliseconds",
            rows=rows,
            temporary_bytes=used,
            eager_overhead_us=eager,
        )
    if failed:
        print("below the bar: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    with policy_override(autotune=False):  # what a call gets before anything was measured
        sys.exit(main())
