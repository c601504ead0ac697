"""`flash_attention` on a GPU: our entries beside cuDNN, torch and other libraries, and options.

ejkernel bench --workloads benchmarks/gpu_attention.py --tune 60 --bars --public FOLDER
"""

import functools
import itertools

import jax.numpy as jnp

from ejkernel.bench import Bar, Workload
from ejkernel.bench._workloads import AUTO, BEST
from ejkernel.kernels._specs._work_attention import qkv

_TRITON, _HOPPER = "triton/gpu", "pallas/gpu"
_TOKENS = 16384
# heads, key heads, head size
_MODELS = ((16, 16, 128), (32, 32, 64), (32, 8, 128))
_LENGTHS = (1024, 4096, 16384)
_FORWARD_BARS = {128: 0.80, 64: 0.95}
_BARS = (
    Bar(1.2, "torch FA2", of=_TRITON, modes=("fwd+bwd",)),
    Bar(5.0, "public", of=_TRITON, modes=("fwd+bwd",)),
    Bar(0.98, BEST, of=AUTO),
)
_WINDOW, _DOCUMENTS = 1024, 8


def name(batch, length, heads, groups, d, mask):
    return f"B{batch} S{length} H{heads}{'' if heads == groups else f'/{groups}'} d{d} {mask}"


def _hopper_bars(model, length, causal):
    """Floors of the Hopper kernel, which runs where its platform is asked for."""
    heads, groups, d = model
    if causal:
        both = 1.0 if heads == groups and d == 128 else 0.95
        bars = ((1.08, "fwd"), (both, "fwd+bwd")) if length >= 4096 else ()
        return tuple(Bar(least, "jla", of=_HOPPER, modes=(mode,)) for least, mode in bars)
    return (Bar(1.10, "jax.nn cuDNN", of=_HOPPER, modes=("fwd",)),) if length == 4096 else ()


def shape(model, length, causal):
    heads, groups, d = model
    sizes = (_TOKENS // length, length, heads, groups, d)
    return Workload(
        "flash_attention",
        name(*sizes, "causal" if causal else "full"),
        lambda dtype, key: qkv(dtype, key, *sizes, {"causal": causal}),
        dtype="bfloat16",
        bars=(
            Bar(_FORWARD_BARS[d], "jax.nn cuDNN", of=_TRITON, modes=("fwd",)),
            *_hopper_bars(model, length, causal),
            *_BARS,
        ),
    )


def option(label, given, cost, beside="B1 S16384 H16 d128 causal", modes=("fwd",)):
    """A long causal call with an option, which may cost this much per visible pair."""
    sizes = {"b": 1, "t": _TOKENS, "h": 16, "g": 16, "d": 128}
    bar = Bar(1 / cost, of=_TRITON, workload=beside, modes=modes)
    return Workload(
        "flash_attention",
        f"B1 S16384 H16 d128 {label}",
        functools.partial(qkv, **sizes, options={"causal": True, **given}),
        dtype="bfloat16",
        modes=modes,
        bars=(bar,),
    )


def documents():
    ids = jnp.repeat(jnp.arange(_DOCUMENTS, dtype=jnp.int32), _TOKENS // _DOCUMENTS)[None]
    return {"q_segment_ids": ids, "kv_segment_ids": ids}


def options():
    rows = shape(_MODELS[0], _TOKENS // _DOCUMENTS, True)
    return [
        rows,  # that documents are short is not the cost of their ids
        option("sinks", {"softmax_aux": jnp.ones((16, 1))}, 1.05),
        option("soft cap 30", {"logits_soft_cap": 30.0}, 1.4, modes=("fwd", "fwd+bwd")),
        # six times as fast as all pairs
        option("window 1024", {"sliding_window": (_WINDOW, 0)}, 8.25 / 6),
        option("8 documents", documents(), 1.25, beside=rows.name),
        option("deterministic", {"deterministic": True}, 1.25, modes=("fwd+bwd",)),
    ]


def shapes():
    every = itertools.product(_MODELS, _LENGTHS, (True, False))
    return [shape(*one) for one in every if one[0] != _MODELS[2] or one[2]]


WORKLOADS = [*shapes(), *options()]
