"""Serving on a GPU: decoding and mixed batches over pages, and over latent vectors.

ejkernel bench --workloads benchmarks/gpu_serving.py --tune 60 --bars --public FOLDER

Bars are shares of a copy that is measured in the same run, times, and rates, on an H200.
"""

import functools

import jax.numpy as jnp

from ejkernel.bench import Bar, Workload
from ejkernel.bench._workloads import CEILING, TFLOPS
from ejkernel.kernels._specs._work_paged import decode, latent_pages, page, ragged

_TRITON = "triton/gpu"
_HEADS = {"h": 32, "g": 8, "d": 128}
_LATENT = {"l": 512, "r": 64, "size": 64}
# share of the copy, by page size and context
_SHARES = {(128, 4096): 0.86, (128, 32768): 0.92, (16, 4096): 0.72, (16, 32768): 0.80}
_ONE_ROW_SHARE = 0.40
_FLOAT8 = 1.35  # times as fast as bfloat16, with half of the bytes


def _reaches(share):
    return (Bar(share, CEILING, of=_TRITON),)


def _float8_pages(dtype, key, **sizes):
    made = page(dtype, key, **sizes)
    narrow = {n: made[n].astype(jnp.float8_e4m3fn) for n in ("key_cache", "value_cache")}
    return made | narrow | {"k_scale": jnp.float32(1.0), "v_scale": jnp.float32(1.0)}


class Shapes:
    """Calls of serving, with batches and contexts divided by `scale`."""

    def __init__(self, scale=1):
        self.scale = scale

    def made(self, op, name, values, bars=(), repeats=1):
        return Workload(
            op, name, values, dtype="bfloat16", modes=("fwd",), bars=bars, repeats=repeats
        )

    def sizes(self, batch, context, size):
        return {"b": max(batch // self.scale, 1), "s": max(context // self.scale, size)}

    def decode(self, batch, context, size, bars, repeats):
        sizes = self.sizes(batch, context, size)
        values = functools.partial(page, **_HEADS, **sizes, size=size)
        name = f"B{batch} S{context} H32/8 d128 page {size}"
        return self.made("page_attention", name, values, bars, repeats)

    def float8(self, batch, context, size):
        sizes = self.sizes(batch, context, size)
        values = functools.partial(_float8_pages, **_HEADS, **sizes, size=size)
        beside = f"B{batch} S{context} H32/8 d128 page {size}"
        # the rate counts bytes
        bars = (Bar(_FLOAT8 / 2, of=_TRITON, workload=beside),)
        return self.made("page_attention", f"{beside} float8", values, bars, 4)

    def rows(self, batch, context):
        values = functools.partial(decode, **_HEADS, **self.sizes(batch, context, 1))
        name = f"B{batch} S{context} H32/8 d128"
        return self.made("ragged_decode_attention", name, values, repeats=8)

    def packed(self, name, decodes, prefills, size, bars=(), repeats=8):
        steps = (1,) * max(decodes // self.scale, 1)
        steps += (max(1024 // self.scale, 1),) * prefills
        context = max(4096 // self.scale, size)
        values = functools.partial(ragged, **_HEADS, steps=steps, s=context, size=size)
        return self.made("ragged_page_attention", f"{name} page {size}", values, bars, repeats)

    def latent(self, batch, context, heads, bars, repeats):
        sizes = self.sizes(batch, context, _LATENT["size"])
        sizes["batch"] = sizes.pop("b")
        values = functools.partial(latent_pages, h=heads, **_LATENT, **sizes)
        name = f"B{batch} S{context} H{heads} 576/512 page 64"
        return self.made("mla_page_attention", name, values, bars, repeats)


def workloads(scale=1):
    make = Shapes(scale)
    mixed = "60 decodes and 4 prefills of 1024, S4096"
    return [
        *(
            make.decode(64, context, size, _reaches(share), repeats=8 if context < 8192 else 2)
            for (size, context), share in _SHARES.items()
        ),
        make.decode(1, 32768, 128, _reaches(_ONE_ROW_SHARE), repeats=32),
        make.float8(64, 32768, 128),
        make.rows(64, 4096),
        *(make.packed("64 decodes S4096", 64, 0, size) for size in (128, 16)),
        make.packed(mixed, 60, 4, 128, (Bar(1.8, of=_TRITON),), repeats=4),
        make.packed(mixed, 60, 4, 16, repeats=4),
        make.latent(128, 8192, 16, _reaches(0.55), repeats=8),
        make.latent(64, 16384, 128, (Bar(160.0, TFLOPS, of=_TRITON),), repeats=2),
    ]


WORKLOADS = workloads()
