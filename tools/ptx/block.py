"""One program of a launch: its registers, its work in flight, and the loop over instructions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tools.ptx import faults, memory, table, text

_MOST_STEPS = 5_000_000


class Block:
    """The threads of one program, which run in lockstep.

    Registers hold an array with a value per thread: unsigned bits, or bools for a predicate.
    """

    def __init__(
        self,
        program: text.Program,
        memory_: memory.GlobalMemory,
        shared_bytes: int,
        parameters: dict[str, int],
        place: tuple[tuple[int, ...], tuple[int, ...]],
        report: Callable[[str], None],
    ) -> None:
        self.program, self.memory, self.parameters = program, memory_, parameters
        self.threads = program.threads
        thread = np.arange(self.threads)
        self.warp = (thread // 32).astype(np.int16)
        self.everyone = np.ones(self.threads, bool)
        self.current: text.Instruction = program.instructions[0]
        self.shared = memory.SharedMemory(
            shared_bytes,
            -(-self.threads // 32),
            1 if program.touches_single_bytes else 2,
            lambda what: report(f"{self.current}: {what}"),
        )
        # groups in flight, the last of which is still open
        self.copies: list[list[Any]] = [[]]
        self.products: list[list[Any]] = [[]]
        self._registers: dict[str, np.ndarray] = {}
        self._constants: dict[tuple[int, int], np.ndarray] = {}
        index, grid = place
        self._special = {"%laneid": thread % 32, "global_smem": memory.SHARED_BASE}
        for i, axis in enumerate("xyz"):
            self._special |= {
                f"%tid.{axis}": thread if i == 0 else 0,
                f"%ntid.{axis}": self.threads if i == 0 else 1,
                f"%ctaid.{axis}": index[i],
                f"%nctaid.{axis}": grid[i],
            }

    # Operands

    def value(self, operand: text.Operand, bits: int) -> np.ndarray:
        """Unsigned bits of an operand, one number a thread; never written in place."""
        dtype = table.UNSIGNED[bits]
        if isinstance(operand, text.Register):
            if (found := self._registers.get(operand.name)) is None:
                raise faults.Fault(f"{operand.name} is read before it is written")
            return found if found.dtype == dtype else found.astype(dtype)
        if isinstance(operand, text.Number):
            key = operand.value, bits
            if key not in self._constants:
                number = dtype(operand.value & ((1 << bits) - 1))
                self._constants[key] = np.full(self.threads, number, dtype)
            return self._constants[key]
        if isinstance(operand, text.Special):
            return np.full(self.threads, self._special[operand.name], dtype)
        raise faults.UnknownInstructionError(f"an operand that is no value: {operand}")

    def floats(self, operand: text.Operand) -> np.ndarray:
        return self.value(operand, 32).view(np.float32)

    def predicate(self, operand: text.Operand) -> np.ndarray:
        if isinstance(operand, text.Number):
            return np.full(self.threads, operand.value != 0)
        if isinstance(operand, text.Register) and operand.bits == 1:
            if operand.name not in self._registers:
                raise faults.Fault(f"{operand.name} is read before it is written")
            return self._registers[operand.name]
        raise faults.UnknownInstructionError(f"an operand that is no predicate: {operand}")

    def addresses(self, operand: text.Operand, bits: int) -> np.ndarray:
        if not isinstance(operand, text.Address) or isinstance(operand.base, str):
            raise faults.UnknownInstructionError(f"an operand that is no address: {operand}")
        return self.value(operand.base, bits).astype(np.int64) + operand.offset

    def is_set(self, register: text.Register) -> bool:
        return register.name in self._registers

    def write(
        self,
        operand: text.Operand,
        value: np.ndarray,
        mask: np.ndarray | None,
        signed: bool = False,
    ) -> None:
        """Sets a register where `mask` is true; a narrower value is extended, by sign or by 0."""
        if operand is None:  # the discarded result `_`
            return
        if not isinstance(operand, text.Register):
            raise faults.UnknownInstructionError(f"an operand that is no register: {operand}")
        dtype = bool if operand.bits == 1 else table.UNSIGNED[operand.bits]
        if value.dtype.itemsize < np.dtype(dtype).itemsize and signed:
            value = table.as_kind(value, True).astype(table.SIGNED[operand.bits])
        value = value.view(dtype) if value.dtype.itemsize == np.dtype(dtype).itemsize else value
        value = value.astype(dtype, copy=False)
        if mask is not None:
            old = self._registers.get(operand.name)
            if old is None:  # what a thread does not set must not matter: nan as a float
                old = np.zeros_like(value) if dtype is bool else ~np.zeros_like(value)
            value = np.where(mask, value, old)
        self._registers[operand.name] = value

    # The run

    def run(self) -> int:
        """Runs to the end and returns the number of instructions."""
        at, steps, code = 0, 0, self.program.instructions
        with np.errstate(all="ignore"):
            while at < len(code):
                self.current, steps = code[at], steps + 1
                if steps > _MOST_STEPS:
                    raise faults.Fault(f"still running after {_MOST_STEPS} instructions")
                try:
                    jump = self._step(self.current)
                except faults.Fault as fault:
                    raise type(fault)(f"{self.current}: {fault}") from None
                if jump is None:
                    break
                at = jump if jump >= 0 else at + 1
        return steps

    def _step(self, instruction: text.Instruction) -> int | None:
        """Carries out one instruction; the next index, -1 for the one after it, None at the end."""
        mask = None
        if instruction.predicate is not None:
            mask = self.predicate(instruction.predicate) ^ instruction.negated
            mask = None if mask.all() else mask
        kind = instruction.opcode.partition(".")[0]
        if kind in ("bra", "ret"):
            if mask is not None:
                if mask.any():
                    raise faults.UnknownInstructionError("threads of a program part ways here")
                return -1
            return None if kind == "ret" else self.program.labels[str(instruction.target)]
        found = table.find(instruction.opcode)
        if found is None or instruction.operands is None:
            raise faults.UnknownInstructionError("the emulator does not know this instruction")
        handler, options = found
        handler(self, instruction.operands, options, mask)
        return -1
