"""How long a benchmark will take on a GPU that is not here, roughly."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

# Seconds. Triton's and Mosaic's compilers were timed on a CPU (1 and 3 s a kernel, FLA's 1.2 s a
# configuration); what XLA takes is a guess. None of it was measured on the GPU.
_CHECK = 6.0  # of a kernel of ours beside the oracle, once for all calls that are the same if small
_BUILD = 2.0  # a program of XLA's or ours at full size
_KERNEL, _FOUND = 1.2, 0.2  # a Triton kernel, compiled or found in the cache
_TIMED = 0.3  # a candidate of a tuning run, once it is compiled
_PEERS = {"tokamax": 8.0, "jla": 8.0, "FLA": 4.0}  # others: as a program of ours
# FLA's configurations for the first call of an op, in threads: 266 for `gla`, 32 for pooling
_FLA_FIRST = {"gla": 40.0, "lightning_attention": 20.0, "native_sparse_attention": 30.0}
_FLA_FIRST_OF_OTHERS = 5.0
_PUBLIC = 20.0
_START = 25.0  # imports, the device, and the ceilings


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One row: how many programs it has, how many candidates are tuned, and how long it takes."""

    op: str
    workload: str
    mode: str
    ours: int
    peers: int
    candidates: int
    seconds: float


def rows(found: Sequence[Any], target: Any, options: Any, cached: bool) -> Iterator[Estimate]:
    """Of every row of workloads, as they would be measured with `options` on a target."""
    known: set[Any] = set()
    for workload in found:
        for mode in (m for m in workload.modes if m in options.modes):
            ours, candidates, tuned = _ours(workload, mode, target, options.tune_s, cached)
            peers = _peers(workload, mode)
            small = _small(workload, target)
            seconds = ours * (_BUILD + (0.0 if small in known else _CHECK)) + tuned
            known.add(small)
            seconds += sum(_PEERS.get(name, _BUILD) for name in peers)
            if "FLA" in peers and (workload.op, mode) not in known:
                seconds += _FLA_FIRST.get(workload.op, _FLA_FIRST_OF_OTHERS)
                known.add((workload.op, mode))
            seconds += _PUBLIC if options.public else 0.0
            seconds += options.seconds
            yield Estimate(workload.op, workload.name, mode, ours, len(peers), candidates, seconds)


def whole(found: Sequence[Estimate], budget_s: float) -> tuple[float, int]:
    """Seconds of all rows, and the calls of at most `budget_s` that they need with --resume."""
    total, calls, used = 0.0, 1, _START
    for row in found:
        total += row.seconds
        if used + row.seconds > budget_s and used > _START:
            calls, used = calls + 1, _START
        used += row.seconds
    return total + calls * _START, calls


def _ours(
    workload: Any, mode: str, target: Any, tune_s: float, cached: bool
) -> tuple[int, int, float]:
    """Our entries that serve a row, their candidates, and seconds of compiling and tuning."""
    from ejkernel.bench import _precompile, _programs
    from ejkernel.kernels import kernel_registry

    each = _TIMED + (_FOUND if cached else _KERNEL)
    entries, candidates, seconds = set(), 0, 0.0
    for number, direction in enumerate(_programs.DIRECTIONS[mode]):
        inv = _precompile.invocation(workload, direction, target)
        if inv is None:
            continue
        for entry in kernel_registry.list(workload.op):
            if not entry.runs_on(target) or entry.priority < 0:
                continue
            if entry.why_not(inv.call, target, direction) is not None:
                entries.discard(entry.name)
                continue
            if number == 0:
                entries.add(entry.name)
            count = len(list(entry.candidates(inv.call, direction, target)))
            # a forward is tuned once for both modes
            if tune_s and count > 1 and (mode == workload.modes[0] or number):
                candidates += count
                seconds += min(tune_s, count * each)
            elif entry.platform == "triton":
                seconds += each
    return len(entries), candidates, seconds


def _small(workload: Any, target: Any) -> str:
    """Tells apart the small calls that are checked in place of large ones."""
    from ejkernel.bench import _check, _precompile
    from ejkernel.kernels import kernel_registry

    spec = kernel_registry.spec(workload.op)
    inv = _precompile.invocation(workload, "forward", target)
    return _check._key(spec, spec.reduced(inv.call, 64) or inv.call, ())


def _peers(workload: Any, mode: str) -> list[str]:
    """Peers of a row, as if all were installed."""
    import jax
    import jax.numpy as jnp

    from ejkernel.bench import _peers, _peers_torch

    every = (*_peers.PEERS, *_peers_torch.PEERS) if workload.known_peers else ()
    found: list[str] = []

    def ask(key: Any) -> int:
        values = workload.values(jnp.dtype(workload.dtype), key)
        for peer in (*workload.peers, *(p for p in every if workload.op in p.ops)):
            try:
                reason = peer.why_not(values)
            except (TypeError, ValueError, IndexError):  # it looks at numbers, which are not here
                reason = None
            if reason is None and mode in peer.modes:
                found.append(peer.name)
        return 0

    jax.eval_shape(ask, jax.random.key(0))
    return found
