"""`native_sparse_attention` on CPU beside our causal `flash_attention`: time and temporaries.

Correctness first: with every block selected both compute the same, and nothing is timed before they
agree on that. Results go to benchmarks/results/.
"""

import sys

import common
import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention, native_sparse_attention
from ejkernel.ops import policy_override

_SHAPE = "batch 1, 16 heads, 1 key head, d=64, 16 blocks of 64, float32; milliseconds"
# (tokens, mode) -> the least ratio flash / ours that we promise
_BARS = {(8192, "fwd"): 1.0, (8192, "fwd+bwd"): 1.0}
_MEMORY_TOKENS, _MEMORY_BAR = 8192, 512 * 2**20  # a float32 [t, s] of 16 heads is 4 GiB


def sparse(q, k, v):
    return native_sparse_attention(q, k, v)


def dense(q, k, v):
    return flash_attention(q, k, v, causal=True)


def program(fn, mode):
    if mode == "fwd":
        return lambda q, k, v, dout: fn(q, k, v)
    return common.with_gradient(fn, 3)


def arrays(tokens):
    keys = jax.random.split(jax.random.key(tokens), 4)
    return [
        jax.random.normal(key, (1, tokens, heads, 64))
        for key, heads in zip(keys, (16, 1, 1, 16), strict=True)
    ]


def check(tokens=640):
    """A query that selects all blocks sees what causal attention sees."""
    xs = arrays(tokens)
    common.agree(
        jax.jit(common.with_gradient(sparse, 3))(*xs), jax.jit(common.with_gradient(dense, 3))(*xs)
    )


def main():
    options = common.options(__doc__)
    check()
    rows, failed = [], []
    print(f"{'tokens':>7} {'mode':>8} {'flash ms':>10} {'ours ms':>10} {'ratio':>6} {'bar':>5}")
    for (tokens, mode), bar in _BARS.items():
        fns = [program(fn, mode) for fn in (sparse, dense)]
        # fewer keys give other numbers: `check` has compared them where they must agree
        times = common.time_pair(*fns, arrays(tokens), options.rounds, 1, tolerance=1e6)
        ratio = times["peer"] / times["ours"]
        cells = f"{times['peer']:>10.0f} {times['ours']:>10.0f} {ratio:>6.2f} {bar:>5}"
        print(f"{tokens:>7} {mode:>8} {cells}", flush=True)
        rows.append({"tokens": tokens, "mode": mode, **times, "ratio": ratio, "bar": bar})
        failed += [f"{tokens} {mode}"] if ratio < bar else []
    xs = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in arrays(_MEMORY_TOKENS)]
    used = common.temporaries(program(sparse, "fwd+bwd"), *xs)
    print(f"temporaries at {_MEMORY_TOKENS} tokens, fwd+bwd: {used / 2**20:.0f} MiB")
    failed += ["memory"] if used > _MEMORY_BAR else []
    if options.save:
        common.save("cpu_nsa", _SHAPE, rows=rows, temporary_bytes=used)
    if failed:
        print("below the bar: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    with policy_override(autotune=False):  # what a call gets before anything was measured
        sys.exit(main())
