"""Bundles inside bundles, which Triton 3.6 cannot carry into a loop or a branch.

Entering one, Triton copies each value by the type of the outermost tuple. Version 3.6 makes that
type before it fills in the compile-time members of inner tuples, so the copy has None for them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

_MENDED_IN = (3, 7)  # this module goes when an older Triton is no longer supported


def _retyped(value: Any) -> Any:
    """A value whose tuples, innermost first, have the types of their members."""
    from triton.language import core

    if isinstance(value, core.tuple):
        for member in value.values:
            _retyped(member)
        value.type = core._type_for_tuple_values(value.values, value.type.fields)
    return value


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Types tuples anew when a function gets its arguments; nothing to do in a newer Triton."""
    import triton
    from triton.compiler import code_generator

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= _MENDED_IN:
        yield
        return
    function = code_generator.ASTFunction
    arguments = function.deserialize
    function.deserialize = lambda self, fn: _retyped(arguments(self, fn))
    try:
        yield
    finally:
        function.deserialize = arguments
