"""The arguments that the attention kernels share, from a call's."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import next_power_of_2, strides_from_shape
from ejkernel.kernels._shared import precision
from ejkernel.kernels._triton._blocks import ranges
from ejkernel.kernels._triton.flash_attention import config

# Sizes that the code does not depend on: a call and its reduced twin share one compiled kernel.
# Lengths are not among them: a multiple of 16 makes loads of row vectors wide.
LOOSE = ("offset", "left", "right", "num_sinks", "span", "num_flags", "flag_rows")
_LOG2_E = 1.4426950408889634
# where a cap of half precision may err by 2.4e-6 times itself: see `pairs.below_cap`
_LOW_CAP, _HIGH_CAP = 2.0**-6, 256.0
# up to 4096 tokens up to 5 % faster on an H200, at 16384 up to 6 % slower (docs/measured.md)
_TURNS, _TURNS_LENGTH = 32, 4096


def dot_precision(dtype: Any) -> str:
    """What a product asks Triton for, which has nothing below TensorFloat-32."""
    if jnp.dtype(dtype) != jnp.float32:
        return "ieee"  # without effect on narrower inputs
    exact = precision.dot_precision(dtype) == jax.lax.Precision.HIGHEST
    return "ieee" if exact else "tf32"


class Call:
    """One attention call for kernels with a config's block sizes."""

    def __init__(self, args: Any, cfg: Any):
        config.check(args, cfg)
        self.args, self.cfg = args, cfg
        self.tokens = ranges.tokens(args)
        left, right = args.sliding_window
        windowed = (left, right) != (None, None)
        self.positions: tuple[Any, Any] = (None, None)
        if (windowed or args.alibi_slopes is not None) and self.tokens.q_positions is not None:
            self.positions = (self.tokens.q_positions, self.tokens.k_positions)
        # blocks that go beyond the end are masked, as are those at the ends of windows and segments
        self.cut_queries = bool(self.tokens.num_q % cfg.block_q)
        self.cut_keys = bool(self.tokens.num_k % cfg.block_k)
        self.cut = self.cut_queries or self.cut_keys
        self.masks = windowed or bool(self.tokens.ids) or self.cut
        self.sink_block = 1
        if args.softmax_aux is not None:
            self.sink_block = next_power_of_2(args.softmax_aux.shape[1])

    @functools.cached_property
    def mask(self) -> jax.Array | None:
        mask = self.args.attention_mask
        return None if mask is None else mask.astype(jnp.int8)

    @functools.cached_property
    def ids(self) -> list[Any]:
        flat = [x for pair in self.tokens.ids for x in pair]
        return [*flat, *[None] * (4 - len(flat))]

    def key_table(self) -> jax.Array | None:
        return self._table(ranges.key_table)

    def query_table(self) -> jax.Array | None:
        return self._table(ranges.query_table)

    def _table(self, build: Any) -> jax.Array | None:
        window, cfg = self.args.sliding_window, self.cfg
        return build(self.tokens, window, cfg.block_q, cfg.block_k)

    def operands(self, table: jax.Array | None, num_heads: int) -> list[Any]:
        """What kernels begin with, for programs of so many heads."""
        args = self.args
        sizes = [*self._sizes(table), self.span(num_heads)]
        return [args.query, args.key, args.value, *self._inputs(), table, *sizes]

    def span(self, num_heads: int) -> int:
        """How many lines, the heads of a batch, take turns: under a causal mask their longest
        blocks then start before any short one. Long lines do not: they were slower so.
        """
        causal = self.args.sliding_window[1] is not None
        if not causal or max(self.tokens.num_q, self.tokens.num_k) > _TURNS_LENGTH:
            return 1
        return math.gcd(self.args.query.shape[0] * num_heads, _TURNS)

    def _inputs(self) -> list[Any]:
        """The optional arrays, None where absent, up to the table."""
        args = self.args
        prob = args.dropout_prob
        return [
            args.bias,
            self.mask,
            args.softmax_aux,
            args.alibi_slopes,
            args.dropout_seed if prob else None,
            args.dropout_offset if prob else None,
            *self.ids,
            *self.positions,
        ]

    def _sizes(self, table: jax.Array | None) -> list[int]:
        """Lengths, window and strides."""
        args, of = self.args, self.tokens
        left, right = (x or 0 for x in args.sliding_window)
        if self.positions[0] is None:  # nothing is farther away, and sums fit into 32 bits
            left, right = (min(x, of.num_q + of.num_k) for x in (left, right))
        return [
            of.num_q,
            of.num_k,
            of.offset,
            left,
            right,
            *pair_strides(args.bias),
            *pair_strides(args.attention_mask),
            *(_row_stride(x) for x in self.ids),
            *(_row_stride(x) for x in self.positions),
            0 if table is None or table.shape[0] == 1 else table.shape[1] * table.shape[2],
            0 if args.softmax_aux is None or args.softmax_aux.shape[0] == 1 else self.num_sinks,
            self.num_sinks,
        ]

    @property
    def exact(self) -> bool:
        """Whether backward has exact weights at once: where they are not what takes the time."""
        offsets = self.args.bias is not None or self.args.alibi_slopes is not None
        return self.args.query.dtype.itemsize >= 4 or offsets

    @property
    def num_sinks(self) -> int:
        return 0 if self.args.softmax_aux is None else self.args.softmax_aux.shape[1]

    def constants(self) -> dict[str, Any]:
        args, cfg = self.args, self.cfg
        d, e = args.query.shape[-1], args.value.shape[-1]
        left, right = args.sliding_window
        extras = (args.bias, args.alibi_slopes, args.logits_soft_cap)
        # the maximum of a row is found before scaling, which a factor <= 0 would turn around
        natural = any(x is not None for x in extras) or args.softmax_scale <= 0
        units = _LOG2_E if natural else float(args.softmax_scale) * _LOG2_E
        cap = None if args.logits_soft_cap is None else float(args.logits_soft_cap)
        # what is added to capped scores is in natural units, and then they are too
        short = cap is not None and args.query.dtype.itemsize < 4 and _LOW_CAP <= cap <= _HIGH_CAP
        short &= args.bias is None and args.alibi_slopes is None
        prob = args.dropout_prob
        return {
            "D": d,
            "E": e,
            "BD": max(next_power_of_2(d), 16),
            "BE": max(next_power_of_2(e), 16),
            "BQ": cfg.block_q,
            "BK": cfg.block_k,
            "HEADS": args.query.shape[2],
            "GROUP": args.query.shape[2] // args.key.shape[2],
            "SCALE": float(args.softmax_scale),
            "NATURAL": natural,
            "UNITS": 2.0 * cap * _LOG2_E if short else units,
            "SHIFT": cap if short else 0.0,
            "CAP": cap,
            "IDS": len(self.tokens.ids),
            "LEFT": left is not None,
            "RIGHT": right is not None,
            "THRESHOLD": int(prob * 2.0**32) if prob else None,
            "KEPT": 1.0 / (1.0 - prob),
            "CUT": self.cut,
            "MASKS": self.masks,
            "PRECISION": dot_precision(args.query.dtype),
        }


def pair_strides(x: Any) -> list[int]:
    """Strides of [b, h, t, s], 0 along broadcast axes."""
    if x is None:
        return [0] * 4
    steps = strides_from_shape(x.shape)
    return [0 if size == 1 else step for size, step in zip(x.shape, steps, strict=True)]


def _row_stride(x: Any) -> int:
    return 0 if x is None or x.shape[0] == 1 else x.shape[1]
