"""What a TPU offers to one kernel."""

from ejkernel._device import Target

_MIB = 1 << 20
# VMEM in bytes that a kernel may use, by a part of the device's name; the rest is the compiler's
_VMEM = {"v4": 16 * _MIB, "v5 lite": 96 * _MIB, "v5e": 96 * _MIB, "v6": 96 * _MIB}
_VMEM_LEAST = 48 * _MIB


def vmem(target: Target) -> int:
    model = target.model.lower()
    return next((size for name, size in _VMEM.items() if name in model), _VMEM_LEAST)
