"""Attention forward and backward on the best device JAX finds: what ran, why, how exact, how fast.

Exit code 1 when the error against the float64 oracle is above twice that of `jax.nn`.
"""

import platform
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel
from ejkernel.kernels import Platform, kernel_registry
from ejkernel.modules import FlashAttention
from ejkernel.ops import (
    Choice,
    ConfigSelectorChain,
    Executor,
    Invocation,
    PersistentCache,
    benchmark,
    device_kind,
    policy_override,
)

OP = "flash_attention"
HEADS, HEAD_DIM = 8, 64
SHORT = 512  # tokens of the exact comparison; the oracle is dense and in float64
LENGTHS = {"cpu": 2048, "gpu": 8192, "tpu": 8192}

Arrays = tuple[jax.Array, ...]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def theirs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """JAX's own attention, in the float32 that ours promises: some devices default to less."""
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


class Witness(ConfigSelectorChain):
    """The default chain, with a note of what it chose for each direction."""

    def __init__(self) -> None:
        super().__init__(persistent=PersistentCache())
        self.choices: dict[str, Choice] = {}

    def choose(self, inv: Invocation) -> Choice:
        choice = self.choices[inv.direction] = super().choose(inv)
        return choice


witness = Witness()
executor = Executor(witness)


def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`flash_attention(q, k, v, causal=True)`, through an executor that remembers its choices."""
    return executor(FlashAttention(), q, k, v, causal=True)


def with_gradients(attend: Attention) -> Callable[..., tuple[jax.Array, Arrays]]:
    """Output and the gradients of query, key and value, for a given output cotangent."""

    def run(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    return run


def inputs(length: int) -> Arrays:
    """Query, key, value and output cotangent, each from a key of its own."""
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, (1, length, HEADS, HEAD_DIM)) for key in keys)


def section(title: str, rows: list[tuple[str, ...]]) -> None:
    """Prints a title and a table with aligned columns."""
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(map(str.ljust, row, widths)).rstrip())


def show_machine(length: int) -> None:
    section(
        "Machine",
        [
            ("device", f"{jax.devices()[0].device_kind} ({device_kind()})"),
            ("ejkernel", ejkernel.__version__),
            ("jax", jax.__version__),
            ("python", platform.python_version()),
            ("call", f"{OP}, causal, float32, 1 x {length} tokens, {HEADS} heads of {HEAD_DIM}"),
        ],
    )


def show_choices(arrays: Arrays) -> None:
    # lowering asks the chain for both directions, which may measure, and runs nothing itself
    jax.jit(with_gradients(ours)).lower(*arrays)
    rows = [("direction", "entry", "said by", "configuration")]
    for direction, choice in witness.choices.items():
        rows.append((direction, choice.implementation.name, choice.source, str(choice.cfg)))
    section("What ran, and which tier of the chain said so", rows)
    served = {choice.implementation.name.partition("/")[0] for choice in witness.choices.values()}
    reasons = {name: why for c in witness.choices.values() for name, why in c.refused.items()}
    registered = {entry.platform for entry in kernel_registry.list(OP)}
    for name in Platform:
        if name not in served and name not in registered:
            reasons[str(name)] = kernel_registry.missing(OP, name)
    section("What did not, and why", list(reasons.items()) or [("nothing was refused", "")])


def oracle(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The dense definition of the op."""
    spec = kernel_registry.spec(OP)
    values = spec.complete({"query": q, "key": k, "value": v, "causal": True})
    return spec.reference_fn()(spec.canonicalize(values))[0]


def show_errors(arrays: Arrays) -> bool:
    """Prints largest errors; True when ours are at most twice those of `jax.nn`."""
    names = ("output", "d query", "d key", "d value")

    def flat(attend: Attention, *given: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(jax.jit(with_gradients(attend))(*given))

    results = {"ejkernel": flat(ours, *arrays), "jax.nn": flat(theirs, *arrays)}
    with jax.enable_x64(True):
        exact = flat(oracle, *(x.astype(jnp.float64) for x in arrays))
        errors = {
            who: [
                float(abs(a.astype(jnp.float64) - b).max())
                for a, b in zip(found, exact, strict=True)
            ]
            for who, found in results.items()
        }
    rows = [("", *errors, "allowed")]
    good = True
    for name, mine, other in zip(names, *errors.values(), strict=True):
        rows.append((name, f"{mine:.2e}", f"{other:.2e}", f"{2 * other:.2e}"))
        good &= mine <= 2 * other
    section(f"Largest error against the float64 oracle, first {SHORT} tokens", rows)
    return good


def cost(fn: Callable[..., Any], *arrays: jax.Array) -> tuple[float, float]:
    """Milliseconds, and MiB of temporary memory."""
    compiled = jax.jit(fn).lower(*arrays).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return benchmark(lambda: compiled(*arrays), num_iters=5), temporary


def show_costs(arrays: Arrays) -> None:
    rows = [("", "ejkernel", "jax.nn", "ejkernel memory", "jax.nn memory")]
    for name, wrap, given in (
        ("forward", lambda attend: attend, arrays[:3]),
        ("forward + backward", with_gradients, arrays),
    ):
        (mine, mine_mib), (other, other_mib) = (cost(wrap(f), *given) for f in (ours, theirs))
        times = (f"{mine:.1f} ms", f"{other:.1f} ms")
        rows.append((name, *times, f"{mine_mib:.1f} MiB", f"{other_mib:.1f} MiB"))
    section("Median time and temporary memory, beside jax.nn.dot_product_attention (xla)", rows)


def main() -> int:
    length = LENGTHS.get(device_kind(), 2048)
    arrays = inputs(length)
    show_machine(length)
    show_choices(arrays)
    with policy_override(autotune=False):  # one shape is enough to show how tuning goes
        good = show_errors(tuple(x[:, :SHORT] for x in arrays))
    show_costs(arrays)
    verdict = "at most" if good else "ABOVE"
    print(f"\nErrors are {verdict} twice those of jax.nn.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
