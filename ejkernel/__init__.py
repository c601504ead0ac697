"""ejkernel: one function per operation, every implementation of it, chosen by measurement."""

__version__ = "0.1.0"
