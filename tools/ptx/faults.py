"""What stops an emulated program."""


class Fault(Exception):
    """Something that the program must not do, or that the emulator cannot do."""


class OutOfBoundsError(Fault):
    """An address outside the arrays of a launch or its shared memory, or one not aligned."""


class UnknownInstructionError(Fault):
    """An instruction, an operand or a way to use them that the emulator does not know."""
