"""Continuous batching on a paged cache: requests come and go, and share one pool of pages.

A tiny decoder with random weights writes greedily. A finished request's pages go to the next one in
line. At the end every answer is computed again without a cache, and must be the same to the token.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel.modules import flash_attention, ragged_page_attention_v3
from ejkernel.ops import policy_override

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 4, 2, 32, 256
WIDTH = HEADS * HEAD_DIM
PAGE, BLOCKS = 16, 8  # tokens of a page, pages a request may have
SLOTS, TOKENS = 4, 32  # requests and tokens of one step

Params = dict[str, Any]


@dataclasses.dataclass
class Request:
    prompt: list[int]
    wanted: int  # tokens to write
    answer: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # tokens whose keys are in the pages

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer


class Pool:
    """Free pages; the last one given back is the first one used again."""

    def __init__(self, count: int):
        self.count, self.free, self.given = count, list(range(count)), 0

    @property
    def used(self) -> int:
        return self.count - len(self.free)

    def take(self, count: int) -> list[int]:
        self.given += count
        return [self.free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self.free += pages


def make_params(seed: int) -> Params:
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 4 * LAYERS))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    layers = [
        {
            "qkv": matrix(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
            "out": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 2 * WIDTH),
            "down": matrix(2 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {"embed": matrix(VOCAB, WIDTH) * 4, "layers": layers, "head": matrix(WIDTH, VOCAB)}


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def project(layer: Params, x: jax.Array) -> list[jax.Array]:
    """Queries, keys and values [n, heads, d] of tokens [n, width]."""
    heads = (norm(x) @ layer["qkv"]).reshape(len(x), -1, HEAD_DIM)
    return jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)


def finish_layer(layer: Params, x: jax.Array, attended: jax.Array) -> jax.Array:
    x = x + attended.reshape(len(x), WIDTH) @ layer["out"]
    return x + jax.nn.silu(norm(x) @ layer["up"]) @ layer["down"]


def decode_step(
    platform: str,
    params: Params,
    caches: list[jax.Array],
    tokens: jax.Array,
    last: jax.Array,
    *batch: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """Caches with the step's tokens, and the next token of every slot."""
    x, kept = params["embed"][tokens], []
    for layer, cache in zip(params["layers"], caches, strict=True):
        qkv = project(layer, x)
        attended, cache = ragged_page_attention_v3(*qkv, cache, *batch, platform=platform)
        x = finish_layer(layer, x, attended)
        kept.append(cache)
    return kept, jnp.argmax(norm(x[last]) @ params["head"], axis=-1)


@jax.jit
def full_pass(params: Params, tokens: jax.Array) -> jax.Array:
    """The token after each of a text, all computed again; lengths are padded on the right."""
    x = params["embed"][tokens]
    for layer in params["layers"]:
        q, k, v = (y[None] for y in project(layer, x))
        x = finish_layer(layer, x, flash_attention(q, k, v, causal=True)[0])
    return jnp.argmax(norm(x) @ params["head"], axis=-1)


def recompute(params: Params, request: Request) -> list[int]:
    """The answer of a request, from the whole text each time."""
    text = list(request.prompt)
    for _ in range(request.wanted):
        padded = np.zeros(BLOCKS * PAGE, np.int32)
        padded[: len(text)] = text
        text.append(int(full_pass(params, padded)[len(text) - 1]))
    return text[len(request.prompt) :]


class Server:
    """Admits requests while pages last, and runs all that are admitted in every step."""

    def __init__(
        self, params: Params, requests: Sequence[Request], pages: int, platform: str = "auto"
    ):
        self.params, self.waiting, self.running = params, deque(requests), []
        self.done: list[Request] = []
        self.pool, self.steps, self.written, self.most = Pool(pages), 0, 0, 0
        shape = (pages, PAGE, 2 * KV_HEADS, HEAD_DIM)
        # what nobody has written may be anything
        self.caches = [jnp.full(shape, jnp.nan) for _ in range(LAYERS)]
        self.platform = platform
        self.step_fn = jax.jit(functools.partial(decode_step, platform), donate_argnums=1)

    def admit(self) -> None:
        """First come, first served; a request gets all its pages at once, so none gets stuck."""
        while self.waiting and len(self.running) < SLOTS:
            need = -(-(len(self.waiting[0].prompt) + self.waiting[0].wanted) // PAGE)
            if need > len(self.pool.free):
                return
            request = self.waiting.popleft()
            request.pages = self.pool.take(need)
            self.running.append(request)

    def batch(self) -> tuple[list[tuple[Request, int]], list[np.ndarray]]:
        """Requests with their tokens of this step, those that decode first; and the arrays."""
        left, share = TOKENS, []
        order = sorted(self.running, key=lambda r: len(r.text) - r.cached != 1)
        for request in order:
            count = min(len(request.text) - request.cached, left)  # a long prompt takes some steps
            share.append((request, count))
            left -= count
        tokens, lens = np.zeros(TOKENS, np.int32), np.zeros(SLOTS, np.int32)
        starts, tables = np.zeros(SLOTS + 1, np.int32), np.full((SLOTS, BLOCKS), -1, np.int32)
        for i, (request, count) in enumerate(share):
            begin, end = request.cached, request.cached + count
            starts[i + 1] = starts[i] + count
            tokens[starts[i] : starts[i + 1]] = request.text[begin:end]
            lens[i], tables[i, : len(request.pages)] = end, request.pages
        starts[len(share) + 1 :] = starts[len(share)]
        decoding = sum(len(r.text) - r.cached == 1 and count == 1 for r, count in share)
        distribution = np.array([decoding, decoding, len(share)], np.int32)
        last = np.maximum(starts[1:] - 1, 0)
        return share, [tokens, last, lens, tables, starts, distribution]

    def explain(self) -> Any:
        """Which kernel attends in every step, and why."""
        _, (_, _, *batch) = self.batch()
        heads = (HEADS, KV_HEADS, KV_HEADS)
        qkv = [jax.ShapeDtypeStruct((TOKENS, n, HEAD_DIM), jnp.float32) for n in heads]
        return ejkernel.explain(
            ragged_page_attention_v3, *qkv, self.caches[0], *batch, platform=self.platform
        )

    def step(self) -> None:
        self.admit()
        share, arrays = self.batch()
        self.most = max(self.most, self.pool.used)
        self.caches, following = self.step_fn(self.params, self.caches, *arrays)
        self.steps += 1
        for (request, count), token in zip(share, np.asarray(following).tolist(), strict=False):
            request.cached += count
            if request.cached < len(request.text):
                continue  # the rest of its prompt comes in the next step
            request.answer.append(token)
            self.written += 1
            if len(request.answer) == request.wanted:
                self.running.remove(request)
                self.pool.give_back(request.pages)
                self.done.append(request)


def make_requests(count: int, tokens: int, seed: int) -> list[Request]:
    """Prompts of different lengths, some longer than a step."""
    rng = np.random.default_rng(seed)
    longest = BLOCKS * PAGE - tokens
    return [
        Request(
            prompt=rng.integers(0, VOCAB, rng.integers(1, min(60, longest))).tolist(),
            wanted=int(rng.integers(max(tokens // 2, 1), tokens + 1)),
        )
        for _ in range(count)
    ]


def show(server: Server, seconds: float, final: bool = False) -> None:
    """One line that writes over itself on a terminal, and a few lines elsewhere."""
    line = (
        f"step {server.steps:4d}  {server.written / max(seconds, 1e-9):7.1f} tokens/s  "
        f"pages {server.pool.used:3d}/{server.pool.count}  running {len(server.running)}  "
        f"waiting {len(server.waiting):2d}  done {len(server.done):2d}"
    )
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if final else "", flush=True)
    elif final or server.steps % 25 == 0:
        print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--pages", type=int, default=14, help="pages of the pool")
    parser.add_argument("--steps", type=int, default=10_000, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--platform", default="auto", help="such as triton or xla")
    chosen = parser.parse_args(argv)
    if not 1 <= chosen.tokens < BLOCKS * PAGE or chosen.pages < BLOCKS:
        parser.error(f"--tokens must be in [1, {BLOCKS * PAGE}), --pages at least {BLOCKS}")

    params = make_params(chosen.seed)
    requests = make_requests(chosen.requests, chosen.tokens, chosen.seed)
    with policy_override(autotune=False):  # small calls, not worth measuring
        server = Server(params, requests, chosen.pages, chosen.platform)
        found = server.explain()
        if found.forward.entry is None:
            parser.error(f"--platform {chosen.platform}: {found.forward.problem}")
        print(f"{found.op} runs {found.forward.entry} on {found.device}")
        begin = time.monotonic()
        while (server.waiting or server.running) and server.steps < chosen.steps:
            server.step()
            show(server, time.monotonic() - begin)
        show(server, time.monotonic() - begin, final=True)
        for request in server.done:
            assert request.answer == recompute(params, request), "the cache changed an answer"
    if len(server.done) == len(requests):
        assert server.pool.used == 0, "a page was lost"
    print(
        f"{len(server.done)} of {len(requests)} answers equal full recomputation; "
        f"{server.pool.given} pages given out of {server.pool.count}, at most {server.most} at once"
    )
    return 0 if len(server.done) == len(requests) else 1


if __name__ == "__main__":
    sys.exit(main())
