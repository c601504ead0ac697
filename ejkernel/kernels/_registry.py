"""All implementations of all ops: who can serve a call, and why the others cannot."""

import collections
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ejkernel import _device
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import _spec
from ejkernel.kernels._platforms import (
    Backend,
    Folder,
    Platform,
    folders_of,
    installed,
    member,
    packaged_ops,
    why_not_on,
)
from ejkernel.ops.core.kernel import BACKWARD, FORWARD, Implementation
from ejkernel.ops.core.types import BwdParams, FwdParams
from ejkernel.ops.utils import serialize


@dataclasses.dataclass(frozen=True, eq=False)
class KernelEntry:
    """One registered kernel of an op."""

    op: str
    platform: Platform
    backend: Backend
    priority: int
    fn: Callable[..., Any]  # fn(args, cfg) -> (outputs, residuals)
    honours: frozenset[str] | None  # optional arguments it acts on; None: all
    requires: Callable[[Any], str | None]
    backward: Callable[..., dict[str, Any]] | None
    backward_requires: Callable[[Any], str | None]  # what only its backward cannot do
    device_requires: Callable[[Any, _device.Target], str | None]  # what depends on the device too
    config: Any  # a module or object with Config, heuristic(args, direction, target), …
    version: int
    derivative: str
    base: "KernelEntry | None" = None  # of a derived op: the kernel of the base that it runs
    # why `platform="auto"` does not take it: it runs only where its platform is asked for
    by_name: str | None = None
    # whether others come first for a call that nobody has measured
    defers: Callable[[Any], bool] = lambda args: False

    @property
    def name(self) -> str:
        rank = f"@{self.priority}" if self.priority else ""
        return f"{self.platform}/{self.backend}{rank}"

    @property
    def traces_options(self) -> bool:
        """Whether options may be arrays; other kernels are compiled for their values."""
        return self.platform == Platform.XLA

    def why_not(
        self, args: Any, target: _device.Target | None = None, direction: str = FORWARD
    ) -> str | None:
        """Why this kernel cannot serve a call; None when it can."""
        if target is not None:
            reason = why_not_on(self.platform, self.backend, target)
            reason = reason or self.device_requires(args, target)
            if reason is not None:
                return reason
        if self.honours is not None and (dropped := sorted(args.given() - self.honours)):
            return f"does not honour {dropped}"
        if not self.traces_options and (traced := args.traced_options()):
            names = ", ".join(f"`{name}`" for name in traced)
            return f"compiles {names} into its kernels as a constant; the call passes an array"
        reason = self.requires(args)
        if reason is None and direction == BACKWARD:
            reason = self.backward_requires(args)
        return reason

    def why_not_unasked(self, target: _device.Target | None) -> str | None:
        """Why calls that ask for no platform never take this kernel; None when they may."""
        if self.by_name is None:
            return None
        there = None if target is None else why_not_on(self.platform, self.backend, target)
        return there or self.by_name

    def runs_on(self, target: _device.Target) -> bool:
        """Whether this is a kernel for a device, itself or interpreted."""
        return why_not_on(self.platform, self.backend, target) is None

    def heuristic(
        self, args: Any, direction: str = FORWARD, target: _device.Target | None = None
    ) -> Any:
        """The config to use before anything is measured."""
        if self.config is None:
            return None
        return self.config.heuristic(args, direction, target or _device.find())

    def candidates(
        self, args: Any, direction: str = FORWARD, target: _device.Target | None = None
    ) -> Sequence[Any]:
        """The configs worth measuring."""
        if self.config is None:
            return ()
        return self.config.candidates(args, direction, target or _device.find())

    def configure(
        self, args: Any, direction: str, override: Any, target: _device.Target | None = None
    ) -> Any:
        """A config of this kernel from an override in any accepted spelling."""
        if self.config is None:
            raise UnsupportedError(f"`{self.op}`: {self.name} has nothing to configure.")
        if isinstance(override, self.config.Config):
            return override
        if isinstance(override, FwdParams | BwdParams):
            guess = self.heuristic(args, direction, target)
            try:
                return self.config.from_params(guess, override.settings())
            except ValueError as error:
                raise ValueError(
                    f"`{self.op}`: {override} is not for {self.name}: {error}"
                ) from None
        raise TypeError(
            f"`{self.op}`: a config of {self.name} must be a FwdParams, a BwdParams or a "
            f"{self.config.Config.__qualname__}; got {override!r}."
        )

    def memory(self, args: Any, direction: str, cfg: Any) -> int | None:
        """Bytes of temporaries by the config's own estimate."""
        estimate = getattr(self.config, "memory", None)
        return None if estimate is None else estimate(args, direction, cfg)

    def decode(self, args: Any, direction: str, plain: Any) -> Any:
        """A config from plain values; unknown or impossible values are refused."""
        if self.config is None:
            if plain is not None:
                raise ValueError(f"{self.name} has nothing to configure")
            return None
        return serialize.from_builtins(plain, self.config.Config)

    def misfit(
        self, args: Any, direction: str, cfg: Any, target: _device.Target | None = None
    ) -> str | None:
        """Why a config that served another call cannot serve this one; None when it can."""
        kind = type(None) if self.config is None else self.config.Config
        if not isinstance(cfg, kind):
            return f"{cfg!r} is no config of {self.name}"
        check = getattr(self.config, "misfit", None)
        return None if check is None else check(args, direction, cfg, target or _device.find())

    def implementation(
        self, target: _device.Target | None, backend: str = Backend.ANY
    ) -> Implementation:
        """This entry for a target; `backend` is the kind of device the caller insists on."""

        def why_not(args: Any, direction: str) -> str | None:
            if target is not None and backend not in (Backend.ANY, target.kind):
                return f"`cfg.backend` asks for {backend}; this call is for {target.kind}"
            return self.why_not(args, target, direction)

        return Implementation(
            name=self.name,
            version=self.version,
            forward=self.fn,
            backward=self.backward,
            why_not=why_not,
            heuristic=functools.partial(self.heuristic, target=target),
            candidates=functools.partial(self.candidates, target=target),
            configure=functools.partial(self.configure, target=target),
            memory=self.memory,
            decode=self.decode,
            misfit=functools.partial(self.misfit, target=target),
            derivative=self.derivative,
            portable=self.backend == Backend.ANY,
            defers=self.defers,
        )


class KernelRegistry:
    """Entries by op; the folders of the package are imported when an op is first asked for."""

    def __init__(self) -> None:
        self._entries: dict[str, list[KernelEntry]] = {}
        self._specs: dict[str, _spec.OpSpec] = {}
        self._missing: dict[tuple[str, Platform], str] = {}
        self._loaded: set[tuple[str, str]] = set()  # (op, package)
        self._from_signature: set[str] = set()
        self._generation: dict[str, int] = collections.Counter()
        self._importing = threading.local()  # has `package` while this thread imports kernels

    # Operations

    def spec(self, op: str) -> _spec.OpSpec:
        """The specification of an op."""
        if op not in self._specs and op in packaged_ops():
            self._specs[op] = importlib.import_module(f"ejkernel.kernels._specs.{op}").SPEC
        if op not in self._specs:
            raise ValueError(f"There is no op {op!r}; known are {', '.join(self.ops())}.")
        return self._specs[op]

    def ops(self) -> Sequence[str]:
        return sorted({*packaged_ops(), *self._specs})

    def define(self, spec: _spec.OpSpec, *, from_signature: bool = False) -> None:
        """Adds an op from outside the package."""
        if spec.name in self.ops():
            raise ValueError(f"The op {spec.name!r} exists already.")
        self._specs[spec.name] = spec
        if from_signature:  # goes when its last kernel goes
            self._from_signature.add(spec.name)

    # Kernels

    def register(
        self,
        op: str,
        platform: Platform | str,
        backend: Backend | str,
        priority: int = 0,
        replace: bool = False,
        **options: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a kernel, as a decorator.

        Args:
          op: The operation; a new name makes a new one, from the function's signature.
          platform: What the kernel is written in.
          backend: What it runs on.
          priority: Kernels of higher priority are preferred.
          replace: Take the place of a kernel with the same platform, backend and priority.
          **options: `honours`, `requires`, `backward`, `backward_requires`, `device_requires`,
            `config`, `version`, `derivative`, `by_name` of `KernelEntry`, for functions of the
            form `fn(args, cfg)`.
        """
        written: Platform = member(Platform, platform)
        runs_on: Backend = member(Backend, backend)

        def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
            if _takes_args(fn):
                self.spec(op)  # a new op needs a function with a signature
                made: dict[str, Any] = _options(op, written, options) | {"fn": fn}
            else:
                from ejkernel.kernels import _outside

                made = _options(op, written, _outside.adapt(self, op, fn) | options)
            entry = KernelEntry(op=op, platform=written, backend=runs_on, priority=priority, **made)
            self._add(entry, replace)
            return fn

        return decorate

    def _add(self, entry: KernelEntry, replace: bool) -> None:
        same = [e for e in self._entries.get(entry.op, ()) if e.name == entry.name]
        lowering = self.spec(entry.op).lowers_to
        rivals = lowering is None or lowering.beside
        of_base = [] if rivals else self.list(lowering.base.name)
        through = any(e.name == entry.name for e in of_base)
        if (same or through) and not replace:
            raise ValueError(
                f"`{entry.op}`: {entry.name} is registered already; pass another `priority`, or "
                "`replace=True` to take its place."
            )
        kept = [e for e in self._entries.get(entry.op, ()) if e not in same]
        self._entries[entry.op] = sorted([*kept, entry], key=_rank)
        # importing more of the package changes no choice that was made before
        if not getattr(self._importing, "package", None):
            self._generation[entry.op] += 1

    def unregister(self, entry: KernelEntry) -> None:
        """Takes a kernel out again."""
        if entry.base is not None:
            raise ValueError(
                f"`{entry.op}`: {entry.name} is the kernel of `{entry.base.op}`, to which the op "
                "lowers; unregister that one."
            )
        self._entries[entry.op] = [e for e in self._entries[entry.op] if e is not entry]
        self._generation[entry.op] += 1
        if not self._entries[entry.op] and entry.op in self._from_signature:
            self._from_signature.discard(entry.op)
            del self._specs[entry.op]

    def list(
        self, op: str | None = None, platform: Platform | str | None = None
    ) -> Sequence[KernelEntry]:
        """All entries, or those of one op or platform, best first."""
        if op is None:
            return [entry for name in self.ops() for entry in self.list(name, platform)]
        self.spec(op)
        platforms = tuple(Platform) if platform is None else (member(Platform, platform),)
        found = self._entries_of(op, lambda name: self._load(name, platforms))
        return [entry for entry in found if entry.platform in platforms]

    def _entries_of(self, op: str, load: Callable[[str], None]) -> Sequence[KernelEntry]:
        """Kernels of an op, and of the base of a derived op as kernels of the op, best first.

        `load(name)` imports the kernels of an op that are wanted.
        """
        load(op)
        own, lowering = self._entries.get(op, ()), self.spec(op).lowers_to
        if lowering is None:
            return list(own)
        from ejkernel.kernels import _derived

        taken, of_base = {entry.name for entry in own}, self._entries_of(lowering.base.name, load)
        through = [_derived.derive(self.spec(op), e) for e in of_base if e.name not in taken]
        if lowering.beside:  # behind those of the op itself
            through += [_derived.derive(self.spec(op), e, 1) for e in of_base if e.name in taken]
        return sorted([*own, *through], key=_rank)

    def for_target(
        self, op: str, target: _device.Target | None
    ) -> tuple[Sequence[KernelEntry], dict[str, str]]:
        """Kernels of an op that may run on a target, and why others do not, by name.

        The code of those others is not imported.
        """
        others: dict[str, str] = {}

        def load(name: str) -> None:
            for platform, folder in folders_of(name):
                reason = None if target is None else why_not_on(platform, folder.backend, target)
                if reason is None:
                    self._load(name, [platform], [folder])
                elif (name, folder.package) not in self._loaded and folder.usable(name):
                    others[f"{platform}/{folder.backend}"] = reason

        found = self._entries_of(op, load)
        return found, {name: r for name, r in others.items() if name not in {e.name for e in found}}

    def generation(self, op: str) -> int:
        """Counts changes of an op's entries from outside; one makes programs choose again."""
        lowering = self.spec(op).lowers_to
        if lowering is None:
            return self._generation[op]
        return self._generation[op] + sum(map(self.generation, lowering.ops()))

    def missing(self, op: str, platform: Platform | str) -> str:
        """Why an op has no kernel of a platform here."""
        self._load(op)
        asked: Platform = member(Platform, platform)
        lowering = self.spec(op).lowers_to
        nor = "" if lowering is None else f", nor one of `{lowering.base.name}`, which serves it"
        return self._missing.get((op, asked), f"no {asked} kernel of `{op}` is registered{nor}")

    def why_not(self, op: str, args: Any) -> dict[str, str | None]:
        """For each entry of an op, why it cannot serve a call on the default device, or None."""
        target = _device.of_arrays(list(args.arrays().values())) or _device.find()
        return {entry.name: entry.why_not(args, target) for entry in self.list(op)}

    def get(
        self,
        op: str,
        platform: Platform | str | None = None,
        backend: Backend | str | None = None,
    ) -> Callable[..., Any]:
        """A function that runs one platform's kernel of an op, with the op's own arguments."""
        from ejkernel.kernels import _op_kernel

        wanted = None if platform is None else member(Platform, platform)
        kind = None if backend is None else member(Backend, backend)
        here = _device.find()
        entries = [
            e
            for e in self.list(op)
            if (e.by_name is None if wanted is None else e.platform == wanted)
            and (e.runs_on(here) if kind is None else e.backend in (Backend.ANY, kind))
        ]
        if not entries:
            elsewhere = [e for e in self.list(op) if wanted is None or e.platform == wanted]
            needs = ", ".join(sorted({e.backend.upper() for e in elsewhere}))
            reason = self.missing(op, wanted) if wanted else "no kernel is registered"
            reason = f"needs {needs}" if elsewhere else reason
            raise UnsupportedError(
                f"`{op}`: {reason} ({wanted or 'any platform'} on {kind or here.kind})."
            )
        return _op_kernel.keyword_function(self.spec(op), entries[0])

    def validate_signatures(self) -> Sequence[str]:
        """Differences between public functions, args types and kernels; empty is good."""
        from ejkernel.kernels import _outside

        problems = []
        for op in self.ops():
            problems += _outside.public_differences(self.spec(op))
            for entry in self.list(op):
                known = {f.name for f in _spec.public_fields(self.spec(op).args)}
                known |= {f.name for f in dataclasses.fields(self.spec(op).args)}
                if entry.honours is not None and (unknown := sorted(entry.honours - known)):
                    problems.append(f"{op}: {entry.name} honours unknown arguments {unknown}")
        return problems

    def _load(
        self,
        op: str,
        platforms: Iterable[Platform] = tuple(Platform),
        folders: Iterable[Folder] | None = None,
    ) -> None:
        """Imports the package's kernels of an op, all or those of some platforms and folders."""
        for platform, folder in folders_of(op):
            chosen = platform in platforms and (folders is None or folder in folders)
            if not chosen or (op, folder.package) in self._loaded:
                continue
            if folder.usable(op):
                self._import(op, platform, folder)
            elif folder.needs and not installed(folder.needs):
                self._missing[op, platform] = folder.install
            self._loaded.add((op, folder.package))  # last: another thread may ask meanwhile

    def _import(self, op: str, platform: Platform, folder: Folder) -> None:
        outer = getattr(self._importing, "package", None)
        self._importing.package = folder.package
        try:
            importlib.import_module(f"{folder.package}.{op}")
        except ImportError as error:
            if folder.needs is None:
                raise
            self._missing[op, platform] = f"{folder.needs} cannot be imported: {error}"
        finally:
            self._importing.package = outer


def _options(op: str, platform: Platform, given: dict[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {
        "honours": None,
        "requires": lambda args: None,
        "backward": None,
        "backward_requires": lambda args: None,
        "device_requires": lambda args, target: None,
        "config": None,
        "version": 1,
        "derivative": "rule",
        "by_name": None,
        "fn": None,
    }
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"`register({op!r}, {platform})`: unknown options {unknown}.")
    made = known | given
    if made["honours"] is not None:
        made["honours"] = frozenset(made["honours"])
    return made


def _takes_args(fn: Callable[..., Any]) -> bool:
    return list(inspect.signature(fn).parameters)[:2] == ["args", "cfg"]


def _rank(entry: KernelEntry) -> tuple[int, bool, bool, str]:
    # hand-written kernels before XLA's; the tuner decides by measurement
    by_name = entry.by_name is not None
    return -entry.priority, entry.platform == Platform.XLA, by_name, entry.name


kernel_registry = KernelRegistry()
