"""One program of a launch: its registers, its work in flight, and the loop over instructions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tools.ptx import faults, memory, table, text

_MOST_STEPS = 5_000_000


class InFlight:
    """Asynchronous work in groups, the last of which is still open."""

    def __init__(self) -> None:
        self._groups: list[list[Any]] = [[]]

    def add(self, work: Any) -> None:
        self._groups[-1].append(work)

    def close_group(self) -> None:
        self._groups.append([])

    def finish(self, but: int) -> list[Any]:
        """Work of the oldest closed groups, of which `but` may stay in flight."""
        count = max(len(self._groups) - 1 - but, 0)
        done, self._groups = self._groups[:count], self._groups[count:]
        return [work for group in done for work in group]


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
        self.copies, self.products = InFlight(), InFlight()
        # of TMA, by address
        self.descriptors: dict[int, dict[tuple[str, int], int]] = {}
        self.barriers: dict[int, Any] = {}
        # where a branch parted threads: the end of what some of them skip, and who runs until then
        self._parted: list[tuple[int, np.ndarray]] = []
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
                if self.program.may_write(operand.name):
                    raise faults.Fault(f"{operand.name} is read before it is written")
                # LLVM leaves out what fills bits that are shifted away again
                noise = dtype(0xA5A5A5A5A5A5A5A5 & ((1 << bits) - 1))
                found = self._registers[operand.name] = np.full(self.threads, noise, dtype)
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
                while self._parted and self._parted[-1][0] == at:
                    self._parted.pop()
                self.current, steps = code[at], steps + 1
                if steps > _MOST_STEPS:
                    raise faults.Fault(f"still running after {_MOST_STEPS} instructions")
                try:
                    jump = self._step(self.current, at)
                except faults.Fault as fault:
                    raise type(fault)(f"{self.current}: {fault}") from None
                if jump is None:
                    break
                at = jump
        return steps

    def _step(self, instruction: text.Instruction, at: int) -> int | None:
        """Carries out the instruction at an index; returns the next index, or None at the end."""
        mask = self._parted[-1][1] if self._parted else None
        if instruction.predicate is not None:
            chosen = self.predicate(instruction.predicate) ^ instruction.negated
            mask = chosen if mask is None else chosen & mask
            mask = None if mask.all() else mask
        kind = instruction.opcode.partition(".")[0]
        if kind in ("bra", "ret"):
            return self._branch(instruction, at, mask)
        found = table.find(instruction.opcode)
        if found is None or instruction.operands is None:
            raise faults.UnknownInstructionError("the emulator does not know this instruction")
        handler, options = found
        handler(self, instruction.operands, options, mask)
        return at + 1

    def _branch(self, branch: text.Instruction, at: int, mask: np.ndarray | None) -> int | None:
        """Follows a branch that the threads in `mask` take.

        If only some do, the others run what these skip.
        """
        end, running = self._parted[-1] if self._parted else (None, self.everyone)
        taken = self.everyone if mask is None else mask
        if not taken.any():
            return at + 1
        whole = bool((taken == running).all())
        if branch.target is None:
            if not whole or end is not None:
                raise faults.UnknownInstructionError("some of the threads end here")
            return None
        target = self.program.labels[branch.target]
        if end is not None and target > end:
            raise faults.UnknownInstructionError("threads that parted do not meet where expected")
        if whole:
            return target
        if target <= at:
            raise faults.UnknownInstructionError("threads of a program part ways here")
        self._parted.append((target, running & ~taken))
        return at + 1
