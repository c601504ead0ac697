"""The arguments that the attention kernels share, from a call's."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import Cost, next_power_of_2, strides_from_shape
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._blocks import (
    addresses,
    attention,
    block_ranges,
    logits,
    mask,
    parts,
    philox,
    ranges,
    softmax,
)
from ejkernel.kernels._triton.flash_attention import config

# above it, an error of 2e-7 of the cap matters to half precision
_LARGE_CAP = 256.0
# up to 4096 tokens up to 5 % faster on an H200, at 16384 up to 6 % slower (docs/measured.md)
_TURNS, _TURNS_LENGTH = 32, 4096


def fine_cap(dtype: Any, cap: float | None) -> bool:
    """Whether a cap has to be exact relative to small scores."""
    return jnp.dtype(dtype).itemsize >= 4 or (cap or 0.0) > _LARGE_CAP


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

    @functools.cached_property
    def mask(self) -> jax.Array | None:
        mask = self.args.attention_mask
        return None if mask is None else mask.astype(jnp.int8)

    def key_schedule(self) -> block_ranges.Schedule:
        """Of programs that hold queries."""
        return self._schedule(block_ranges.key_table, self.args.query.shape[2])

    def query_schedule(self) -> block_ranges.Schedule:
        """Of programs that hold keys."""
        return self._schedule(block_ranges.query_table, self.args.key.shape[2])

    def _schedule(self, build: Any, num_heads: int) -> block_ranges.Schedule:
        window, cfg = self.args.sliding_window, self.cfg
        table = build(self.tokens, window, cfg.block_q, cfg.block_k)
        step = None if table is None else 0 if table.shape[0] == 1 else math.prod(table.shape[1:])
        return block_ranges.Schedule(table, step, self.interleaved(num_heads))

    @property
    def causal(self) -> bool:
        return self.args.sliding_window[1] is not None

    def inputs(self, schedule: block_ranges.Schedule) -> dict[str, Any]:
        """What every kernel takes."""
        return {
            "query": self.args.query,
            "key": self.args.key,
            "value": self.args.value,
            "attention": self._attention(),
            "schedule": schedule,
        }

    def interleaved(self, num_heads: int) -> int:
        """How many (batch, head) pairs take turns: under a causal mask their longest blocks then
        start before any short one. In long calls they do not: these were slower so.
        """
        if not self.causal or max(self.tokens.num_q, self.tokens.num_k) > _TURNS_LENGTH:
            return 1
        return math.gcd(self.args.query.shape[0] * num_heads, _TURNS)

    def cost(self, products: float) -> Cost | None:
        """Of kernels that compute so many products of each head size; None if ids decide."""
        if not self.tokens.plain or self.mask is not None:
            return None
        batch, _, num_heads, d = self.args.query.shape
        num_k = self.tokens.num_k
        position = np.arange(self.tokens.num_q) + self.tokens.offset
        left, right = (num_k + len(position) if w is None else w for w in self.args.sliding_window)
        last = np.minimum(position + right, num_k - 1)
        visible = np.maximum(last - np.maximum(position - left, 0) + 1, 0).sum()
        pairs = batch * num_heads * int(visible)
        return Cost(flops=int(2 * products * pairs * (d + self.args.value.shape[-1])))

    def sinks(self) -> softmax.Sinks | None:
        x = self.args.softmax_aux
        if x is None:
            return None
        num = x.shape[1]
        return softmax.Sinks(x, 0 if x.shape[0] == 1 else num, num, next_power_of_2(num))

    def _attention(self) -> attention.Attention:
        args, of, given = self.args, self.tokens, self.positions[0] is not None
        _, _, num_heads, d = args.query.shape
        _, _, num_groups, e = args.value.shape
        limits = args.sliding_window
        if not given:  # nothing is farther away, and sums fit into 32 bits
            limits = [None if x is None else min(x, of.num_q + of.num_k) for x in limits]
        window = mask.window(limits, of.offset)
        return attention.Attention(
            num_q=of.num_q,
            num_k=of.num_k,
            HEADS=num_heads,
            KEY_HEADS=num_groups,
            GROUP=num_heads // num_groups,
            query_rows=parts.rows_of(num_heads, d),
            key_rows=parts.rows_of(num_groups, d),
            value_rows=parts.rows_of(num_groups, e),
            out_rows=parts.rows_of(num_heads, e),
            PRECISION=_launch.dot_precision(args.query.dtype),
            queries=block_ranges.token_bundle(of, 0, positions=given),
            keys=block_ranges.token_bundle(of, 1, positions=given),
            mask=mask.Mask(window, pairs(self.mask), self.cut, self.masks),
            scores=self._scores(),
            dropout=self._dropout(),
            drop_offset=args.dropout_offset if args.dropout_prob else None,
        )

    def _scores(self) -> logits.Scores:
        args = self.args
        extras = (args.bias, args.alibi_slopes, args.logits_soft_cap)
        # the maximum of a row is found before scaling, which a factor <= 0 would turn around
        natural = any(x is not None for x in extras) or args.softmax_scale <= 0
        return logits.Scores(
            bias=pairs(args.bias),
            slopes=args.alibi_slopes,
            SCALE=float(args.softmax_scale),
            CAP=None if args.logits_soft_cap is None else float(args.logits_soft_cap),
            FINE=fine_cap(args.query.dtype, args.logits_soft_cap),
            FACTOR=1.0 if natural else float(args.softmax_scale),
        )

    def _dropout(self) -> philox.Dropout | None:
        args = self.args
        if not (prob := args.dropout_prob):
            return None
        threshold, factor = int(prob * 2.0**32), 1.0 / (1.0 - prob)
        return philox.Dropout(args.dropout_seed, threshold, factor)


def pairs(x: Any) -> addresses.Pairs | None:
    """An array [b, h, t, s] with its strides, 0 along broadcast axes."""
    return None if x is None else addresses.Pairs(x, *pair_strides(x.shape))


def pair_strides(shape: Sequence[int]) -> list[int]:
    steps = strides_from_shape(shape)
    return [0 if size == 1 else step for size, step in zip(shape, steps, strict=True)]
