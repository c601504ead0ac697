"""Philox-4x32-10 on NumPy's 64-bit integers."""

import numpy as np

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def words(key, c0, c1, c2, c3) -> list[np.ndarray]:
    """The four 32-bit words (as uint64) of each counter under a key (low, high)."""
    k0, k1 = (np.uint64(k) for k in np.asarray(key, np.uint64))
    c = [np.asarray(x).astype(np.uint64) & _LOW for x in np.broadcast_arrays(c0, c1, c2, c3)]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> _HALF) ^ c[1] ^ k0, b & _LOW, (a >> _HALF) ^ c[3] ^ k1, a & _LOW]
        k0 = (k0 + np.uint64(0x9E3779B9)) & _LOW
        k1 = (k1 + np.uint64(0xBB67AE85)) & _LOW
    return c
