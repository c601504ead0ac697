"""Tuning as a phase of its own: one call, or everything that was recorded."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel.ops import registry
from ejkernel.ops.config.cache import Stored
from ejkernel.ops.config.selection import Choice, ConfigSelectorChain, sort_out
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.execution.executor import Executor, default_executor
from ejkernel.ops.execution.tuning import Tuner
from ejkernel.ops.utils import hlo, serialize


class Autotuner:
    """Measures calls and remembers the results in a chain.

    Args:
      chain: Where results go; None is the chain of the default executor.
      budget_s: Seconds a call; None follows the policy.
    """

    def __init__(self, chain: ConfigSelectorChain | None = None, budget_s: float | None = None):
        self.chain = chain if chain is not None else _default_chain()
        self.budget_s = budget_s

    def tune(self, kernel: Kernel, *args: Any, **kwargs: Any) -> Choice:
        """Measures one call with these arguments."""
        inv = Executor(self.chain).invocation(kernel, *args, **kwargs)
        return self.chain.tune(inv, budget_s=self.budget_s)

    def tune_all(self, invocations: Iterable[Invocation]) -> dict[str, Choice]:
        """Measures many; with several processes, the first measures and all hear of it."""
        invocations = list(invocations)
        if jax.process_count() == 1:
            return {inv.key: _tune_as_called(self.chain, inv, self.budget_s) for inv in invocations}
        return _agree(self.chain, invocations, self.budget_s)


def _tune_as_called(chain: ConfigSelectorChain, inv: Invocation, budget_s: float | None) -> Choice:
    """Measures a call at the precision it was made with."""
    with jax.default_matmul_precision(inv.document["precision"]):
        return chain.tune(inv, budget_s=budget_s)


def _default_chain() -> ConfigSelectorChain:
    chooser = default_executor().chooser
    assert isinstance(chooser, ConfigSelectorChain)
    return chooser


def autotune(
    kernel: Kernel,
    *args: Any,
    configs: Sequence[Any] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    budget_s: float = float("inf"),
    **kwargs: Any,
) -> Any:
    """The fastest right configuration of a kernel for these arguments; nothing is stored.

    Args:
      kernel: The kernel.
      *args: Its arguments.
      configs: What to try; None asks the kernel.
      num_warmup: Calls before the clock starts.
      num_iters: Timed calls of each.
      budget_s: Seconds for all.
      **kwargs: The kernel's keyword arguments.
    """
    inv = default_executor().invocation(kernel, *args, **kwargs).keyed
    able, _ = sort_out(inv)
    if configs is not None and len(configs) == 0:
        raise ValueError("`autotune`: `configs` is empty.")
    if configs is not None and len(configs) == 1:
        return configs[0]
    tuner = Tuner(num_warmup=num_warmup, num_iters=num_iters, max_candidates=10**6)
    result = tuner.tune(inv, able, budget_s, configs=configs)
    if result.stored is None:
        if not result.failures:
            return able[0].heuristic(inv.call, inv.direction)
        reasons = "; ".join(f"{name}: {why}" for name, why in result.failures.items())
        raise RuntimeError(f"`autotune`: no configuration of {kernel.name!r} works: {reasons}")
    return result.stored.config


def autotune_recorded(
    invocations: Iterable[Invocation] | Any = None,
    *,
    budget_s: float | None = None,
    chain: ConfigSelectorChain | None = None,
) -> dict[str, Choice]:
    """Measures recorded calls and remembers the results; key -> choice.

    Args:
      invocations: Calls, or a lowered program or HLO text with json stamps; None takes the
        recorded ones.
      budget_s: Seconds a call; None follows the policy.
      chain: Where results go; None is the chain of the default executor.
    """
    if invocations is None:
        invocations = registry.get_invocations()
    elif isinstance(invocations, str):
        invocations = registry.from_labels(hlo.extract_labels_from_hlo_text(invocations))
    elif hasattr(invocations, "as_text"):
        invocations = registry.from_labels(hlo.find_labels_in_lowered(invocations))
    return Autotuner(chain, budget_s).tune_all(invocations)


def _agree(
    chain: ConfigSelectorChain, invocations: list[Invocation], budget_s: float | None
) -> dict[str, Choice]:
    """Process 0 measures; every process receives the same table and proves it by a hash."""
    from jax.experimental import multihost_utils

    invocations = sorted(invocations, key=lambda inv: inv.key)
    table: dict[str, Any] = {}
    if jax.process_index() == 0:
        for inv in invocations:
            _tune_as_called(chain, inv, budget_s)
            stored = chain.cache.get(inv.key)
            if isinstance(stored, Stored):
                plain = serialize.to_builtins(stored.config)
                table[inv.key] = [stored.implementation, stored.version, plain]
    text = json.dumps(table, sort_keys=True).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    buffer = np.zeros(size, np.uint8)
    if jax.process_index() == 0:
        buffer[:] = np.frombuffer(text, np.uint8)
    received = bytes(np.asarray(multihost_utils.broadcast_one_to_all(buffer), np.uint8))
    digest = np.frombuffer(hashlib.sha256(received).digest(), np.uint8)
    multihost_utils.assert_equal(digest, "ejkernel: processes hold different tables")
    found = json.loads(received)
    choices = {}
    for inv in invocations:
        if inv.key in found:
            name, version, plain = found[inv.key]
            able, _ = sort_out(inv)
            implementation = next(i for i in able if (i.name, i.version) == (name, version))
            config = implementation.decode(inv.call, inv.direction, plain)
            chain.cache.put(inv.key, Stored(name, version, config))
        choices[inv.key] = chain.choose(inv)
    return choices
