"""Small calls of the Triton kernels that touch every kind of memory access, for a memory checker.

compute-sanitizer --tool memcheck python benchmarks/gpu_memcheck.py
"""

import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention

B, T, S, H, G, D = 2, 70, 93, 4, 2, 40


def calls():
    """Options of at most twenty calls, at sizes that no block divides."""
    key = jax.random.key(5)
    ids = jnp.cumsum(jnp.arange(S) % 31 == 0)[None].repeat(B, 0).astype(jnp.int32)
    yield {}
    yield {"causal": True}
    yield {"sliding_window": (17, 5)}
    yield {"causal": True, "softmax_aux": jnp.ones((H, 3))}
    yield {"q_segment_ids": ids[:, :T], "kv_segment_ids": ids}
    yield {"attention_mask": jax.random.bernoulli(key, 0.7, (B, 1, T, S))}
    yield {"bias": jax.random.normal(key, (1, H, T, S))}
    yield {"bias": jax.random.normal(key, (1, H, 1, S)), "logits_soft_cap": 20.0}
    yield {"alibi_slopes": jnp.linspace(0.1, 1.0, H), "causal": True}
    yield {"dropout_prob": 0.2, "dropout_seed": jnp.array([1, 2], jnp.uint32)}
    yield {"deterministic": True, "bias": jax.random.normal(key, (B, 1, T, 1))}


def arrays(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((B, T, H, D), (B, S, G, D), (B, S, G, D - 16))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def main():
    made = [(options, jnp.bfloat16) for options in calls()]
    made += [(options, jnp.float32) for options in list(calls())[:8]]
    for options, dtype in made:

        def loss(q, k, v, options=options):
            out = flash_attention(q, k, v, platform="triton", **options)
            return out.astype(jnp.float32).sum()

        grads = jax.grad(loss, (0, 1, 2))(*arrays(dtype))
        assert all(bool(jnp.isfinite(g).all()) for g in grads), options
    print(f"{len(made)} calls")


if __name__ == "__main__":
    main()
