"""`jax.jit` with one cache for the process."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

_cache: dict[Any, Callable[..., Any]] = {}


def ejit(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] = (),
    inline: bool = False,
) -> Callable[..., Any]:
    """`jax.jit`, as a decorator with or without arguments; equal requests share one function.

    Calling `ejit(f)` again, where `jax.jit(f)` would start with an empty cache, finds the programs
    compiled before. Static values are told apart by value and by type: 1, 1.0 and True compile
    three programs.
    """
    if fun is None:
        return functools.partial(
            ejit,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            inline=inline,
        )
    options = {
        "static_argnums": _plural(static_argnums),
        "static_argnames": _plural(static_argnames),
        "donate_argnums": _plural(donate_argnums),
        "inline": inline,
    }
    key = (fun, *options.values())
    if key not in _cache:
        _cache[key] = _typed(fun, options)
    return _cache[key]


def _plural(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)


class _Static:
    """A static argument that equals only values of its own type."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static):
            return NotImplemented
        return type(self.value) is type(other.value) and self.value == other.value

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def _typed(fun: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    numbers, names = set(options["static_argnums"]), set(options["static_argnames"])
    if not numbers and not names:
        return jax.jit(fun, donate_argnums=options["donate_argnums"], inline=options["inline"])

    def unwrap(value: Any) -> Any:
        return value.value if isinstance(value, _Static) else value

    @functools.wraps(fun)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return fun(*map(unwrap, args), **{name: unwrap(v) for name, v in kwargs.items()})

    jitted = jax.jit(plain, **options)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        count = len(args)
        wrapped = [
            _Static(x) if i in numbers or i - count in numbers else x for i, x in enumerate(args)
        ]
        return jitted(*wrapped, **{n: _Static(x) if n in names else x for n, x in kwargs.items()})

    return call
