"""Times the public package of the same name; see `_public`. This file imports nothing of ours.

It is started with that package's folder before all others on the path. The timer comes from a
file, so that both packages are timed by the same code.
"""

# pyright: reportMissingImports=false

import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any


def load_timer(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("timer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["timer"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def inputs(arrays: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Random numbers of these shapes, unless they are known; tables are a permutation."""
    import jax
    import jax.numpy as jnp

    made = {}
    keys = jax.random.split(jax.random.key(0), max(len(arrays), 1))
    for key, (name, (shape, dtype)) in zip(keys, arrays.items(), strict=False):
        if name in known:
            made[name] = jnp.asarray(known[name], dtype)
        elif name == "block_tables":
            count = shape[0] * shape[1]
            made[name] = jax.random.permutation(key, count).reshape(shape).astype(dtype)
        elif name == "g":
            made[name] = jax.nn.log_sigmoid(jax.random.normal(key, shape) + 2.0).astype(dtype)
        else:
            made[name] = jax.random.normal(key, shape, jnp.float32).astype(dtype)
    return made


def flash_programs(static: dict[str, Any], d: int) -> dict[str, Callable[..., Any]]:
    """Without settings, with those that its own module sets, and with some that suit a Hopper."""
    from ejkernel.kernels._triton.flash_attention import flash_attention
    from ejkernel.ops import BwdParams, FwdParams

    names = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
    tiles = {
        "public unset": None,
        "public as set": ((64, 32 if d >= 128 else 128, 4, 2), (32, 32, 4, 2)),
        "public": ((128, 64, 8, 3), (64, 64, 4, 2)),
    }

    def program(sizes: Any) -> Callable[..., Any]:
        options: dict[str, Any] = {"causal": static.get("causal", False)}
        if sizes is not None:
            options["fwd_params"] = FwdParams(**dict(zip(names, sizes[0], strict=True)))
            options["bwd_params"] = BwdParams(**dict(zip(names, sizes[1], strict=True)))
        return lambda query, key, value: flash_attention(query, key, value, **options)

    return {name: program(sizes) for name, sizes in tiles.items()}


def other_programs(op: str, static: dict[str, Any], arrays: Any) -> dict[str, Callable[..., Any]]:
    first = lambda out: out[0] if isinstance(out, tuple) else out
    if op == "page_attention":
        from ejkernel.kernels._triton.page_attention import page_attention

        d = arrays["query"][0][-1]
        room = arrays["block_tables"][0][1] * arrays["key_cache"][0][2]
        options = {"attn_scale": d**-0.5, "max_context_len": room}
        return {
            "public": lambda query, key_cache, value_cache, context_lens, block_tables: (
                page_attention(query, key_cache, value_cache, context_lens, block_tables, **options)
            )
        }
    if op == "ragged_page_attention":
        # its kernels of that name do not compile, or never end compiling, with Triton 3.6
        return {"public unified": _public_unified}
    if op == "gla":
        from ejkernel.kernels._triton.gla import recurrent_gla

        return {"public": lambda query, key, value, g: first(recurrent_gla(query, key, value, g=g))}
    if op == "mean_pooling":
        from ejkernel.kernels._triton.mean_pooling import mean_pooling

        return {"public": lambda inputs: mean_pooling(inputs, static["chunk_size"])}
    from ejkernel.kernels._triton.native_sparse_attention import native_sparse_attention

    sizes = {"block_counts": static["block_counts"], "block_size": static["block_size"]}
    return {
        "public": lambda query, key, value, **gates: first(
            native_sparse_attention(query, key, value, **gates, **sizes)
        )
    }


def looped(fn: Callable[..., Any], values: dict[str, Any], repeats: int) -> Callable[[], Any]:
    """So many calls in one program; the first array waits for the call before."""
    import jax
    import jax.numpy as jnp

    name = next(iter(values))

    @jax.jit
    def program(values: dict[str, Any]) -> Any:
        def step(_: Any, carry: Any) -> Any:
            first, _ = carry
            return jax.lax.optimization_barrier((first, fn(**values | {name: first})))

        made = jax.eval_shape(lambda values: fn(**values), values)
        start = jnp.zeros(made.shape, made.dtype)
        return jax.lax.fori_loop(0, repeats, step, (values[name], start))[1]

    return lambda: program(values)


def split_pages(values: dict[str, Any]) -> dict[str, Any]:
    """Keys and values of interleaved pages as two arrays."""
    pages = values["kv_pages"]
    return values | {"kv_pages": (pages[:, :, 0::2].copy(), pages[:, :, 1::2].copy())}


def _public_unified(
    queries: Any, kv_pages: Any, context_lens: Any, block_tables: Any, query_start_loc: Any,
    num_seqs: Any,
) -> Any:  # fmt: skip
    """Its kernel for keys and values in two arrays; see `split_pages`."""
    from ejkernel.kernels._triton.unified_attention import unified_attention

    return unified_attention(queries, *kv_pages, context_lens, block_tables, query_start_loc)


class Worker:
    """Holds the programs of the last request."""

    def __init__(self, timer: Any):
        self.timer, self.runs = timer, {}
        self.request: dict[str, Any] = {}
        self.made: dict[str, Callable[..., Any]] = {}
        self.values: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "hello" in request:
            import ejkernel

            version = getattr(ejkernel, "__version__", "unknown")
            return {"version": version, "file": ejkernel.__file__}
        if "time" in request:
            run, repeats = self.runs[request["time"]]
            return {"ms": self.timer.measure(run, num_iters=2).median / repeats}
        if "build" in request:
            return {"failed": self.build(request["build"])}
        return {"programs": self.prepare(request)}

    def prepare(self, request: dict[str, Any]) -> list[str]:
        """Draws inputs; the names of the programs that can be built."""
        self.runs.clear()
        self.request, arrays = request, request["arrays"]
        if request["op"] == "flash_attention":
            self.made = flash_programs(request["static"], arrays["query"][0][-1])
        else:
            self.made = other_programs(request["op"], request["static"], arrays)
        self.values = inputs(arrays, request["known"])
        return list(self.made)

    def build(self, name: str) -> str:
        """Compiles and runs a program once; why it failed, or ""."""
        import jax

        fn = self.made[name]
        try:
            own = split_pages(self.values) if fn is _public_unified else self.values
            run = self.program(fn, own, self.request["mode"], self.request["repeats"])
            jax.block_until_ready(run[0]())
        except Exception as error:  # noqa: BLE001 - of any type; its row tells it
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self.runs[name] = run
        return ""

    def program(
        self, fn: Any, values: dict[str, Any], mode: str, repeats: int
    ) -> tuple[Callable[[], Any], int]:
        """A compiled program, and how many calls it makes."""
        import jax
        import jax.numpy as jnp

        if mode == "fwd" and repeats > 1:
            return looped(fn, values, repeats), repeats
        if mode == "fwd":
            forward = jax.jit(lambda values: fn(**values))
            return (lambda: forward(values)), 1
        floats = [n for n, x in values.items() if jnp.issubdtype(x.dtype, jnp.floating)]
        cotangent = jnp.ones_like(jax.eval_shape(lambda: fn(**values)))

        @jax.jit
        def both(values: dict[str, Any], cotangent: Any) -> Any:
            point = {name: values[name] for name in floats}
            out, pull = jax.vjp(lambda some: fn(**{**values, **some}), point)
            return out, pull(cotangent)

        return (lambda: both(values, cotangent)), 1


def main() -> None:
    folder, _, timer = sys.argv[1:4]
    # libraries write to the standard output, too; answers keep it for themselves
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = None
    for line in sys.stdin:
        try:
            worker = worker or Worker(load_timer(timer))
            reply = worker.answer(json.loads(line))
            where = pathlib.Path(reply.pop("file", folder)).resolve()
            if pathlib.Path(folder).resolve() not in (where, *where.parents):
                reply = {"error": f"another package of that name comes first: {where}"}
        except Exception as error:  # noqa: BLE001 - the other process is told, and goes on
            reply = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
