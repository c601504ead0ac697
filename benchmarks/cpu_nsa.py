"""`native_sparse_attention` on a CPU beside our causal `flash_attention`: time and temporaries.

Fewer keys give other numbers than the dense peer, so only its time is compared.
"""

import functools

from ejkernel.bench import Bar, Peer, Workload
from ejkernel.kernels._specs._work_attention import qkv
from ejkernel.modules import flash_attention


def dense(values):
    return flash_attention(values["query"], values["key"], values["value"], causal=True)


DENSE = Peer(
    "our flash_attention", ("native_sparse_attention",), dense, agrees=False, same_work=False
)
values = functools.partial(qkv, b=1, t=8192, h=16, g=1, d=64, options={})
NAME = "T8192 H16/1 d64, 16 of 64"

WORKLOADS = [
    Workload(
        "native_sparse_attention",
        NAME,
        values,
        peers=(DENSE,),
        known_peers=False,
        bars=(Bar(1.0, "our flash_attention"),),
    ),
    # temporaries: a float32 [t, s] of 16 heads is 4 GiB
    Workload(
        "native_sparse_attention",
        NAME,
        values,
        modes=("fwd+bwd",),
        quantity="bytes",
        known_peers=False,
        bars=(Bar(512 * 2.0**20),),
    ),
]
