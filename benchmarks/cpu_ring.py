"""`ring_attention` on four simulated devices beside `flash_attention` on one, with equal work.

The devices share the cores of this machine, so a schedule that wastes nothing takes as long as one
device does. Moving the arrays to the devices and back, and their order, are in our time.
"""

import functools

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.bench import Bar, Peer, Workload
from ejkernel.kernels._specs._work_attention import qkv
from ejkernel.modules import flash_attention, from_zigzag, ring_attention, to_zigzag

_DEVICES, _TOKENS = 4, 4096
_BAR = 0.67  # within 1.5 times the time of one device

jax.config.update("jax_num_cpu_devices", _DEVICES)


def ours(platform, values, layout):
    mesh = jax.make_mesh((_DEVICES,), ("ring",), axis_types=(AxisType.Auto,))
    there, back = (lambda x: x,) * 2
    if layout == "zigzag":
        there, back = (functools.partial(f, num_devices=_DEVICES) for f in (to_zigzag, from_zigzag))
    spec = P(None, "ring")
    out = ring_attention(
        *(there(values[name]) for name in ("query", "key", "value")),
        strategy="ring",
        layout=layout,
        mesh=mesh,
        in_specs=(spec,) * 3,
        out_specs=spec,
        platform=platform,
    )
    return back(out)


def one_device(values):
    return flash_attention(values["query"], values["key"], values["value"], causal=True)


ONE = Peer("our flash_attention", ("ring_attention",), one_device)


def workload(layout):
    return Workload(
        "ring_attention",
        f"B1 S4096 H4 d64 causal, {layout}, 4 devices",
        functools.partial(qkv, b=1, t=_TOKENS, h=4, g=4, d=64, options={}),
        peers=(ONE,),
        ours=functools.partial(ours, layout=layout),
        devices=_DEVICES,
        bars=(Bar(_BAR, ONE.name),),
    )


WORKLOADS = [workload("contiguous"), workload("zigzag")]
