"""Repeats the kernels for Hopper, and gives a memory checker small calls of them.

export EJKERNEL_AUTOTUNE_POLICY=heuristics
python benchmarks/gpu_hopper_soak.py
compute-sanitizer --tool memcheck python benchmarks/gpu_hopper_soak.py --runs 2 --small
compute-sanitizer --tool racecheck python benchmarks/gpu_hopper_soak.py --runs 2 --small

`--part 1/3` runs a third of the calls: most of the time is spent in compilers, so that several
processes beside each other are quicker.

Every call is compared with XLA's once. Then it runs again and again: output, logsumexp and the
gradients of keys and values must have the same bits each time. Those of queries are added in an
order that varies, except with `deterministic=True`, which every call runs with as well: then all
bits must be the same. All bits of grouped products must be the same always. A hang shows as a call
that does not end. Needs an H100 or H200.
"""

import argparse
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import kernel_registry
from ejkernel.modules import flash_attention, grouped_matmul

# name: batch, queries, keys, heads, key heads, head size, value size, options
_SMALL = {
    "causal": (2, 330, 330, 4, 2, 64, 64, {"causal": True}),
    "full": (1, 257, 130, 2, 2, 128, 128, {}),
    "more keys": (1, 70, 333, 4, 2, 128, 128, {"causal": True}),
    "more queries": (1, 333, 70, 4, 2, 128, 128, {"causal": True, "sinks": True}),
    "window": (1, 700, 700, 2, 1, 128, 128, {"causal": True, "sliding_window": 200}),
    "both sides": (1, 300, 400, 2, 1, 64, 64, {"sliding_window": (90, 40)}),
    "cap": (1, 256, 256, 2, 1, 128, 128, {"causal": True, "logits_soft_cap": 30.0}),
    "192": (1, 256, 256, 2, 2, 192, 128, {"causal": True}),
    "segments": (2, 500, 500, 4, 2, 128, 128, {"causal": True, "segments": 3}),
    "segments d64": (1, 700, 450, 2, 1, 64, 64, {"segments": 2}),
    "large scores": (1, 256, 512, 2, 1, 128, 128, {"factor": 32.0}),
}
_LARGE = {
    "d128 4k": (4, 4096, 4096, 16, 16, 128, 128, {"causal": True}),
    "d128 4k full": (4, 4096, 4096, 16, 16, 128, 128, {}),
    "d128 4k 32/8": (4, 4096, 4096, 32, 8, 128, 128, {"causal": True}),
    "d64 4k": (4, 4096, 4096, 32, 32, 64, 64, {"causal": True}),
    "d192 4k": (2, 4096, 4096, 16, 16, 192, 128, {"causal": True}),
    "d128 16k": (1, 16384, 16384, 16, 16, 128, 128, {"causal": True}),
    "16k window": (1, 16384, 16384, 16, 16, 128, 128, {"causal": True, "sliding_window": 1023}),
    "4k segments": (4, 4096, 4096, 16, 16, 128, 128, {"causal": True, "segments": 4}),
    "std 32": (4, 4096, 4096, 16, 16, 128, 128, {"causal": True, "factor": 32.0}),
}  # fmt: skip
# name: rows, k, n, matrices, options; group sizes are uneven, and leave rows over that hold nan
_GROUPED_SMALL = {
    "odd": (203, 64, 192, 5, {}),
    "transposed": (700, 192, 128, 9, {"transpose_rhs": True}),
    "few rows": (40, 256, 384, 16, {}),
    "offset": (515, 128, 320, 4, {"others": 3}),
    "existing": (515, 128, 320, 4, {"others": 3, "existing": True}),
    "float32": (301, 128, 128, 4, {"preferred_element_type": "float32"}),
}
_GROUPED_LARGE = {
    "32k 8": (32768, 4096, 4096, 8, {}),
    "64k 64": (65536, 4096, 1408, 64, {}),
    "64k 64 transposed": (65536, 1408, 4096, 64, {"transpose_rhs": True}),
}
# Beside XLA's bfloat16 results; the tests compare with a float32 oracle.
_TOLERANCE = 0.05


def call(batch, t, s, heads, groups, d, e, options):
    """Arrays and options of a call."""
    keys, options = jax.random.split(jax.random.key(7), 3), dict(options)
    shapes = ((batch, t, heads, d), (batch, s, groups, d), (batch, s, groups, e))
    q, k, v = (jax.random.normal(key, x, jnp.bfloat16) for key, x in zip(keys, shapes, strict=True))
    q = q * jnp.bfloat16(options.pop("factor", 1.0))
    if options.pop("sinks", False):
        options["softmax_aux"] = jnp.ones((heads, 1))
    if count := options.pop("segments", 0):
        q_ids, k_ids = _ids(batch, t, count), _ids(batch, s, count)
        options |= {"q_segment_ids": q_ids, "kv_segment_ids": k_ids}
        spoil = lambda x, ids: jnp.where(ids[:, :, None, None] < 0, jnp.nan, x).astype(x.dtype)
        q, k, v = spoil(q, q_ids), spoil(k, k_ids), spoil(v, k_ids)
    return (q, k, v), options | {"return_lse": True}


def _ids(batch, length, count):
    """Segments about as long, cut differently in each row, and padding behind them."""
    index = jnp.arange(length, dtype=jnp.int32)[None] + 11 * jnp.arange(batch)[:, None]
    return jnp.where(index < length * 15 // 16, index * count // length, -1)


def check(name, sizes, runs):
    """Whether a call gives right numbers, and the same bits in every run."""
    arrays, options = call(*sizes)
    xla = functools.partial(flash_attention, platform="xla")
    expected = jax.jit(lambda *xs: _results(xla, xs, options))(*arrays)
    good = True
    for deterministic in (False, True):
        good &= _repeat(name, arrays, options, expected, runs, deterministic)
    return good


def _repeat(name, arrays, options, expected, runs, deterministic):
    ours = kernel_registry.get("flash_attention", "pallas", "gpu")
    options = options | {"deterministic": deterministic}
    run = jax.jit(lambda *xs: _results(ours, xs, options))
    # the last result is the gradient of queries
    compared = len(expected) if deterministic else len(expected) - 1
    kind = "all bits" if deterministic else "default"
    return _compare(f"{name:16s} {kind:8s}", run, arrays, expected, runs, compared)


def check_grouped(name, sizes, runs):
    """The same for a grouped product."""
    arrays, options = grouped_call(*sizes)
    ours = kernel_registry.get("grouped_matmul", "pallas", "gpu")
    xla = functools.partial(grouped_matmul, platform="xla")
    expected = jax.jit(lambda *xs: _products(xla, xs, options))(*arrays)
    run = jax.jit(lambda *xs: _products(ours, xs, options))
    title = f"{name:16s} grouped "
    return _compare(title, run, arrays, expected, runs, len(expected))


def grouped_call(m, k, n, count, options):
    """Operands and options of a grouped product."""
    keys, options = jax.random.split(jax.random.key(9), 3), dict(options)
    others = options.pop("others", 0)
    weights = (np.arange(count + others) % 4).astype(np.float64)  # every fourth group is empty
    sizes = np.floor(0.9 * m * weights / weights.sum()).astype(np.int32)
    matrix = (n, k) if options.get("transpose_rhs") else (k, n)
    lhs = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    rhs = jax.random.normal(keys[1], (count, *matrix), jnp.bfloat16) * jnp.bfloat16(k**-0.5)
    lhs = jnp.where(jnp.arange(m)[:, None] < sizes.sum(), lhs, jnp.nan).astype(lhs.dtype)
    if others:
        options["group_offset"] = 1
    if options.pop("existing", False):
        options["existing_out"] = jax.random.normal(keys[2], (m, n), jnp.bfloat16)
    return (lhs, rhs), options | {"group_sizes": jnp.asarray(sizes)}


def _products(multiply, arrays, options):
    """The output and both gradients."""
    out, pull = jax.vjp(lambda lhs, rhs: multiply(lhs, rhs, **options), *arrays)
    return out, *pull(jnp.sin(3.0 * out.astype(jnp.float32)).astype(out.dtype))


def _compare(title, run, arrays, expected, runs, compared):
    """Compares numbers with those expected, and the first results of all runs with each other."""
    first = jax.block_until_ready(run(*arrays))
    error = max(_error(x, y) for x, y in zip(first, expected, strict=True))
    same = jax.jit(lambda a, b: jnp.stack([_bits(a[i], b[i]) for i in range(compared)]).all())
    start, repeats = time.time(), True
    for _ in range(runs):
        repeats &= bool(same(first, run(*arrays)))
    good = error <= _TOLERANCE and repeats
    verdict = "ok" if good else "WRONG" if repeats else "DIFFERS FROM RUN TO RUN"
    seconds = time.time() - start
    sys.stdout.write(f"{title} {verdict}: error {error:.1e}, ")
    sys.stdout.write(f"{runs} runs in {seconds:.0f} s\n")
    sys.stdout.flush()
    return good


def _results(attention, arrays, options):
    """Output and logsumexp, then gradients: of keys, of values, of queries."""

    def both(*xs):
        out, lse = attention(*xs, **options)
        seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(seen)), (out, lse)

    (dq, dk, dv), outputs = jax.grad(both, (0, 1, 2), has_aux=True)(*arrays)
    return *outputs, dk, dv, dq


def _error(x, y):
    """The largest error, relative to the largest number if that exceeds 1."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    finite = jnp.isfinite(y)
    errors = jnp.where(finite, jnp.abs(x - y), x != y)
    return float(errors.max() / jnp.maximum(jnp.where(finite, jnp.abs(y), 0.0).max(), 1.0))


def _bits(x, y):
    kind = jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32
    return (jax.lax.bitcast_convert_type(x, kind) == jax.lax.bitcast_convert_type(y, kind)).all()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--small", action="store_true", help="only calls that a checker can afford")
    parser.add_argument("--part", default="1/1", help="2/3: each third call, from the second on")
    given = parser.parse_args()
    calls = _SMALL if given.small else _LARGE | _SMALL
    grouped = _GROUPED_SMALL if given.small else _GROUPED_LARGE | _GROUPED_SMALL
    checks = [functools.partial(check, *call, given.runs) for call in calls.items()]
    checks += [functools.partial(check_grouped, *call, given.runs) for call in grouped.items()]
    part, parts = map(int, given.part.split("/"))
    results = [one() for one in checks[part - 1 :: parts]]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
