"""What ptxas makes of PTX: registers, spills, and products that it runs one after the other."""

import dataclasses
import functools
import pathlib
import re
import subprocess
import tempfile

# notes of ptxas: a wgmma waits for the one before it
_SERIALISED = re.compile(r"C75(?:08|1\d)|wgmma.*serializ", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Assembled:
    """Registers and bytes of spills of a thread, and ptxas's note if it serialises products."""

    registers: int
    spilled: int
    serialised: str | None

    def __str__(self) -> str:
        note = f", products one after the other ({self.serialised})" if self.serialised else ""
        return f"{self.registers} registers, {self.spilled} bytes spilled{note}"


def _ptxas() -> str:
    """The one that Triton uses for Hopper."""
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(90).path


@functools.lru_cache(maxsize=256)
def assemble(ptx: str) -> Assembled:
    """Runs ptxas; XLA on a GPU may bring another version of it."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = re.search(r"\.target\s+(\w+)", ptx)
        arch = target[1] if target else "sm_90a"
        command = [_ptxas(), "-v", f"--gpu-name={arch}", source, "-o", f"{source}.cubin"]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode:
        raise RuntimeError(f"ptxas: {told.stderr.strip()}")
    registers = re.search(r"Used (\d+) registers", told.stderr)
    spilled = re.search(r"(\d+) bytes spill stores", told.stderr)
    note = next((x for x in told.stderr.splitlines() if _SERIALISED.search(x)), None)
    code = re.search(r"C\d{4}", note) if note else None
    return Assembled(
        int(registers[1]) if registers else 0,
        int(spilled[1]) if spilled else 0,
        (code[0] if code else note) if note else None,
    )
