"""Latent attention on a CPU beside plain code that makes keys and values of all heads."""

import functools

import numpy as np

from ejkernel.bench import Bar, Workload
from ejkernel.kernels._specs._work_attention import latents
from ejkernel.kernels._specs._work_paged import latent_pages

_BAR = (Bar(0.9, "plain, all heads"),)


def half_full(dtype, key):
    """One query a sequence, over half to all of the tables."""
    made = latent_pages(dtype, key, 4, 2048, 16, 512, 64, 16)
    lens = np.linspace(1024, 2048, 4).astype(np.int32)
    return made | {"context_lens": lens}


WORKLOADS = [
    Workload(
        "mla_attention",
        "B1 S1024 H8 96/64 latent 256",
        functools.partial(latents, b=1, t=1024, s=1024, h=8, d=64, e=64, r=32, l=256),
        bars=_BAR,
    ),
    Workload(
        "mla_attention",
        "decode B4 S2048 H16 192/128 latent 512",
        functools.partial(latents, b=4, t=1, s=2048, h=16, d=128, e=128, r=64, l=512),
        modes=("fwd",),
        bars=_BAR,
    ),
    Workload(
        "mla_page_attention",
        "B4 S1024 to 2048 H16 576/512 page 16",
        half_full,
        modes=("fwd",),
        bars=(Bar(0.9, "plain, gathered"),),
    ),
]
