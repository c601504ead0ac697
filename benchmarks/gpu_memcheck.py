"""Small calls of the Triton kernels, forward and backward, for a memory checker.

export EJKERNEL_AUTOTUNE_POLICY=heuristics
compute-sanitizer --tool memcheck python benchmarks/gpu_memcheck.py

Attention: sizes that no block divides, all options and gradients, ids and positions that are given,
blocks that are computed again because padding holds nan, and calls that a vmap folds into one grid.
Serving: tables with ids of no page, lengths beyond tables, and slots beyond the cache. Other ops:
the first of their test cases, whose sizes no block divides.
"""

import itertools

import jax
import jax.numpy as jnp

from ejkernel import modules
from ejkernel.kernels import kernel_registry
from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

B, T, S, H, G, D = 2, 70, 93, 4, 2, 40
# pages, their size, blocks of a table, sequences, tokens, latent and rope sizes
P, W, M, N, TOKENS, L, R = 11, 12, 9, 4, 41, 72, 24


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


def serving_calls(dtype):
    """Names, ops and arguments of calls over pages, of which some tables and lengths are bad."""
    drawn = iter(range(100))

    def normal(*shape, kind=dtype):
        return jax.random.normal(jax.random.key(next(drawn)), shape, jnp.float32).astype(kind)

    good = jnp.arange(N * M, dtype=jnp.int32).reshape(N, M) % P
    bad = jnp.resize(jnp.array([2**31 - 1, -(2**31), P, -1, 2**30], jnp.int32), (N, M))
    lens = jnp.array([W * M, 0, 17, 61], jnp.int32)
    far = jnp.array([2**31 - 1, -5, W * M + 1, 10**6], jnp.int32)
    starts = jnp.array([0, 1, 2, 20, TOKENS - 2], jnp.int32)
    wild = jnp.array([-7, 30, 5, 2**30, 2**31 - 1], jnp.int32)
    slots = jnp.array([0, P * W - 1, P * W, -1, 2**31 - 1, -(2**31), 5, 7], jnp.int32)
    for name, tables, context, begins in (
        ("good", good, lens, starts),
        ("bad ids", bad, lens, starts),
        ("bad lengths", bad, far, wild),
    ):
        packed = {
            "query_start_loc": begins,
            "num_seqs": jnp.array(7 if name == "bad lengths" else N),
        }
        ids = {"context_lens": context, "block_tables": tables, "sliding_window": 50}
        caches = {"key_cache": normal(P, G, W, D), "value_cache": normal(P, G, W, D - 16)}
        yield name, "page_attention", {"query": normal(N, H, D)} | caches | ids
        pages = {"queries": normal(TOKENS, H, D), "kv_pages": normal(P, W, 2 * G, D)}
        yield name, "ragged_page_attention", pages | ids | packed
        latents = {"q_nope": normal(TOKENS, H, L), "q_pe": normal(TOKENS, H, R)}
        latents |= {"kv_pages": normal(P, W, L + R), "softmax_scale": 0.1}
        yield name, "mla_page_attention", latents | ids | packed
        rows = {"key": normal(N, S, G, D), "value": normal(N, S, G, D - 16)}
        ends = {"sequence_start": context - 40, "sequence_end": context}
        yield name, "ragged_decode_attention", {"query": normal(N, H, D)} | rows | ends
    n = len(slots)
    caches = {"key_cache": normal(P, G, W, D), "value_cache": normal(P, G, W, D - 16)}
    new = {"keys": normal(n, G, D), "values": normal(n, G, D - 16), "slot_mapping": slots}
    yield "slots", "update_paged_cache", caches | new
    new = {"keys": normal(n, G, D), "values": normal(n, G, D), "slot_mapping": slots}
    yield "slots", "update_kv_pages", {"kv_pages": normal(P, W, 2 * G, D)} | new
    new = {"latents": normal(n, L), "ropes": normal(n, R), "slot_mapping": slots}
    yield "slots", "update_latent_pages", {"kv_pages": normal(P, W, L + R)} | new


def serve(op, values):
    """The outputs of a call, whose arrays are traced."""
    fixed = {n: x for n, x in values.items() if not isinstance(x, jax.Array)}
    arrays = {n: x for n, x in values.items() if n not in fixed}
    call = lambda arrays: getattr(modules, op)(**arrays, **fixed, platform="triton")
    return jax.jit(call)(arrays)


OTHERS = (
    *("blocksparse_attention", "native_sparse_attention", "apply_native_sparse_attention"),
    *("linear_recurrence", "grouped_matmul", "mean_pooling", "recurrent"),
)
CASES = 4  # of each of these ops


def other_calls(dtype):
    """Ops, arguments and platforms of the first test cases that the kernels serve, both ways."""
    for op, platform in (*((op, "triton") for op in OTHERS), ("mean_pooling", "cuda")):
        spec = kernel_registry.spec(op)
        entry = next(e for e in kernel_registry.list(op) if e.name == f"{platform}/gpu")
        key = jax.random.key(7)
        made = ((case, spec.make(case, dtype, key)) for case in spec.cases())
        able = (case for case, args in made if entry.why_not(args, direction="backward") is None)
        for case in itertools.islice(able, CASES):
            yield op, case.values(dtype, key), platform


def differentiate(op, values, platform):
    """Gradients of a call for all arrays that have them; all its arrays are traced."""
    fixed = {n: x for n, x in values.items() if not hasattr(x, "shape")}
    arrays = {n: x for n, x in values.items() if n not in fixed}
    names = kernel_registry.spec(op).differentiable
    wanted = {n: x for n, x in arrays.items() if n in names}
    others = {n: x for n, x in arrays.items() if n not in wanted}

    def loss(wanted, others):
        outputs = getattr(modules, op)(**fixed, **others, **wanted, platform=platform)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(outputs))

    return jax.jit(jax.grad(loss))(wanted, others)


def main():
    made = [(*call, jnp.bfloat16) for call in calls()]
    made += [(*call, jnp.float32) for call in list(calls())[2:]]
    for name, options, dtype in made:
        for gradient in jax.tree.leaves(run(name, options, dtype)):
            assert bool(jnp.isfinite(gradient).all()), (name, dtype)
    served = [call for dtype in (jnp.bfloat16, jnp.float32) for call in serving_calls(dtype)]
    for name, op, values in served:
        for output in jax.tree.leaves(serve(op, values)):
            assert bool(jnp.isfinite(output.astype(jnp.float32)).all()), (name, op)
    others = [call for dtype in (jnp.bfloat16, jnp.float32) for call in other_calls(dtype)]
    for call in others:
        jax.block_until_ready(differentiate(*call))
    print(f"{len(made) + len(served) + len(others)} calls")


if __name__ == "__main__":
    main()
