"""Attention on a GPU: our entries beside cuDNN, torch and other libraries, options, and latents.

ejkernel bench --workloads benchmarks/gpu_attention.py --tune 60 --bars --public FOLDER
"""

import functools
import itertools

import jax
import jax.numpy as jnp

from ejkernel.bench import Bar, Workload
from ejkernel.bench._workloads import AUTO, BEST, TFLOPS
from ejkernel.kernels._specs._work_attention import latents, qkv

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


def option(label, given, costs, beside="B1 S16384 H16 d128 causal", modes=("fwd",), bars=()):
    """A long causal call with an option, which may cost so much per visible pair.

    `costs` are those of Triton and of Hopper's kernel, forward; Triton's hold with backward too.
    """
    sizes = {"b": 1, "t": _TOKENS, "h": 16, "g": 16, "d": 128}
    bars += (Bar(1 / costs[0], of=_TRITON, workload=beside, modes=modes),)
    if costs[1:]:
        bars += (Bar(1 / costs[1], of=_HOPPER, workload=beside, modes=("fwd",)),)
    return Workload(
        "flash_attention",
        f"B1 S16384 H16 d128 {label}",
        functools.partial(qkv, **sizes, options={"causal": True, **given}),
        dtype="bfloat16",
        modes=modes,
        bars=bars,
    )


def documents():
    ids = jnp.repeat(jnp.arange(_DOCUMENTS, dtype=jnp.int32), _TOKENS // _DOCUMENTS)[None]
    return {"q_segment_ids": ids, "kv_segment_ids": ids}


def options():
    rows = shape(_MODELS[0], _TOKENS // _DOCUMENTS, True)
    return [
        rows,  # that documents are short is not the cost of their ids
        option("sinks", {"softmax_aux": jnp.ones((16, 1))}, (1.06, 1.03)),
        option("soft cap 30", {"logits_soft_cap": 30.0}, (1.55, 1.60), modes=("fwd", "fwd+bwd")),
        # six times as fast as all pairs
        option(
            "window 1024",
            {"sliding_window": (_WINDOW, 0)},
            (8.25 / 6,),
            bars=(Bar(1.0, "jla", of=_HOPPER),),
        ),
        option("8 documents", documents(), (1.20, 1.30), beside=rows.name),
        option("deterministic", {"deterministic": True}, (1.25,), modes=("fwd+bwd",)),
    ]


def large_scores(std=32.0):
    """Many rows whose weights leave the range of a fixed reference, and are computed again."""
    plain = shape(_MODELS[0], 4096, True)

    def values(dtype, key):
        made = plain.values(dtype, key)
        return made | {"query": (made["query"] * std).astype(dtype)}

    return Workload(
        "flash_attention",
        f"{plain.name}, scores of std {std:g}",
        values,
        dtype="bfloat16",
        modes=("fwd",),
        known_peers=False,
        bars=(Bar(1 / 2.5, of=_HOPPER, workload=plain.name),),
    )


def separate(dtype, key):
    """Heads of 192 with values of 128, as latent attention projects them."""
    keys = jax.random.split(key, 3)
    made = qkv(dtype, key, 4, 4096, 16, 16, 128, {"causal": True})
    for name, own in zip(("query", "key"), keys, strict=False):
        made[name] = jax.random.normal(own, (4, 4096, 16, 192), jnp.float32).astype(dtype)
    return made


def latent():
    """Heads of 192 and 128, and the same behind their projections."""
    sizes = {"b": 4, "t": 4096, "s": 4096, "h": 16, "d": 128, "e": 128, "r": 64, "l": 512}
    rates = ((400.0, "fwd"), (330.0, "fwd+bwd"))
    return [
        Workload("flash_attention", "B4 S4096 H16 192/128 causal", separate, dtype="bfloat16"),
        Workload(
            "mla_attention",
            "B4 S4096 H16 192/128 latent 512",
            functools.partial(latents, **sizes),
            dtype="bfloat16",
            known_peers=False,
            bars=tuple(Bar(least, TFLOPS, modes=(mode,)) for least, mode in rates),
        ),
    ]


def shapes():
    every = itertools.product(_MODELS, _LENGTHS, (True, False))
    return [shape(*one) for one in every if one[0] != _MODELS[2] or one[2]]


WORKLOADS = [*shapes(), *options(), large_scores(), *latent()]
