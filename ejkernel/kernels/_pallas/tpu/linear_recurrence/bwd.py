"""The linear recurrence backward on a TPU: steps from the last to the first carry the gradient.

A first kernel computes the state before each step again. Gradients of gates are sums over the
decays that they are in, never a difference of long sums.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.tpu.linear_recurrence import call, config, fwd
from ejkernel.kernels._shared import sums
from ejkernel.ops.core.kernel import BACKWARD

_SOURCES = {
    "q": {"query"},
    "k": {"key"},
    "v": {"value"},
    "rows": {"g", "gk", "g_gamma"},
    "columns": {"gv"},
}


def backward(
    args: Any,
    cfg: config.Config,
    outputs: tuple[jax.Array, ...],
    residuals: tuple[()],
    cotangents: tuple[jax.Array, ...],
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Gradients of the wanted arguments."""
    of = call.Call(args, cfg, BACKWARD, backward=True)
    of.add_tokens("query", args.query)
    of.add_tokens("key", args.key)
    of.add_tokens("value", args.value)
    of.add_tokens("dout", cotangents[0])
    of.add_gates()
    dlast = cotangents[1] if args.return_state else None
    of.add_state("last", dlast)
    of.operands.add("states", _states(args, cfg), of.step_state()[1])
    results = _results(of, wanted)
    made = of.run("linear_recurrence_bwd_kernel", _kernel, results, fwd.state_buffer(of))
    grads = _public(of, made, wanted)
    if "initial_state" in wanted:
        dstart = made["dstart"].swapaxes(2, 3)
        if of.packed:
            kept = jnp.zeros((), jnp.float32) if dlast is None else dlast.astype(jnp.float32)
            dstart = jnp.where(of.empty(), kept, dstart)
        grads["initial_state"] = dstart.astype(args.initial_state.dtype)
    return grads


def _states(args: Any, cfg: config.Config) -> jax.Array:
    """The state before each step, [steps, b, h, e, d]."""
    of = call.Call(args, cfg, BACKWARD)
    of.add_tokens("key", args.key)
    of.add_tokens("value", args.value)
    of.add_gates()
    of.add_state("initial", args.initial_state)
    name, results = "linear_recurrence_states_kernel", {"states": of.step_state()}
    return of.run(name, _states_kernel, results, fwd.state_buffer(of))["states"]


def _states_kernel(of: call.Call, refs: Any) -> None:
    fwd.start(of, refs)
    chunks = of.chunks(refs)

    @of.if_used(refs)
    def _() -> None:
        h = refs.h[...]
        refs.states[...] = h
        for _, make in chunks:
            h = make().advance(h)
        refs.h[...] = h


def _results(of: call.Call, wanted: frozenset[str]) -> dict[str, tuple[Any, Any]]:
    """Shapes and specs of what is wanted; float32 for what is summed afterwards."""
    args, f32 = of.args, jnp.float32
    own = lambda x: x.dtype if x.shape[2] == of.heads else f32
    rows_dtype = args.gk.dtype if args.gk is not None and not {"g", "g_gamma"} & wanted else f32
    made = {
        "q": lambda: of.per_token(of.d, own(args.query)),
        "k": lambda: of.per_token(of.d, own(args.key)),
        "v": lambda: of.per_token(of.e, own(args.value)),
        "rows": lambda: of.token_row(f32) if _one_a_token(args) else of.per_token(of.d, rows_dtype),
        "columns": lambda: of.per_token(of.e, args.gv.dtype),
    }
    found = {n: made[n]() for n, sources in _SOURCES.items() if sources & wanted}
    if "initial_state" in wanted:
        found["dstart"] = of.last_state()
    return found


def _one_a_token(args: Any) -> bool:
    """Whether the gradient of gates is a row of numbers, not a column of the size of keys."""
    return not config.by_element(args)


def _kernel(of: call.Call, refs: Any) -> None:
    @of.at_last(refs)
    def _() -> None:
        if refs.last is None:
            refs.h[...] = jnp.zeros_like(refs.h)
        else:
            refs.h[...] = refs.last[...]

    gated = hasattr(refs, "rows") or hasattr(refs, "columns")
    made = of.chunks(refs)

    @of.if_used(refs)
    def _() -> None:
        chunks = [(part, make()) for part, make in made]
        states = [refs.states[...]]
        for _, chunk in chunks[:-1]:
            states.append(chunk.advance(states[-1]))
        dh = refs.h[...]
        for (part, chunk), h in reversed(list(zip(chunks, states, strict=True))):
            dout = refs.dout[part].astype(jnp.float32)
            dh, found = chunk.gradients(h, dh, dout, gated)
            found["q"] = found["q"] * of.scale
            for name, x in found.items():
                if (ref := getattr(refs, name, None)) is None:
                    continue
                row = name == "rows" and _one_a_token(of.args)
                where = (slice(None), part) if row else (part,)
                ref[where] = x.astype(ref.dtype)
        refs.h[...] = dh

    if hasattr(refs, "dstart"):

        @of.at_first(refs)
        def _() -> None:
            refs.dstart[...] = refs.h[...]


def _public(
    of: call.Call, made: dict[str, jax.Array], wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Gradients of the arguments of a call from those of its steps."""
    args = of.args

    def tokens(name: str) -> jax.Array:
        x = made[name]
        row = name == "rows" and _one_a_token(args)
        return of.cut.join(x.swapaxes(3, 4) if row else x)  # [b, t, h, x]

    def shared(name: str, like: jax.Array) -> jax.Array:
        """The sum over the heads that share one."""
        x = tokens(name)
        batch, t, heads, width = x.shape
        if like.shape[2] == heads:
            return x
        return x.reshape(batch, t, like.shape[2], -1, width).sum(axis=3)

    found = {
        "query": lambda: shared("q", args.query),
        "key": lambda: shared("k", args.key),
        "value": lambda: shared("v", args.value),
        "g": lambda: tokens("rows").sum(axis=-1),
        "gk": lambda: tokens("rows"),
        "gv": lambda: tokens("columns"),
        "g_gamma": lambda: sums.by_head(tokens("rows")),
    }
    arrays = args.arrays()
    return {n: made().astype(arrays[n].dtype) for n, made in found.items() if n in wanted}
