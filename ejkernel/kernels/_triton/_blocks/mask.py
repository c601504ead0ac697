"""Which pairs of a tile are seen: lengths, ids and windows."""

import triton
import triton.language as tl


@triton.jit
def near(
    q_pos, k_pos, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, ROOMY: tl.constexpr
):  # fmt: skip
    """Pairs inside a window; positions are expanded against each other.

    ROOMY: a limit added to a position fits into 32 bits. Elsewhere it stops at their ends.
    """
    if ROOMY:
        low, high = q_pos - left, q_pos + right
    else:
        low = tl.maximum(q_pos, -2147483648 + left) - left
        high = tl.minimum(q_pos, 2147483647 - right) + right
    if LEFT and RIGHT:
        return (k_pos <= high) & (k_pos >= low)
    elif RIGHT:
        return k_pos <= high
    else:
        return k_pos >= low


@triton.jit
def distance(q_pos, k_pos, ROOMY: tl.constexpr):
    """Key position less query position, float32. ROOMY: as for `near`."""
    if ROOMY:
        return (k_pos - q_pos).to(tl.float32)
    else:  # of unlike signs it may not fit into 32 bits, and then nothing cancels
        far = k_pos.to(tl.float32) - q_pos.to(tl.float32)
        return tl.where((k_pos ^ q_pos) < 0, far, (k_pos - q_pos).to(tl.float32))


@triton.jit
def same(q_id, k_id):
    """Pairs of one segment; a negative id is padding."""
    return (q_id == k_id) & (q_id >= 0)
