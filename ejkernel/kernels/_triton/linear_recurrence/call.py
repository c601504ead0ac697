"""The arguments that the kernels of the linear recurrence share, from a call's."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton.language as tl

from ejkernel.callib import next_power_of_2
from ejkernel.kernels._shared import precision
from ejkernel.kernels._specs.linear_recurrence import num_heads
from ejkernel.kernels._triton._blocks import chunks, decays


class Sizes(NamedTuple):
    """Heads and head sizes, and how exact products are."""

    HEADS: tl.constexpr
    D: tl.constexpr
    E: tl.constexpr
    PRECISION: tl.constexpr  # of products of the call's own arrays
    STATE_PRECISION: tl.constexpr  # of products with states


def operand(x: jax.Array, heads: int) -> chunks.Operand:
    """An array [b, t, own heads, width], or [b, t, heads]."""
    own, width = x.shape[2], x.shape[3] if x.ndim == 4 else 1
    return chunks.Operand(x, own * width, width, heads // own)


class Call:
    """One call for kernels with a config's chunks."""

    def __init__(self, args: Any, block_t: int):
        self.args = args
        self.batch, self.t, _, self.d = args.query.shape
        self.e, self.heads = args.value.shape[-1], num_heads(args)
        packed = args.cu_seqlens is not None
        self.rows = args.cu_seqlens.shape[0] - 1 if packed else self.batch
        self.chunks, count = chunks.cut(self.t, block_t, args.cu_seqlens, args.reverse)
        self.num_chunks = count if packed else self.batch * count
        self.scale = float(args.softmax_scale)
        dtype = args.query.dtype
        lowered = precision.dot_precision(dtype) != jax.lax.Precision.HIGHEST
        exact = "ieee" if dtype != jnp.float32 or not lowered else "tf32"
        # Products round states to bfloat16 anyway; float16 has too few exponents for them.
        self.state_dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
        states = "tf32" if dtype == jnp.float16 else exact
        self.sizes = Sizes(self.heads, self.d, self.e, exact, states)
        self.gates = decays.Gates(
            None if args.g is None else operand(args.g, self.heads),
            None if args.gk is None else operand(args.gk, self.heads),
            args.g_gamma,
            _terms(args),
        )

    @property
    def padded_e(self) -> int:
        return max(next_power_of_2(self.e), 16)

    @property
    def padded_d(self) -> int:
        return max(next_power_of_2(self.d), 16)

    def initial_state(self) -> jax.Array:
        """The states before the first token, in float32."""
        if self.args.initial_state is not None:
            return self.args.initial_state.astype(jnp.float32)
        return jnp.zeros((self.rows, self.heads, self.d, self.e), jnp.float32)

    def operand(self, name: str) -> chunks.Operand:
        return operand(getattr(self.args, name), self.heads)

    def block_e(self, cfg: Any) -> int:
        return min(cfg.block_e, self.padded_e)

    def inputs(self, *names: str) -> dict[str, Any]:
        """What every kernel takes, and arrays of the call."""
        shared = {"gates": self.gates, "chunks": self.chunks, "sizes": self.sizes}
        return {name: self.operand(name) for name in names} | shared

    def zeroed(self, *names: str) -> tuple[str, ...]:
        """Outputs that tokens of no sequence leave unwritten."""
        return names if self.args.cu_seqlens is not None else ()


def nothing_to_do(args: Any) -> bool:
    """True without a token of a sequence: outputs are then zeros, and states stay."""
    batch, t, _, _ = args.query.shape
    rows = batch if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    return not (t and rows)


def _terms(args: Any) -> int:
    """How many bfloat16 numbers stand for a gate in sums; 0: float32 products."""
    if args.query.dtype == jnp.float32:
        return 0
    alone = args.g is None and args.g_gamma is None
    return 1 if alone and args.gk is not None and args.gk.dtype == jnp.bfloat16 else 2
