"""Which pairs of a tile are seen: lengths, ids and windows."""

import triton
import triton.language as tl


@triton.jit
def near(
    q_pos, k_pos, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, ROOMY: tl.constexpr
):  # fmt: skip
    """Pairs inside a window; positions are expanded against each other.

    ROOMY: a limit added to a position fits into 32 bits, which takes fewer instructions a pair.
    """
    if ROOMY:
        low, high, x = q_pos - left, q_pos + right, k_pos
    else:
        low, high, x = -left, right, k_pos - q_pos
    if LEFT and RIGHT:
        return (x <= high) & (x >= low)
    elif RIGHT:
        return x <= high
    else:
        return x >= low


@triton.jit
def same(q_id, k_id):
    """Pairs of one segment; a negative id is padding."""
    return (q_id == k_id) & (q_id >= 0)
