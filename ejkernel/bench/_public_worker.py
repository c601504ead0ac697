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

OPS = ("flash_attention", "page_attention", "gla", "mean_pooling", "native_sparse_attention")


def load_timer(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("timer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["timer"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def inputs(arrays: dict[str, Any]) -> dict[str, Any]:
    """Random numbers of these shapes; lengths are full and tables a permutation."""
    import jax
    import jax.numpy as jnp

    made = {}
    keys = jax.random.split(jax.random.key(0), max(len(arrays), 1))
    for key, (name, (shape, dtype)) in zip(keys, arrays.items(), strict=False):
        if name == "context_lens":
            blocks, size = arrays["block_tables"][0][1], arrays["key_cache"][0][2]
            made[name] = jnp.full(shape, blocks * size, dtype)
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


class Worker:
    """Holds the programs of the last request."""

    def __init__(self, timer: Any):
        self.timer, self.runs = timer, {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "hello" in request:
            import ejkernel

            version = getattr(ejkernel, "__version__", "unknown")
            return {"version": version, "ops": OPS, "file": ejkernel.__file__}
        if "time" in request:
            return {"ms": self.timer.measure(self.runs[request["time"]], num_iters=2).median}
        return {"programs": self.prepare(request)}

    def prepare(self, request: dict[str, Any]) -> dict[str, str]:
        """Compiles and runs each program once; why it failed, or ""."""
        import jax

        self.runs.clear()
        op, static, arrays = request["op"], request["static"], request["arrays"]
        if op == "flash_attention":
            made = flash_programs(static, arrays["query"][0][-1])
        else:
            made = other_programs(op, static, arrays)
        values, said = inputs(arrays), {}
        for name, fn in made.items():
            try:
                run = self.program(fn, values, request["mode"])
                jax.block_until_ready(run())
            except Exception as error:  # noqa: BLE001 - another library's failure is a result
                said[name] = f"{type(error).__name__}: {str(error)[:200]}"
            else:
                self.runs[name], said[name] = run, ""
        return said

    def program(self, fn: Any, values: dict[str, Any], mode: str) -> Callable[[], Any]:
        import jax
        import jax.numpy as jnp

        if mode == "fwd":
            forward = jax.jit(lambda values: fn(**values))
            return lambda: forward(values)
        floats = [n for n, x in values.items() if jnp.issubdtype(x.dtype, jnp.floating)]
        cotangent = jnp.ones_like(jax.eval_shape(lambda: fn(**values)))

        @jax.jit
        def both(values: dict[str, Any], cotangent: Any) -> Any:
            point = {name: values[name] for name in floats}
            out, pull = jax.vjp(lambda some: fn(**{**values, **some}), point)
            return out, pull(cotangent)

        return lambda: both(values, cotangent)


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
