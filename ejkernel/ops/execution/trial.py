"""One tuning run's inputs and compiled candidates, and the numbers that these must give."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _device
from ejkernel.ops.core.kernel import FORWARD, Implementation, Invocation
from ejkernel.ops.core.types import CallArgs
from ejkernel.ops.execution import benchmark
from ejkernel.ops.utils import serialize

_SAMPLED_ROWS = 64


class Rejected(Exception):
    """A candidate that must not win, and why."""


class Trial:
    """The inputs of a measurement, and the numbers that a candidate must give."""

    def __init__(self, inv: Invocation):
        self.inv = inv
        self._free = free_memory()
        self.args = inv.kernel.example_inputs(inv)
        if isinstance(self.args, tuple | list):  # plain positional arguments of a user's kernel
            self.args = CallArgs.of(tuple(self.args), inv.kwargs)
        # once, and not with every call
        self.args = jax.tree.map(
            lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, self.args
        )
        self._check(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.args)), "arrays")
        self._finite_inputs = all(
            bool(jnp.isfinite(x).all())
            for x in jax.tree.leaves(self.args)
            if jnp.issubdtype(x.dtype, jnp.floating)
        )
        self._programs: dict[str, Callable[[], Any]] = {}
        self._checks: dict[str, Callable[[], str | None]] = {}
        self._residuals: Any = None
        self._expected: Any = None

    def run(self, implementation: Implementation, config: Any) -> Callable[[], Any]:
        """A compiled call of a candidate at full size."""
        name = name_of(implementation, config)
        if name not in self._programs:
            program, given = self._build(implementation, config)
            self._programs[name] = functools.partial(program, *given)
        return self._programs[name]

    def prepare(self) -> None:
        """Makes what all candidates are given, before threads compile them."""
        if self.inv.direction != FORWARD:
            self._saved()

    def compile(self, implementation: Implementation, config: Any) -> None:
        """Compiles a candidate, at full size and on the twin, and runs neither; for threads."""
        self.check_memory(implementation, config)
        check = self.inv.kernel.compile_check(self.inv, implementation, config)
        program, given = self._build(implementation, config)
        compiled = program.lower(*given).compile()
        name = name_of(implementation, config)
        self._checks[name] = check
        self._programs[name] = functools.partial(compiled, *given)

    def is_compiled(self, implementation: Implementation, config: Any) -> bool:
        """Whether `compile` came to its end for a candidate."""
        return name_of(implementation, config) in self._checks

    def _build(self, implementation: Implementation, config: Any) -> tuple[Any, tuple[Any, ...]]:
        """The jitted function of a candidate, and its arguments."""
        if self.inv.direction == FORWARD:
            return jax.jit(lambda args: implementation.forward(args, config)[0]), (self.args,)
        wanted = self.inv.wanted

        @jax.jit
        def program(args: Any, outputs: Any, residuals: Any, cotangents: Any) -> Any:
            grads = implementation.backward(args, config, outputs, residuals, cotangents, wanted)
            return {name: grads[name] for name in sorted(wanted & grads.keys())}

        return program, (self.args, *self._saved())

    def release(self) -> None:
        """Lets go of arrays and programs, which know one another."""
        self._programs.clear()
        self._checks.clear()
        self._residuals = self._expected = self.args = None

    def check(self, implementation: Implementation, config: Any) -> None:
        """Raises unless a candidate agrees with the oracle on a small twin, and with the others."""
        check = self._checks.get(name_of(implementation, config))
        if check is None:
            reason = self.inv.kernel.check_candidate(self.inv, implementation, config)
        else:
            reason = check()
        if reason is not None:
            raise Rejected(reason)
        self.compare(implementation, config)

    def compare(self, implementation: Implementation, config: Any) -> None:
        """Raises unless a candidate agrees at full size with the first one that was compared."""
        run = self.run(implementation, config)
        if not self.is_compiled(implementation, config):
            benchmark.look()  # the first call compiles
        outputs, tree = jax.tree.flatten(run())
        rows, epsilons = [_sample(x) for x in outputs], [_epsilon(x.dtype) for x in outputs]
        if self._finite_inputs and any(np.isnan(x).any() for x in rows):
            raise Rejected("gives nan on finite inputs")
        kind = (tree, [(x.shape, x.dtype) for x in outputs])
        if self._expected is None:
            self._expected = kind, rows
            return
        if kind != self._expected[0]:
            raise Rejected(f"gives {_kind(*kind)}, where another gave {_kind(*self._expected[0])}")
        for expected, row, epsilon in zip(self._expected[1], rows, epsilons, strict=True):
            finite = np.isfinite(expected)
            allowed = 64 * epsilon * np.abs(expected[finite]).max(initial=0.0)
            same = np.array_equal(row[~finite], expected[~finite], equal_nan=True)
            error = np.abs(row[finite] - expected[finite]).max(initial=0.0)
            if not same or not error <= allowed:
                raise Rejected("disagrees with the other candidates at full size")

    def check_memory(self, implementation: Implementation, config: Any) -> None:
        """Raises, before anything is compiled, for a config that would fill the device."""
        needed = implementation.memory(self.args, self.inv.direction, config)
        if needed is not None:
            self._check(needed, "temporaries")

    def _check(self, needed: int, what: str) -> None:
        if self._free is not None and needed > self._free / 2:
            raise Rejected(
                f"skipped: its {what} take {needed >> 20} MiB of {self._free >> 20} MiB free"
            )

    @property
    def has_reference(self) -> bool:
        """Whether some candidate gave the numbers that the others are compared with."""
        return self._expected is not None

    def _saved(self) -> tuple[Any, Any, Any]:
        """Outputs and residuals of a forward, and cotangents, for timing a backward."""
        if self._residuals is None:
            benchmark.look()
            inv = dataclasses.replace(self.inv, direction=FORWARD, wanted=frozenset())
            implementation = next(  # one that keeps residuals, whosever backward they are for
                i
                for i in inv.kernel.implementations(inv)
                if i.derivative == "rule" and i.why_not(inv.call, FORWARD) is None
            )
            try:
                config = implementation.heuristic(inv.call, FORWARD)
            except NotImplementedError:
                config = implementation.candidates(inv.call, FORWARD)[0]
            outputs, residuals = jax.jit(lambda args: implementation.forward(args, config))(
                self.args
            )
            leaves = jax.tree.leaves(outputs)
            keys = jax.random.split(jax.random.key(1), max(len(leaves), 1))
            cotangents = tuple(
                jax.random.normal(k, o.shape, np.float32).astype(o.dtype)
                for k, o in zip(keys, leaves, strict=False)
            )
            self._residuals = (tuple(leaves), residuals, cotangents)
        return self._residuals


def _kind(tree: Any, arrays: Sequence[Any]) -> str:
    """Outputs in a few words."""
    return f"{', '.join(f'{dtype}{list(shape)}' for shape, dtype in arrays)} as {tree}"


def _sample(x: Any) -> np.ndarray:
    """Up to 64 rows of an array, in float64 for the comparison."""
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    index = np.linspace(0, max(len(rows) - 1, 0), min(len(rows), _SAMPLED_ROWS)).astype(int)
    return np.asarray(rows[index]).astype(np.float64)


def _epsilon(dtype: Any) -> float:
    # 64 roundings of float32; of a half-width type, one in the last bit
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    return float(jnp.finfo(dtype).eps) * (1.0 if jnp.dtype(dtype).itemsize >= 4 else 1 / 32)


def free_memory() -> int | None:
    """Bytes free on the default device, if it tells."""
    device = _device.default_device()
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    with contextlib.suppress(OSError, ValueError):  # what the system can give back counts as free
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def name_of(implementation: Implementation, config: Any) -> str:
    """A candidate's name in records and logs."""
    return f"{implementation.name} {serialize.stable_json(serialize.describe(config))}"
