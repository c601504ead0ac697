"""The linear recurrence forward on a TPU: the state stays in VMEM while chunks pass by."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu.linear_recurrence import call, config
from ejkernel.ops.core.kernel import FORWARD


def forward(args: Any, cfg: config.Config) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    """Outputs (out, and the last states when asked for); no residuals."""
    of = call.Call(args, cfg, FORWARD)
    of.add_tokens("query", args.query)
    of.add_tokens("key", args.key)
    of.add_tokens("value", args.value)
    of.add_gates()
    of.add_state("initial", args.initial_state)
    results = {"out": of.per_token(of.e, args.query.dtype)}
    if args.return_state:
        results["state"] = of.last_state()
    made = of.run("linear_recurrence_fwd_kernel", _kernel, results, state_buffer(of))
    out = of.cut.join(made["out"])
    return ((out, last_states(of, made["state"])) if args.return_state else (out,)), ()


def state_buffer(of: call.Call) -> dict[str, Any]:
    return {"h": pltpu.VMEM((of.e, of.d), jnp.float32)}


def start(of: call.Call, refs: Any) -> None:
    """The state before the first step of a row or sequence."""

    @of.at_first(refs)
    def _() -> None:
        if refs.initial is None:
            refs.h[...] = jnp.zeros_like(refs.h)
        else:
            refs.h[...] = refs.initial[...]


def _kernel(of: call.Call, refs: Any) -> None:
    start(of, refs)
    chunks = of.chunks(refs)

    @of.if_used(refs)
    def _() -> None:
        h = refs.h[...]
        for part, make in chunks:
            chunk = make()
            refs.out[part] = chunk.output(h).astype(refs.out.dtype)
            h = chunk.advance(h)
        refs.h[...] = h

    if of.args.return_state:

        @of.at_last(refs)
        def _() -> None:
            refs.state[...] = refs.h[...]


def last_states(of: call.Call, states: jax.Array) -> jax.Array:
    """[n, h, d, e]; an empty sequence keeps its initial state."""
    states = states.swapaxes(2, 3)
    if not of.packed:
        return states
    initial = of.args.initial_state
    kept = jnp.zeros((), jnp.float32) if initial is None else initial.astype(jnp.float32)
    return jnp.where(of.empty(), kept, states)
