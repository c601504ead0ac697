"""`explain`: what a call would run, who said so, and why nothing else would run instead."""

import contextlib
import copy
import dataclasses
import json
import logging
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import SelectionError, UnsupportedError
from ejkernel.kernels import _op_kernel
from ejkernel.kernels._registry import KernelEntry, Platform, kernel_registry
from ejkernel.ops.config.cache import ConfigCache, Stored
from ejkernel.ops.config.policy import policy_override
from ejkernel.ops.config.selection import Choice, ConfigChooser, ConfigSelectorChain
from ejkernel.ops.core.kernel import BACKWARD, Implementation, Invocation, Kernel, Request
from ejkernel.ops.execution import executor as executors
from ejkernel.ops.execution.tuning import Result, Tuner
from ejkernel.ops.utils import serialize


@dataclasses.dataclass(frozen=True)
class Direction:
    """The forward or the backward of a call; all fields are plain values."""

    key: str  # what a tuned choice is remembered under
    entry: str | None  # None: nothing can run, see `problem`
    config: Any = None
    source: str | None = None  # the tier that decided
    row: str = ""  # the row of a table or of a near call that it took; "": what is stored of this
    trail: tuple[str, ...] = ()  # what each earlier tier said
    would_measure: bool = False  # a real call tunes before it runs
    times_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    able: tuple[str, ...] = ()  # entries that could serve the call too
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)  # platforms without entry
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of earlier tuning
    problem: str | None = None
    input_bytes: int = 0  # backward: arguments and cotangents; residuals are not counted
    output_bytes: int | None = None
    flops: int | None = None  # None: nobody counted this op


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found; `str()` of it is for reading, `to_json()` for programs."""

    op: str
    device: str
    platform: str  # as asked for
    arrays: Mapping[str, str]  # as the kernel sees them: of one device when the call is split
    options: Mapping[str, Any]
    forward: Direction
    backward: Direction | None  # for gradients of `wanted`
    wanted: tuple[str, ...] = ()  # every differentiable array of the call
    note: str = ""  # why there is no backward
    lowers_to: str = ""  # of a derived op: what its calls become, whose kernels and rows serve it

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(serialize.to_builtins(self), indent=indent, sort_keys=True)

    def to_text(self) -> str:
        lines = [f"{self.op} on {self.device}, platform {self.platform}"]
        if self.lowers_to:
            lines.append(f"{self.op} lowers to {self.lowers_to}")
        lines += [f"  {name} {text}" for name, text in self.arrays.items()]
        lines += [f"  {name}={value}" for name, value in self.options.items()]
        lines += ["", *_direction_lines("forward", self.forward)]
        if self.backward is not None:
            of = f"backward for {', '.join(self.wanted)}"
            told = self.backward.missing == self.forward.missing
            rest = dataclasses.replace(self.backward, missing={}) if told else self.backward
            lines += ["", *_direction_lines(of, rest)]
        if self.note:
            lines += ["", f"backward: {self.note}"]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_text()


def explain(op: Any, /, *args: Any, **kwargs: Any) -> Explanation:
    """Says which kernel a call would run, with which configuration, and why.

    Nothing runs, is measured or is stored; a choice that was measured earlier is reported.

    Args:
      op: The name of an operation, a function of `ejkernel.modules`, or a `Kernel`.
      *args: Its arguments; `jax.ShapeDtypeStruct` may stand for an array.
      **kwargs: Its keyword arguments, `platform` and `cfg` included.

    Raises:
      ValueError: If there is no such operation, or the arguments are wrong, as in the call itself.
    """
    kernel = _kernel(op)
    stands_for: dict[int, jax.ShapeDtypeStruct] = {}
    args, kwargs = jax.tree.map(lambda leaf: _stand_in(leaf, stands_for), (args, kwargs))
    cfg = kwargs.pop("cfg", None)
    leaves, tree = jax.tree.flatten(kernel.bind(args, kwargs, cfg))
    program = _Probe(executors.default_executor().chooser)._program(kernel, leaves, tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]
    try:
        jax.eval_shape(program.fn, *(stands_for.get(id(leaf), leaf) for leaf in arrays))
    except _Found as found:
        return found.explanation
    raise AssertionError(f"`explain`: the call of {kernel.name!r} reached no kernel.")


def _stand_in(leaf: Any, stands_for: dict[int, jax.ShapeDtypeStruct]) -> Any:
    """An array without memory in place of a shape, since kernels take arrays by their type."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise ValueError(
            f"`explain`: {leaf.dtype} needs `jax.config.update('jax_enable_x64', True)`."
        )
    made = np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    stands_for[id(made)] = leaf
    return made


# Which kernel


class _Bound:
    """Takes an op's own arguments, and a platform."""

    def bind(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any) -> dict[str, Any]:
        fixed = dict.fromkeys(_op_kernel.CALL_ARGUMENTS) | {"cfg": cfg}
        fixed["platform"] = kwargs.pop("platform", "auto")
        try:
            bound = _op_kernel.args_signature(self.spec).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"`{self.op}`: {error}.") from None
        bound.apply_defaults()
        return self.dynamic(bound.arguments | fixed)


class _Registered(_Bound, _op_kernel.RegisteredKernel):
    """An op without a public function."""


class _Entry(_Bound, _op_kernel.EntryKernel):
    """One entry of an op."""


def _kernel(op: Any) -> Kernel:
    import ejkernel.modules  # noqa: F401 - it knows how to import its classes

    if isinstance(op, Kernel):
        return op
    if isinstance(op, type) and issubclass(op, Kernel):
        return op()
    if isinstance(op, str):
        if (public := _op_kernel.OpKernel.public(op)) is not None:
            return public()
        if op in kernel_registry.ops():
            return _Registered(op)
    for cls in _op_kernel.OpKernel.known.values():
        if cls.function is op:
            return cls()
    if callable(op) and isinstance(entry := getattr(op, "entry", None), KernelEntry):
        return _Entry(entry)
    known = ", ".join(sorted({*_op_kernel.OpKernel.known, *kernel_registry.ops()}))
    if callable(op):
        name = getattr(op, "__name__", repr(op))
        raise ValueError(f"`explain`: {name} is no operation by itself; choose from {known}.")
    raise ValueError(f"There is no op {op!r}; known are {known}.")


# What it would run


class _Found(Exception):
    """Carries the answer out of a trace."""

    def __init__(self, explanation: Explanation):
        super().__init__("found")
        self.explanation = explanation


class _Probe(executors.Executor):
    """Follows a call as far as the choice of its kernels, and stops there."""

    def __init__(self, chooser: ConfigChooser):
        super().__init__(_without_trace(chooser))
        self._plan = _Plan()
        self._quiet = lambda: policy_override(autotune=False)
        if isinstance(self.chooser, ConfigSelectorChain):  # which says whether it would measure
            self._plan = self.chooser._tuner = _Plan(self.chooser._get_tuner())
            self._quiet = contextlib.nullcontext

    def _compute(self, inv: Invocation, request: Request, known: dict[str, Any]) -> NoReturn:
        call, kernel = inv.call, inv.kernel
        choice, forward = self._direction(inv)
        differentiable = kernel.derivative_parts(call, choice)["differentiable"]
        wanted = tuple(
            name
            for name, x in call.arrays().items()
            if name in differentiable and jnp.issubdtype(x.dtype, jnp.inexact)
        )
        backward, note = None, ""
        if choice is None:
            note = "not asked, since there is no forward"
        elif choice.implementation.derivative == "jax":
            note = f"JAX differentiates the forward of {forward.entry}"
        elif not wanted:
            note = "nothing to differentiate"
        else:
            changes = {"direction": BACKWARD, "wanted": frozenset(wanted)}
            there = dataclasses.replace(inv, override=request.backward, **changes)
            _, backward = self._direction(there, forward.output_bytes)
        statics = call.statics()
        given = call.given() if hasattr(call, "given") else statics.keys() - {"structure"}
        raise _Found(
            Explanation(
                op=kernel.name,
                device=inv.device_fingerprint,
                platform=inv.platform,
                arrays={n: f"{x.dtype}{list(x.shape)}" for n, x in call.arrays().items()},
                options={n: serialize.describe(v) for n, v in statics.items() if n in given},
                forward=forward,
                backward=backward,
                wanted=wanted,
                note=note,
                lowers_to=_lowers_to(kernel),
            )
        )

    def _direction(
        self, inv: Invocation, cotangents: int | None = None
    ) -> tuple[Choice | None, Direction]:
        able, refused = _sorted_out(inv)
        facts: dict[str, Any] = {
            "key": inv.key,
            "refused": refused,
            "missing": _missing(inv),
            "failures": _failures(self.chooser, inv),
            "input_bytes": sum(map(_bytes, inv.call.arrays().values())) + (cotangents or 0),
            "flops": _flops(inv),
        }
        plan = self._plan
        plan.would_measure = False
        try:
            with self._quiet():
                choice = self.chooser.choose(inv)
        except (UnsupportedError, ExceptionGroup, SelectionError) as error:
            problem = getattr(error, "message", None) or str(error)
            return None, Direction(entry=None, problem=problem, **facts)
        return choice, Direction(
            entry=choice.implementation.name,
            config=serialize.describe(choice.cfg),
            source=choice.source,
            row=choice.row,
            trail=choice.trail,
            would_measure=plan.would_measure,
            times_ms=dict(choice.times_ms),
            able=tuple(i.name for i in able if i.name != choice.implementation.name),
            output_bytes=_output_bytes(inv, choice),
            **facts,
        )


def _without_trace(chooser: ConfigChooser) -> ConfigChooser:
    """A chooser that answers alike and whose memory is its own: a choice read is not kept."""
    if not isinstance(chooser, ConfigSelectorChain):
        return chooser
    shadow = copy.copy(chooser)
    shadow.cache, shadow.failures = ConfigCache(), dict(chooser.failures)
    shadow._lock = threading.RLock()  # whoever measures now need not be waited for
    for key, value in chooser.cache.items():
        shadow.cache.put(key, value)
    return shadow


def _sorted_out(inv: Invocation) -> tuple[list[Implementation], dict[str, str]]:
    """Who can serve a call, and why each other entry of the op cannot."""
    of_registry = isinstance(inv.kernel, _op_kernel.OpKernel)
    entries = kernel_registry.list(inv.kernel.op) if of_registry else []
    try:
        asked = inv.kernel.implementations(inv)
    except UnsupportedError:  # nothing of the platform asked for, which `missing` tells
        asked = []
    able, refused = [], {}
    for implementation in asked:
        reason = implementation.why_not(inv.call, inv.direction)
        if reason is None and inv.direction == BACKWARD and implementation.backward is None:
            reason = "has no backward kernel"
        if reason is None:
            able.append(implementation)
        else:
            refused[implementation.name] = reason
    names = {implementation.name for implementation in asked}
    for entry in entries:
        if entry.name not in names:
            refused[entry.name] = f"not asked for (platform={inv.platform!r})"
    able.sort(key=lambda implementation: implementation.defers(inv.call))
    return able, refused


def _lowers_to(kernel: Kernel) -> str:
    lowering = kernel.spec.lowers_to if isinstance(kernel, _op_kernel.OpKernel) else None
    return "" if lowering is None or lowering.beside else ", then ".join(lowering.ops())


def _missing(inv: Invocation) -> dict[str, str]:
    if not isinstance(inv.kernel, _op_kernel.OpKernel):
        return {}
    op = inv.kernel.op
    there = {entry.platform for entry in kernel_registry.list(op)}
    return {str(p): kernel_registry.missing(op, p) for p in Platform if p not in there}


def _failures(chooser: ConfigChooser, inv: Invocation) -> dict[str, str]:
    """Candidates that lost their place in this process, or when the stored choice was made."""
    if not isinstance(chooser, ConfigSelectorChain):
        return {}
    stored = chooser.cache.get(inv.key)
    found = dict(stored.failures) if isinstance(stored, Stored) else {}
    if chooser.persistent is not None:
        where = {"op": inv.op, "device": inv.device_fingerprint}
        record = chooser.persistent.read(inv.key, **where)
        found = (dict(record.failures) if record is not None else {}) | found
    return found | chooser.failures.get(inv.key, {})


class _Plan(Tuner):
    """Says what a tuner would measure."""

    def __init__(self, tuner: Tuner | None = None):
        super().__init__()
        self._tuner = tuner or self
        self.would_measure = False

    def tune(self, inv: Invocation, implementations: Any, budget_s: float, **more: Any) -> Result:
        count = len(self._tuner.candidates(inv, implementations))
        if count < 2:
            return Result(None, {}, "fewer than two candidates")
        self.would_measure = True
        known = more.get("known")
        rest = "" if known is None else f", {len(known.times_ms)} of which it knows"
        return Result(
            None, {}, f"a call would measure {count} candidates{rest}, at most {budget_s:g} s"
        )


# What it costs


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def _output_bytes(inv: Invocation, choice: Choice) -> int | None:
    if inv.direction == BACKWARD:
        return sum(_bytes(x) for name, x in inv.call.arrays().items() if name in inv.wanted)
    run = choice.implementation.forward
    try:
        made = jax.eval_shape(lambda call: run(call, choice.cfg)[0], inv.call)
    except Exception as error:  # noqa: BLE001 - a kernel may fail in any way; the choice stands
        _log(inv, error)
        return None
    return sum(map(_bytes, jax.tree.leaves(made)))


def _log(inv: Invocation, error: Exception) -> None:
    logging.getLogger("ejkernel").warning("%s cannot be traced: %s", inv.kernel.name, error)


def _flops(inv: Invocation) -> int | None:
    """The dense count: lengths, ids and masks are data of the call, and take nothing away."""
    work = inv.kernel.spec.work if isinstance(inv.kernel, _op_kernel.OpKernel) else None
    if work is None:
        return None
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in inv.call.arrays().items()}
    return work.flops(inv.call.with_arrays(shapes), inv.direction)


# Text


def _direction_lines(title: str, made: Direction) -> list[str]:
    if made.entry is None:
        lines = [f"{title}: nothing can run this call", f"  {made.problem}"]
    else:
        lines = [f"{title}: {made.entry}, said by {made.source}"]
        lines.append(f"  config: {_config_text(made.config)}")
        lines += [f"  taken from a {made.row}"] if made.row else []
        lines += [f"  tier {said}" for said in made.trail]
    for name, reason in made.refused.items():
        lines.append(f"  refused {name}: {reason}")
    lines += [f"  could serve it too: {name}" for name in made.able]
    for platform, reason in made.missing.items():
        lines.append(f"  not here {platform}: {reason}")
    for candidate, reason in made.failures.items():
        lines.append(f"  failed in tuning {candidate}: {reason}")
    for candidate, time in sorted(made.times_ms.items(), key=lambda item: item[1]):
        lines.append(f"  measured {candidate}: {time:.4g} ms")
    return [*lines, f"  {_cost_text(made)}"]


def _config_text(config: Any) -> str:
    if not isinstance(config, dict):
        return "nothing to configure" if config is None else str(config)
    return ", ".join(f"{name}={value}" for name, value in config.items())


def _cost_text(made: Direction) -> str:
    text = f"reads {_size(made.input_bytes)}"
    if made.output_bytes is not None:
        text += f", writes {_size(made.output_bytes)}"
    if made.flops is not None:
        text += f", computes {made.flops / 1e9:.4g} GFLOP (dense count)"
    return text


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
