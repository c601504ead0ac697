"""Which pairs of a tile are seen: lengths, ids and windows."""

import triton
import triton.language as tl


@triton.jit
def near(q_pos, k_pos, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Pairs inside a window; positions are expanded against each other."""
    distance = k_pos - q_pos  # a limit added to a position may not fit into 32 bits
    if LEFT and RIGHT:
        return (distance <= right) & (distance >= -left)
    elif RIGHT:
        return distance <= right
    else:
        return distance >= -left


@triton.jit
def same(q_id, k_id):
    """Pairs of one segment; a negative id is padding."""
    return (q_id == k_id) & (q_id >= 0)
