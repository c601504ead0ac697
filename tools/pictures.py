"""Pictures of masks and recurrences, drawn from what the operations themselves compute.

Values are one-hot vectors, so that the output of a query is its row of weights: a cell is drawn
where a weight is not zero. Nothing about a mask is written down here a second time.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import (
    apply_native_sparse_attention,
    block_mask,
    blocksparse_attention,
    flash_attention,
    gla,
    lightning_attention,
    native_sparse_attention,
    ragged_decode_attention,
    scaled_dot_product_attention,
    to_zigzag,
)
from ejkernel.ops import policy_override

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "pictures"
CELL, GAP, TOP = 12, 36, 34
# Colours that can be read on white and on black: hidden, then weights from small to large.
SHADES = ("#8882", "#5c6bc055", "#5c6bc088", "#5c6bc0bb", "#5c6bc0")
TEXT = "#777"


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    shades: np.ndarray  # [rows, columns], indices of SHADES
    rows: str = "queries"
    columns: str = "keys"


def files() -> dict[pathlib.Path, str]:
    """The pictures by path."""
    with policy_override(autotune=False):
        return {
            FOLDER / f"{name}.svg": draw(make())
            for name, make in {
                "flash_attention": _flash,
                "windows": _windows,
                "alignment": _alignment,
                "blocksparse_attention": _blocksparse,
                "native_sparse_attention": _native_sparse,
                "ragged_decode_attention": _ragged_decode,
                "ring_attention": _ring,
                "linear_recurrence": _recurrences,
            }.items()
        }


def arrays(t: int, s: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random queries and keys with one head, and one-hot values."""
    keys = jax.random.split(jax.random.key(0), 2)
    query = jax.random.normal(keys[0], (1, t, 1, 8))
    key = jax.random.normal(keys[1], (1, s, 1, 8))
    return query, key, jnp.eye(s)[None, :, None]


def seen(attend: Callable[..., jax.Array], t: int, s: int) -> np.ndarray:
    """Shades of an attention call: full where a query gives a key any weight."""
    weights = np.asarray(attend(*arrays(t, s)))[0, :, 0]
    return np.where(weights > 0, len(SHADES) - 1, 0)


def attention_panel(title: str, t: int, s: int, **options) -> Panel:
    return Panel(title, seen(functools.partial(flash_attention, **options), t, s))


def _flash() -> list[Panel]:
    packed = jnp.asarray([0, 3, 3, 8])
    ids = jnp.asarray([[0, 0, 1, 1, 1, 0, -1, -1]])
    return [
        attention_panel("causal=True", 8, 8, causal=True),
        attention_panel("causal, sliding_window=2", 8, 8, causal=True, sliding_window=2),
        attention_panel("cum_seqlens_q=[0, 3, 3, 8]", 8, 8, causal=True, cum_seqlens_q=packed),
        attention_panel("q_segment_ids=[0 0 1 1 1 0 -1 -1]", 8, 8, q_segment_ids=ids),
    ]


def _windows() -> list[Panel]:
    return [
        attention_panel("sliding_window=2", 8, 8, sliding_window=2),
        attention_panel("sliding_window=(3, 1)", 8, 8, sliding_window=(3, 1)),
        attention_panel("sliding_window=(2, -1)", 8, 8, sliding_window=(2, -1)),
        attention_panel("sliding_window=2, causal", 8, 8, sliding_window=2, causal=True),
    ]


def _alignment() -> list[Panel]:
    first = functools.partial(scaled_dot_product_attention, is_causal=True)
    return [
        attention_panel("flash_attention, 3 queries", 3, 8, causal=True),
        Panel("scaled_dot_product_attention", seen(first, 3, 8)),
        attention_panel("flash_attention, 8 queries, 5 keys", 8, 5, causal=True),
    ]


def _blocksparse() -> list[Panel]:
    patterns = {
        "local(1)": block_mask.local(1),
        "strided(3)": block_mask.strided(3),
        "(local(1) | global_(1)) & causal()": (block_mask.local(1) | block_mask.global_(1))
        & block_mask.causal(),
    }

    def panel(title: str, pattern: block_mask.BlockMask, causal: bool) -> Panel:
        call = functools.partial(
            blocksparse_attention, mask_builder=pattern, block_size=2, causal=causal
        )
        return Panel(f"{title}{', causal=True' if causal else ''}", seen(call, 16, 16))

    return [panel(name, pattern, "causal" in name) for name, pattern in patterns.items()]


def _native_sparse() -> list[Panel]:
    one = jnp.ones((1, 16, 1))
    branch = functools.partial(native_sparse_attention, block_size=4, block_counts=2, window_size=5)
    lists = jnp.broadcast_to(jnp.asarray([0, 2]), (1, 16, 1, 2))
    own = functools.partial(apply_native_sparse_attention, block_indices=lists, block_size=4)
    return [
        Panel(
            "compressed: means of whole blocks", seen(functools.partial(branch, g_cmp=one), 16, 16)
        ),
        Panel("selected: block_counts=2", seen(functools.partial(branch, g_slc=one), 16, 16)),
        Panel("window: window_size=5", seen(functools.partial(branch, g_swa=one), 16, 16)),
        Panel("apply_…: blocks [0, 2] for all", seen(own, 16, 16)),
    ]


def _ragged_decode() -> list[Panel]:
    start, end = jnp.asarray([0, 2, 5, 0]), jnp.asarray([8, 6, 8, 3])
    rows = jnp.repeat(jnp.eye(8)[None, :, None], 4, axis=0)
    keys = jax.random.split(jax.random.key(0), 2)
    query = jax.random.normal(keys[0], (4, 1, 8))
    key = jax.random.normal(keys[1], (4, 8, 1, 8))

    def panel(title: str, **options) -> Panel:
        weights = ragged_decode_attention(query, key, rows, start, end, **options)[:, 0]
        shades = np.where(np.asarray(weights) > 0, len(SHADES) - 1, 0)
        return Panel(title, shades, rows="sequences")

    title = "start=[0 2 5 0], end=[8 6 8 3]"
    return [panel(title), panel("the same, sliding_window=1", sliding_window=1)]


def _ring() -> list[Panel]:
    devices = 4
    places = np.repeat(np.arange(devices), 16 // devices)
    tokens = np.asarray(to_zigzag(jnp.arange(16)[None], devices))[0]

    def panel(title: str, holder: np.ndarray) -> Panel:
        shades = np.where(holder[None] == np.arange(devices)[:, None], len(SHADES) - 1, 0)
        return Panel(title, shades, rows="devices", columns="tokens")

    return [
        panel('layout="contiguous"', places),
        panel('layout="zigzag"', places[np.argsort(tokens)]),
    ]


def _recurrences() -> list[Panel]:
    """Weights exp(sum of log gates) of earlier tokens; queries and keys are 1."""
    one, values = jnp.ones((1, 8, 1, 1)), jnp.eye(8)[None, :, None]
    strong = jnp.zeros((1, 8, 1, 1)).at[:, 4].set(-jnp.inf)

    def panel(title: str, run: Callable[..., jax.Array], **options) -> Panel:
        weights = np.asarray(run(one, one, values, softmax_scale=1.0, **options))[0, :, 0]
        # shades for at least 0.75, 0.4, 0.15 and more than 0; the weights stay away from these
        shades = sum((weights > bound).astype(int) for bound in (1e-4, 0.15, 0.4, 0.75))
        return Panel(title, shades, rows="outputs", columns="values")

    return [
        panel("no gate: sums", gla),
        panel("g_gamma=-0.3: all fade alike", lightning_attention, g_gamma=jnp.full(1, -0.3)),
        panel("g = -inf at token 4: forgets", gla, g=strong),
        panel("the same, reverse=True", gla, g=strong, reverse=True),
    ]


def draw(panels: Sequence[Panel]) -> str:
    """An SVG with two panels in a row, narrow enough for a telephone."""
    pairs = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    second = GAP + max(map(_width, panels[::2])) + GAP // 2  # left edge of the second column
    width = second + max(map(_width, panels[1::2]), default=0) + 8
    parts, top = [], 0
    for pair in pairs:
        for panel, left in zip(pair, (GAP - 16, second), strict=False):
            parts += _panel(panel, left, top)
        top += TOP + max(len(panel.shades) for panel in pair) * CELL + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" '
        f'height="{top}" font-family="sans-serif" font-size="12" fill="{TEXT}">'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _width(panel: Panel) -> int:
    return max(panel.shades.shape[1] * CELL, 6 * len(panel.title))


def _panel(panel: Panel, left: int, top: int) -> list[str]:
    title = panel.title.replace("&", "&amp;")
    middle = top + TOP + len(panel.shades) * CELL / 2
    parts = [
        f'<text x="{left}" y="{top + 12}">{title}</text>',
        f'<text x="{left}" y="{top + 27}" font-size="10">{panel.columns} →</text>',
        f'<text transform="translate({left - 6} {middle:g}) rotate(-90)" font-size="10" '
        f'text-anchor="middle">← {panel.rows}</text>',
    ]
    side = CELL - 1
    for shade, colour in enumerate(SHADES):
        cells = np.argwhere(panel.shades == shade)
        squares = [
            f"M{left + j * CELL} {top + TOP + i * CELL}h{side}v{side}h-{side}z"
            for i, j in cells.tolist()
        ]
        if squares:
            parts.append(f'<path fill="{colour}" d="{"".join(squares)}"/>')
    return parts
