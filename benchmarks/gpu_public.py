"""Times of the public package of our name, in a process of its own (see gpu_attention.py).

Reads lines of (batch, length, heads, key heads, head size, causal) from the standard input, and
answers each with a line of milliseconds by setting and mode: "public unset" without any settings,
"public as set" with the tiles that its own module sets when nothing is measured, "public" with the
fastest of these and a setting for Hopper.
"""

import json
import sys
import timeit

import jax
import jax.numpy as jnp

from ejkernel.kernels._triton.flash_attention import flash_attention
from ejkernel.ops import BwdParams, FwdParams


def settings(d):
    """None, its module's own, and some that suit a Hopper: queries, keys, warps, stages."""
    own = ((64, 32 if d >= 128 else 128, 4, 2), (32, 32, 4, 2))
    hopper = ((128, 64, 8, 3), (64, 64, 4, 2))
    return {"public unset": None, "public as set": own, "public": hopper}


def milliseconds(fn, xs, repeats=20):
    run = jax.jit(fn)
    jax.block_until_ready(run(*xs))

    def many():
        for _ in range(repeats):
            out = run(*xs)
        jax.block_until_ready(out)

    return min(timeit.repeat(many, number=1, repeat=3)) / repeats * 1e3


def both(fn):
    def run(q, k, v, dout):
        out, pull = jax.vjp(fn, q, k, v)
        return out, pull(dout)

    return run


def params(kind, values):
    names = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
    return kind(**dict(zip(names, values, strict=True)))


def compare(xs, causal):
    rows = {}
    for name, tiles in settings(xs[0].shape[-1]).items():
        row = rows[name] = {}
        options = {}
        if tiles is not None:
            forward, backward = tiles
            options["fwd_params"] = params(FwdParams, forward)
            options["bwd_params"] = params(BwdParams, backward)
        fn = lambda q, k, v, o=options: flash_attention(q, k, v, causal=causal, **o)
        for mode, program, inputs in (("fwd", fn, xs[:3]), ("fwd+bwd", both(fn), xs)):
            try:
                row[mode] = milliseconds(program, inputs)
            except Exception as error:  # noqa: BLE001 - another library's failure is a result
                print(f"public {mode}: {str(error)[:200]}", file=sys.stderr)
    for mode in ("fwd", "fwd+bwd"):
        if times := [row[mode] for row in rows.values() if mode in row]:
            rows["public"][mode] = min(times)
    return rows


def main():
    for line in sys.stdin:
        batch, length, heads, groups, d, causal = json.loads(line)
        keys = jax.random.split(jax.random.key(length), 4)
        xs = [
            jax.random.normal(key, (batch, length, n, d), jnp.bfloat16)
            for key, n in zip(keys, (heads, groups, groups, heads), strict=True)
        ]
        print(json.dumps(compare(xs, causal)), flush=True)


if __name__ == "__main__":
    main()
