"""`ring_attention` on four simulated devices beside `flash_attention` on one, with equal work.

The devices share the cores of this machine, so a schedule that wastes nothing takes as long as one
device does. Moving the arrays to the devices and back, and their order, are in our time.
"""

import functools

import common
import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention, from_zigzag, ring_attention, to_zigzag

_DEVICES, _TOKENS = 4, 4096
_BAR = 0.67  # within 1.5 times the time of one device


def ours(layout, query, key, value):
    mesh = jax.make_mesh((_DEVICES,), ("ring",), axis_types=(AxisType.Auto,))
    there, back = (lambda x: x,) * 2
    if layout == "zigzag":
        there, back = (functools.partial(f, num_devices=_DEVICES) for f in (to_zigzag, from_zigzag))
    spec = P(None, "ring")
    out = ring_attention(
        *map(there, (query, key, value)),
        strategy="ring",
        layout=layout,
        mesh=mesh,
        in_specs=(spec,) * 3,
        out_specs=spec,
    )
    return back(out)


def peer(query, key, value):
    return flash_attention(query, key, value, causal=True)


def make(layout, mode):
    keys = jax.random.split(jax.random.key(0), 4)
    xs = [jax.random.normal(key, (1, _TOKENS, 4, 64)) for key in keys]
    fns = functools.partial(ours, layout), peer
    if mode == "fwd":
        return (*(lambda q, k, v, _, fn=fn: fn(q, k, v) for fn in fns), xs)
    return (*(common.with_gradient(fn, 3) for fn in fns), xs)


COMPARISONS = [
    common.Comparison(f"{layout} {mode}", _BAR, functools.partial(make, layout, mode))
    for layout in ("contiguous", "zigzag")
    for mode in ("fwd", "fwd+bwd")
]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", _DEVICES)
    shape = f"{_TOKENS} tokens, 4 heads, d=64, float32, causal, {_DEVICES} devices; milliseconds"
    common.main(__doc__, "cpu_ring", shape, COMPARISONS)
