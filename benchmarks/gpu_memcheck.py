"""Small calls of the Triton attention kernels, forward and backward, for a memory checker.

compute-sanitizer --tool memcheck python benchmarks/gpu_memcheck.py

Sizes that no block divides, all options and gradients, ids and positions that are given, blocks
that are computed again because padding holds nan, and calls that a vmap folds into one grid.
"""

import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

B, T, S, H, G, D = 2, 70, 93, 4, 2, 40


def calls():
    """Names, and options of calls."""
    key = jax.random.key(5)
    ids = jnp.cumsum(jnp.arange(S) % 31 == 0)[None].repeat(B, 0).astype(jnp.int32)
    segments = {"q_segment_ids": ids[:, :T], "kv_segment_ids": ids}
    mask = jax.random.bernoulli(key, 0.7, (B, 1, T, S)).at[..., 0].set(False)
    yield "plain", {}
    yield (
        "packed",
        {
            "cum_seqlens_q": jnp.array([0, 21, 70]),
            "cum_seqlens_k": jnp.array([0, 40, 93]),
            "causal": True,
            **{name: x[:1] for name, x in segments.items()},
        },
    )
    yield (
        "lengths",
        {
            "cum_seqlens_q": jnp.array([0, 61, 131]),
            "cum_seqlens_k": jnp.array([0, 93, 150]),
        },
    )
    yield "sinks", {"causal": True, "softmax_aux": jnp.ones((H, 3))}
    yield "segments", {"sliding_window": (17, 5), "logits_soft_cap": 0.7, **segments}
    yield "bias", {"bias": jax.random.normal(key, (1, H, 1, S)), "logits_soft_cap": 20.0}
    yield "ordered", {"bias": jax.random.normal(key, (B, 1, T, 1)), "deterministic": True}
    yield "hidden", {"attention_mask": mask}
    yield (
        "positions",
        {
            "mask_info": MaskInfo(
                q_positions=jnp.arange(T)[None].repeat(B, 0) * 2,
                kv_positions=jnp.arange(S)[None].repeat(B, 0),
            ),
            "causal": True,
        },
    )
    yield "batched", {"alibi_slopes": jnp.linspace(0.1, 1.0, H), "causal": True}
    yield "dropout", {"dropout_prob": 0.2, "dropout_seed": jnp.array([1, 2], jnp.uint32)}


def arrays(name, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((B, T, H, D), (B, S, G, D), (B, S, G, D - 16))
    q, k, v = (jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))
    if name == "packed":
        return [x[:1] for x in (q, k, v)]
    if name == "lengths":  # of 61 queries, and of 57 keys
        return [q.at[0, 61:].set(jnp.nan), *(x.at[1, 57:].set(jnp.nan) for x in (k, v))]
    return [q, k, v]


def run(name, options, dtype):
    """All gradients of a call."""
    fixed = {n: x for n, x in options.items() if n not in ("bias", "softmax_aux")}
    wanted = {n: x for n, x in options.items() if n not in fixed}

    def loss(arrays, wanted):
        out = flash_attention(*arrays, platform="triton", **fixed, **wanted)
        return out.astype(jnp.float32).sum()

    gradients, inputs = jax.grad(loss, (0, 1)), arrays(name, dtype)
    if name == "batched":
        inputs = [jnp.stack([x, 2 * x]) for x in inputs]
        return jax.vmap(gradients, (0, None))(inputs, wanted)
    return gradients(inputs, wanted)


def main():
    made = [(*call, jnp.bfloat16) for call in calls()]
    made += [(*call, jnp.float32) for call in list(calls())[2:]]
    for name, options, dtype in made:
        for gradient in jax.tree.leaves(run(name, options, dtype)):
            assert bool(jnp.isfinite(gradient).all()), (name, dtype)
    print(f"{len(made)} calls")


if __name__ == "__main__":
    main()
