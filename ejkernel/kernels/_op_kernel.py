"""`OpKernel`: a `Kernel` whose implementations come from the registry."""

import concurrent.futures
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from ejkernel import _device, _settings
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import _derived, _donation, _oracle, _spec, _types
from ejkernel.kernels._platforms import Backend, Platform, member
from ejkernel.kernels._registry import KernelEntry, kernel_registry
from ejkernel.ops import registry
from ejkernel.ops.config.selection import Choice, refusal
from ejkernel.ops.core.kernel import (
    FORWARD,
    Implementation,
    Invocation,
    Kernel,
    Request,
    concrete_call,
)
from ejkernel.ops.core.sharding import Layout
from ejkernel.ops.core.types import BwdParams, FwdParams
from ejkernel.ops.execution import benchmark
from ejkernel.ops.execution.executor import NO_NUMBERS, check_numbers, default_executor

# Arguments of every public function besides the op's own.
CALL_ARGUMENTS = ("platform", "cfg", "mesh", "in_specs", "out_specs", "fwd_params", "bwd_params")


class OpKernel(Kernel):
    """Base of the kernel classes in `ejkernel.modules`; a subclass only names its op."""

    op: str
    function: Callable[..., Any]  # the public function, whose signature binds a call
    # the classes of `ejkernel.modules` by op, and what imports the class of an op
    known: ClassVar[dict[str, type["OpKernel"]]] = {}
    importers: ClassVar[list[Callable[[str], None]]] = []

    def __init_subclass__(cls) -> None:
        if "function" in vars(cls):
            OpKernel.known[cls.op] = cls

    @staticmethod
    def public(op: str) -> type["OpKernel"] | None:
        """The class of `ejkernel.modules` for an op; None where there is none."""
        if op not in OpKernel.known:
            for import_class in OpKernel.importers:
                import_class(op)
        return OpKernel.known.get(op)

    def __init__(self) -> None:
        super().__init__(name=self.op)
        if "function" in vars(type(self)):
            registry.remember_kernel(self)

    @property
    def spec(self) -> _spec.OpSpec:
        return kernel_registry.spec(self.op)

    def cache_token(self) -> Any:
        return type(self), kernel_registry.generation(self.op)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any) -> dict[str, Any]:
        try:
            bound = inspect.signature(type(self).function).bind(*args, cfg=cfg, **kwargs)
        except TypeError as error:
            raise TypeError(f"`{self.op}`: {error}.") from None
        bound.apply_defaults()
        if self.spec.written:
            _donation.refuse(self.op, bound.arguments)
        return self.dynamic(bound.arguments)

    def dynamic(self, call: dict[str, Any]) -> dict[str, Any]:
        """Makes arrays of Python scalars that stand for arrays; a new value compiles nothing."""
        for value in call.values():
            if isinstance(value, np.ndarray) and value.dtype.kind in NO_NUMBERS:
                check_numbers(self.op, call)
        for field in _spec.traceable_fields(self.spec.args):
            value = call[field.name]
            if isinstance(value, np.ndarray) and not value.ndim:
                call[field.name] = value.item()  # a number of NumPy is an option, not data
        for name, convert in self.spec.scalars.items():
            if call[name] is not None:
                call[name] = convert(call[name])
        self.spec.check_values(call, _settings.current().debug)
        return call

    def execute(self, call: dict[str, Any]) -> Any:
        """Runs a call made to a function, whose arguments may be given away."""
        executor, call = default_executor(), self.dynamic(call)
        if not self.spec.written:
            return executor.run(self, call)
        work = _donation.Work(
            (self.cache_token(), executor.chooser.generation), functools.partial(executor.run, self)
        )
        return _donation.run(self.op, self.spec.written, call, work)

    def prepare(self, call: dict[str, Any]) -> tuple[_spec.OpArgs, Request]:
        request = self._request(call)
        values = self.spec.unpack({n: v for n, v in call.items() if n not in CALL_ARGUMENTS})
        if _settings.current().typecheck:
            _types.check_types(self.op, self.spec.args, values)
        return self.spec.canonicalize(values), request

    def _request(self, call: dict[str, Any]) -> Request:
        """What was asked for besides the computation; contradictions are refused."""
        platform, cfg = str(call["platform"]).lower(), call["cfg"]
        if platform not in ("auto", *Platform):
            raise ValueError(
                f"`{self.op}`: `platform` must be 'auto' or one of "
                f"{[str(p) for p in Platform]}; got {call['platform']!r}."
            )
        fwd, bwd = call.get("fwd_params"), call.get("bwd_params")
        inside = getattr(cfg, "platform", None)
        if inside not in (None, "auto"):
            inside = str(member(Platform, inside))
            if platform not in ("auto", inside):
                raise ValueError(
                    f"`{self.op}`: `platform={platform!r}` contradicts `cfg.platform={inside!r}`."
                )
            platform = inside
        if platform == "auto":
            platform = _settings.current().platform or "auto"
        if cfg is not None:
            if fwd is not None or bwd is not None:
                raise ValueError(
                    f"`{self.op}`: give either `cfg` or `fwd_params`/`bwd_params`, not both."
                )
            if self.spec.config is None or not isinstance(cfg, self.spec.config):
                kind = getattr(self.spec.config, "__name__", "config of this op; it has none")
                raise TypeError(f"`{self.op}`: `cfg` must be a {kind}; got {cfg!r}.")
            fwd, bwd = cfg.fwd_params, cfg.bwd_params
        for name, params, kind in (("fwd_params", fwd, FwdParams), ("bwd_params", bwd, BwdParams)):
            # or a kernel's own config
            own = dataclasses.is_dataclass(params) and not isinstance(params, FwdParams | BwdParams)
            if not (params is None or isinstance(params, kind) or own):
                raise TypeError(f"`{self.op}`: `{name}` must be a {kind.__name__}; got {params!r}.")
        backend = getattr(cfg, "backend", None)
        if backend not in (None, *Backend):
            raise ValueError(
                f"`{self.op}`: `cfg.backend` must be one of {[str(b) for b in Backend]}; "
                f"got {backend!r}."
            )
        backend = "any" if backend is None else str(backend)
        place = self._placement(call)
        return Request(platform=platform, backend=backend, forward=fwd, backward=bwd, **place)

    def _placement(self, call: dict[str, Any]) -> dict[str, Any]:
        placement = {name: call[name] for name in ("mesh", "in_specs", "out_specs")}
        absent = [name for name, value in placement.items() if value is None]
        if absent and absent[-2:] != ["in_specs", "out_specs"]:
            raise ValueError(
                f"`{self.op}`: `in_specs` and `out_specs` go together, with a `mesh`; {absent} "
                "missing. A `mesh` alone splits batch and heads."
            )
        mesh = placement["mesh"]
        if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh | None):
            raise TypeError(
                f"`{self.op}`: `mesh` must be a `jax.sharding.Mesh`; got {mesh!r} of type "
                f"{type(mesh).__name__}."
            )
        return placement

    def finish(self, args: Any, outputs: tuple[Any, ...]) -> Any:
        outputs = self.spec.finish(args, outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def layout(self, args: Any) -> Layout | None:
        return self.spec.layout(args)

    def residual_axes(self, args: Any) -> Sequence[tuple[str, ...]] | None:
        return self.spec.residual_axes(args)

    def derivative_parts(self, args: Any, choice: Choice) -> dict[str, Any]:
        spec = self.spec
        return {
            "formula": spec.formula_fn(),
            "differentiable": spec.differentiable,
            "output_names": spec.outputs(args),
            "residual_names": tuple(spec.residual_shapes(args)),
        }

    def keyed(self, inv: Invocation) -> Invocation:
        """A call of a derived op is one of its base, unless a kernel of its own may serve it."""
        lowering = _derived.keyed_by(self.spec, self._entries(inv))
        if lowering is None:
            return inv

        def concrete() -> Any:
            call = concrete_call(inv)
            return None if call is None else lowering.rewrite(call)

        return dataclasses.replace(
            inv,
            kernel=RegisteredKernel(lowering.base.name),
            call=lowering.shapes(inv.call),
            wanted=lowering.names(inv.wanted),
            metadata={**inv.metadata, "concrete": concrete},
        )

    def restore(self, document: dict[str, Any]) -> Invocation:
        arrays = {
            name: jax.ShapeDtypeStruct(tuple(x["shape"]), jnp.dtype(x["dtype"]))
            for name, x in document["arrays"].items()
        }
        statics = {
            f.name: msgspec.convert(document["statics"][f.name], _types.plain_type(f.type))
            for f in _spec.static_fields(self.spec.args)
            if f.name not in arrays
        }
        inv = Invocation(
            kernel=self,
            call=self.spec.args(**arrays, **statics),
            target=_device.find(),
            platform=document["platform"],
            placement=document.get("placement"),
            direction=document["direction"],
            wanted=frozenset(document["wanted"]),
        )
        # precision and shardings are those of the program, not of this moment
        inv.__dict__["document"] = document | {"device": inv.device_fingerprint}
        return inv

    def example_inputs(self, inv: Invocation) -> Any:
        concrete = concrete_call(inv)
        return self.spec.example(inv.call) if concrete is None else concrete

    def check_candidate(
        self, inv: Invocation, implementation: Implementation, config: Any
    ) -> str | None:
        """Compares a candidate with the oracle on a reduced twin of the call."""
        return self.compile_check(inv, implementation, config)()

    def compile_check(
        self, inv: Invocation, implementation: Implementation, config: Any
    ) -> Callable[[], str | None]:
        sizes = (getattr(config, name, 1) for name in ("block_q", "block_k", "block_m", "block_t"))
        block = max(*sizes, 16)
        args = self.spec.reduced(inv.call, block)
        if args is None:
            return lambda: None
        wanted = tuple(n for n in args.arrays() if n in inv.wanted)
        shapes = {n: (x.shape, str(x.dtype)) for n, x in args.arrays().items()}
        key = str((self.op, wanted, shapes, args.statics()))
        cotangents, solving = _solve_once(key, self.spec, args, wanted, inv.target)
        benchmark.look()  # the oracle may have taken long

        if (reason := self._residual_problem(args, implementation, config)) is not None:
            return lambda: reason

        def run(args: Any, cotangents: Any) -> Any:
            if inv.direction == FORWARD:
                return implementation.forward(args, config)[0], {}
            guess = implementation.heuristic(args, FORWARD)
            outputs, residuals = implementation.forward(args, guess)
            return outputs, implementation.backward(
                args, config, outputs, residuals, cotangents, inv.wanted
            )

        compiled = jax.jit(run).lower(args, cotangents).compile()

        def check() -> str | None:
            problem = solving.result()
            return self._mismatch(problem, *compiled(problem.args, problem.cotangents))

        return check

    def _mismatch(self, problem: _oracle.Problem, outputs: Any, gradients: Any) -> str | None:
        """How outputs and gradients differ from the oracle's."""
        for out, like in zip(outputs, problem.cotangents, strict=True):
            if (out.shape, out.dtype) != (like.shape, like.dtype):
                return (
                    f"gives {out.dtype}{list(out.shape)}, where the oracle has "
                    f"{like.dtype}{list(like.shape)}"
                )
        gradients = {name: gradients[name] for name in problem.wanted if name in gradients}
        answer = _oracle.answer(self.spec, problem.args, outputs, gradients)
        return _oracle.mismatch(answer, problem)

    def _residual_problem(
        self, args: Any, implementation: Implementation, config: Any
    ) -> str | None:
        """How a forward's residuals differ from the op's, which any backward may be given."""
        if implementation.derivative != "rule" or not self.spec.residual_shapes(args):
            return None
        _, residuals = jax.eval_shape(lambda args: implementation.forward(args, config), args)
        told = lambda arrays: [f"{x.dtype}{list(x.shape)}" for x in arrays]
        found, expected = told(residuals), told(self.spec.residual_shapes(args).values())
        if found == expected:
            return None
        return f"gives residuals {', '.join(found)}, where the op has {', '.join(expected)}"

    def _entries(self, inv: Invocation) -> Sequence[KernelEntry]:
        """The kernels to choose from, of the platform that a call asks for."""
        if inv.platform == "auto":
            found, _ = kernel_registry.for_target(self.op, inv.target)
            return [entry for entry in found if entry.by_name is None]
        every = kernel_registry.list(self.op)
        return [e for e in every if inv.platform in (e.platform, e.name)]

    def implementations(self, inv: Invocation) -> Sequence[Implementation]:
        if inv.platform == "auto":
            entries, others = kernel_registry.for_target(self.op, inv.target)
            for entry in entries:
                if (reason := entry.why_not_unasked(inv.target)) is not None:
                    others[entry.name] = reason
            taken = [entry for entry in entries if entry.by_name is None]
            made = [entry.implementation(inv.target, inv.backend) for entry in taken]
            return made + [_refusing(name, reason) for name, reason in others.items()]
        entries = self._entries(inv)
        if not entries:
            reason = kernel_registry.missing(self.op, inv.platform)
            raise refusal(inv, {inv.platform: reason})
        return [entry.implementation(inv.target, inv.backend) for entry in entries]


def _refusing(name: str, reason: str) -> Implementation:
    """A kernel that a call does not reach: it cannot serve it, or is only run by name."""

    def forward(args: Any, cfg: Any) -> Any:
        raise UnsupportedError(f"{name}: {reason}")

    return Implementation(name=name, forward=forward, why_not=lambda args, direction: reason)


_Solving = tuple[tuple[Any, ...], "concurrent.futures.Future[_oracle.Problem]"]
# twins of calls that differ in lengths alone are the same: their oracles serve many keys
_solved: dict[str, _Solving] = {}
_solved_lock = threading.Lock()
_MOST_SOLVED = 16


def _solve_once(
    key: str, spec: _spec.OpSpec, args: Any, wanted: tuple[str, ...], target: Any
) -> _Solving:
    """The shapes of a twin's cotangents, and the answer of its oracle.

    The first thread computes the answer before it returns, others return without waiting for it.
    """
    with _solved_lock:
        if key in _solved:
            return _solved[key]
        if len(_solved) >= _MOST_SOLVED:
            _solved.pop(next(iter(_solved)))
        shapes = tuple(jax.eval_shape(lambda: spec.reference_fn()(args)))
        future: concurrent.futures.Future[_oracle.Problem] = concurrent.futures.Future()
        _solved[key] = shapes, future
    try:
        future.set_result(_oracle.solve(spec, args, wanted, _oracle.compiler_options(target)))
    except BaseException as error:
        _solved.pop(key, None)
        future.set_exception(error)
        raise
    return shapes, future


class RegisteredKernel(OpKernel):
    """An op by its name, without its public function."""

    def __init__(self, op: str):
        self.op = op
        super().__init__()


class EntryKernel(OpKernel):
    """An op restricted to one entry."""

    def __init__(self, entry: KernelEntry):
        self.op, self.entry = entry.op, entry
        super().__init__()

    def cache_token(self) -> Any:
        return self.entry

    def prepare(self, call: dict[str, Any]) -> tuple[_spec.OpArgs, Request]:
        # what is remembered of it is of this entry, not of the op's best
        args, request = super().prepare(call)
        return args, dataclasses.replace(request, platform=self.entry.name)

    def _entries(self, inv: Invocation) -> Sequence[KernelEntry]:
        return [self.entry]


def keyword_function(spec: _spec.OpSpec, entry: KernelEntry) -> Callable[..., Any]:
    """A function with the op's own arguments that runs one entry."""
    kernel = EntryKernel(entry)
    signature = args_signature(spec)
    fixed = dict.fromkeys(CALL_ARGUMENTS) | {"platform": "auto"}

    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"`{spec.name}`: {error}.") from None
        bound.apply_defaults()
        return kernel.execute(bound.arguments | fixed)

    function.__name__ = function.__qualname__ = spec.name
    function.__signature__ = signature
    function.entry = entry
    return function


def args_signature(spec: _spec.OpSpec) -> inspect.Signature:
    """The signature that an args type stands for."""
    return inspect.Signature(
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                annotation=field.type,
                default=inspect.Parameter.empty
                if field.default is dataclasses.MISSING
                else field.default,
            )
            for field in _spec.public_fields(spec.args)
        ]
    )


def call(kernel: type[OpKernel], arguments: dict[str, Any]) -> Any:
    """Runs a public function's call; `arguments` are its parameters by name."""
    instance = _instances.get(kernel)
    if instance is None:
        instance = _instances[kernel] = kernel()
    return instance.execute(arguments)


def _by_name(name: str) -> OpKernel | None:
    kernel = OpKernel.public(name)
    return None if kernel is None else _instances.setdefault(kernel, kernel())


registry.add_resolver(_by_name)

_instances: dict[type[OpKernel], OpKernel] = {}
