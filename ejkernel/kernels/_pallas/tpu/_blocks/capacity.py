"""What a TPU offers to one kernel."""

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
