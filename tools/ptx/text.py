"""Reads PTX text: instructions with parsed operands, labels and parameters."""

import dataclasses
import re
from collections.abc import Iterator

from tools.ptx import faults

# bits of a register by the letters of its name; 1 is a predicate
_WIDTHS = {"p": 1, "rs": 16, "r": 32, "f": 32, "rd": 64}
_FIRST_NAMED = 10**7  # above the numbers that compilers give
_SPECIAL = re.compile(r"%(?:(?:n?ctaid|n?tid)\.[xyz]|laneid)")


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
    name: str
    bits: int


@dataclasses.dataclass(frozen=True, slots=True)
class Special:
    """A value that the hardware gives, such as %tid.x, or the address of shared memory."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """An immediate; floats are given by their bits."""

    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Memory at `base` + `offset`; `base` is a str for a parameter of the kernel."""

    base: "Operand | str"
    offset: int


Operand = Register | Special | Number | Address | tuple["Operand", ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One statement; `operands` is None if one of them could not be read."""

    predicate: Register | None
    negated: bool
    opcode: str
    operands: tuple[Operand, ...] | None
    target: str | None  # of a branch
    text: str
    line: str  # of the Triton source, "fwd.py:33", where the compiler tells

    def __str__(self) -> str:
        short = re.sub(r"\{([^,}]*),[^}]{50,}\}", r"{\1, ...}", self.text)
        return f"`{short}` ({self.line})" if self.line else f"`{short}`"


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A kernel; labels give the index of an instruction."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[str, ...]
    threads: int

    @property
    def touches_single_bytes(self) -> bool:
        """Whether an instruction moves single bytes of shared memory."""
        return any(re.search(r"shared\S*8$", i.opcode) for i in self.instructions)

    def may_write(self, name: str) -> bool:
        """Whether an instruction has a register in its first operand, where results go."""
        return any(
            i.operands is None or (i.operands and name in _names(i.operands[0]))
            for i in self.instructions
        )


def _names(operand: Operand) -> set[str]:
    if isinstance(operand, tuple):
        return set().union(*map(_names, operand))
    return {operand.name} if isinstance(operand, Register) else set()


def read(ptx: str) -> Program:
    """Reads the one kernel of a PTX module."""
    ptx = _numbered(ptx)
    if (entry := re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", ptx)) is None:
        raise faults.Fault("The text holds no kernel (`.entry`).")
    threads = re.search(r"\.reqntid\s+(\d+)\s*(?:,\s*1\s*)*\n?", ptx[entry.end() :])
    if threads is None:
        raise faults.Fault(f"{entry[1]}: the text does not say how many threads it runs in.")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for text, line in _statements(ptx[ptx.index("{", entry.end()) + 1 :]):
        if text.endswith(":"):
            labels[text[:-1]] = len(instructions)
        else:
            instructions.append(_instruction(text, line))
    parameters = tuple(p.split()[-1] for p in entry[2].split(",") if p.strip())
    return Program(entry[1], tuple(instructions), labels, parameters, int(threads[1]))


def _numbered(ptx: str) -> str:
    """The text with numbers for registers that inline assembly has names of its own for."""
    letters = {bits: name for name, bits in _WIDTHS.items()} | {32: "r"}
    declared = set(re.findall(r"\.reg\s+\.(pred|[bsuf]\d+)\s+([^%;]+);", ptx))
    given = iter(range(_FIRST_NAMED, 2 * _FIRST_NAMED))
    for kind, names in sorted(declared):
        letter = letters[1 if kind == "pred" else int(kind[1:])]
        for name in map(str.strip, names.split(",")):
            several = re.fullmatch(r"(\w+)<(\d+)>", name)
            every = [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]
            for one in every:
                ptx = re.sub(rf"(?<![\w%$.:]){one}(?!\w)", f"%{letter}{next(given)}", ptx)
    return ptx


def _statements(body: str) -> Iterator[tuple[str, str]]:
    """Statements and labels, each with the line of the Triton source that it comes from."""
    line, held = "", ""
    for raw in body.splitlines():
        code, _, comment = raw.partition("//")
        code = code.strip()
        if code.startswith((".section", ".file", ".visible", ".func")):
            return  # debugging information, after the kernel
        if code.startswith(".loc"):
            line = ":".join(comment.strip().split(" ")[0].split(":")[:2])
            continue
        if label := re.match(r"([$\w]+):", code):
            yield label[0], line
            code = code[label.end() :].strip()
        *whole, rest = (held + code).split(";")
        for statement in whole:
            # braces of scopes: a statement never begins with a list of registers
            statement = statement.lstrip("{} \t").rstrip()
            if statement and not statement.startswith("."):
                yield re.sub(r"\s+", " ", statement), line
        held = rest + " " if rest.strip("{} \t") else ""


def _instruction(text: str, line: str) -> Instruction:
    whole = text
    predicate, negated = None, False
    if guard := re.match(r"@(!?)(%p\d+) ", text):
        predicate, negated = Register(guard[2], 1), bool(guard[1])
        text = text[guard.end() :]
    opcode, _, rest = text.partition(" ")
    if opcode.split(".")[0] == "bra":
        return Instruction(predicate, negated, opcode, (), rest.strip(), whole, line)
    try:
        operands = tuple(_operand(part) for part in _parts(rest))
    except ValueError:
        operands = None
    return Instruction(predicate, negated, opcode, operands, None, whole, line)


def _parts(text: str) -> list[str]:
    """The operands of a statement; a list in braces and an address are one each."""
    return [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)]


def _operand(text: str) -> Operand:
    """Reads one operand; raises ValueError for what has none of the known forms."""
    if text.startswith("{"):
        return tuple(_operand(part) for part in _parts(text[1:-1]))
    if "|" in text:  # two results of one instruction
        return tuple(_operand(part) for part in text.split("|"))
    if tile := re.fullmatch(r"\[(\S+),\s*(\{.*\})\s*\]", text):  # by its descriptor and start
        return Address(_operand(tile[1]), 0), _operand(tile[2])
    if text.startswith("["):
        found = re.fullmatch(r"([%\w$]+)(?:\s*\+\s*(-?\w+))?", text[1:-1].strip())
        if found is None:
            raise ValueError(text)
        base = found[1] if "_param_" in found[1] else _operand(found[1])
        return Address(base, int(found[2], 0) if found[2] else 0)
    if text == "_":
        return None
    if text == "global_smem" or _SPECIAL.fullmatch(text):
        return Special(text)
    if (name := re.fullmatch(r"%([a-z]+)\d+", text)) and name[1] in _WIDTHS:
        return Register(text, _WIDTHS[name[1]])
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Number(int(text[2:], 16))
    if text == "1.0":  # of createpolicy
        return Number(0x3F800000)
    return Number(int(text.removesuffix("U"), 0))
