"""ejkernel: one function per operation, every implementation of it, chosen by measurement."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel._explain import explain

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    # imported when asked for: it needs JAX, the operations and their registry
    if name == "explain":
        from ejkernel._explain import explain

        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "explain"})
