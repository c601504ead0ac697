"""What a TPU offers to one kernel."""

from typing import Any

from ejkernel._device import Target

_MIB = 1 << 20
# VMEM in bytes that a kernel may use, by a part of the device's name; the rest is the compiler's
_VMEM = {"v4": 16 * _MIB, "v5 lite": 96 * _MIB, "v5e": 96 * _MIB, "v6": 96 * _MIB}
_VMEM_LEAST = 48 * _MIB


def vmem(target: Target) -> int:
    model = target.model.lower()
    return next((size for name, size in _VMEM.items() if name in model), _VMEM_LEAST)


# Scalar memory is 1 MiB on v4 to 7x: libtpu compiles a table of 1020 KiB in a kernel that does
# little else. Kernels spill scalars there too, and each operand is filled up to 1 KiB.
_SMEM = 960 * 1024


def smem_refusal(numbers: int) -> str | None:
    """Why scalar memory cannot hold the tables of a kernel, so many numbers of 4 bytes."""
    most = _SMEM // 4
    if numbers <= most:
        return None
    return f"needs tables of at most {most} numbers, which scalar memory holds; got {numbers}"


_MOST_WIDTH = 256
_FLOATS = ("bfloat16", "float32")
_NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")
_LANES = 128
_ROWS = 8


def cached(query: Any, cache: Any, other_width: int, most: int = _MOST_WIDTH) -> str | None:
    """What kernels over cached keys cannot do, by the widths of queries and of something else."""
    if query.dtype.name not in _FLOATS:
        return f"needs bfloat16 or float32, which a TPU multiplies; got {query.dtype}"
    if cache.dtype != query.dtype and cache.dtype.name not in _NARROW:
        return f"needs keys of the queries' dtype or one of {', '.join(_NARROW)}; got {cache.dtype}"
    d = query.shape[-1]
    if not (1 <= d <= most and 1 <= other_width <= most):
        return f"needs head sizes from 1 to {most}; got {d} and {other_width}"
    return None


def layout(target: Target, *widths: int) -> str | None:
    """Why XLA would copy a cache of these head sizes for a kernel.

    It keeps arrays whose last axis does not fill registers with another axis innermost.
    """
    if target.kind == "tpu" and any(width % _LANES for width in widths):
        return (
            f"needs head sizes that are multiples of {_LANES}, since XLA keeps other caches in an "
            f"order that would have to be copied; got {' and '.join(map(str, widths))}. Pad them "
            "with zeros and give `softmax_scale`"
        )
    return None


def page_rows(target: Target, size: int) -> str | None:
    """Why XLA would copy pages [..., size, width] for a kernel."""
    if target.kind == "tpu" and size % _ROWS:
        return (
            f"needs pages of a multiple of {_ROWS} keys, since XLA keeps others in an order that "
            f"would have to be copied; got {size}"
        )
    return None


def pages(tables: Any, size: int) -> str | None:
    """What kernels that copy pages cannot do; `tables` are [sequences, blocks]."""
    sequences, blocks = tables.shape
    if size > _LANES and size % _LANES:
        return f"needs pages of at most {_LANES} keys, or of a multiple of {_LANES}; got {size}"
    return smem_refusal(5 * sequences + page_numbers(blocks))


def page_numbers(blocks: int) -> int:
    """Numbers in scalar memory for the pages of a sequence: two rows, in use and under way."""
    return 4 * blocks
