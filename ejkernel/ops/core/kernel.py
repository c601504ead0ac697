"""`Kernel`, what the executor runs; `Implementation`, one way to run it; `Invocation`, a call."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _device
from ejkernel._device import Target
from ejkernel.ops.core.types import AbstractArgs, CallArgs, Cfg, Out, is_array
from ejkernel.ops.utils import fingerprint, serialize

FORWARD, BACKWARD = "forward", "backward"

# The methods a user's kernel may define, best first, for each kind of device.
_METHODS = {
    "gpu": ("triton", "cuda", "cudnn", "pallas", "gpu", "xla"),
    "tpu": ("pallas", "tpu", "xla"),
    "cpu": ("cpu", "xla"),
}


def _no_config(args: AbstractArgs, direction: str) -> Any:
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Implementation:
    """One way to compute an op, with what it can do and how it is configured."""

    name: str  # "triton/gpu"; a tuned choice remembers it
    forward: Callable[[Any, Any], tuple[Any, tuple[jax.Array, ...]]]  # outputs, residuals
    # (args, cfg, outputs, residuals, cotangents, wanted) -> gradients by name; None: there is none
    backward: Callable[..., dict[str, jax.Array]] | None = None
    version: int = 1
    why_not: Callable[[Any, str], str | None] = lambda args, direction: None
    heuristic: Callable[[Any, str], Any] = _no_config
    candidates: Callable[[Any, str], Sequence[Any]] = lambda args, direction: ()
    # bytes that a config takes besides the arguments, if somebody can tell
    memory: Callable[[Any, str, Any], int | None] = lambda args, direction, cfg: None
    # an override in any accepted spelling -> a config of this implementation, checked
    configure: Callable[[Any, str, Any], Any] = lambda args, direction, override: override
    # plain values read from disk -> a config, checked
    decode: Callable[[Any, str, Any], Any] = lambda args, direction, plain: plain
    # why a config that served another call, or another kernel of this name, cannot serve this one
    misfit: Callable[[Any, str, Any], str | None] = lambda args, direction, cfg: None
    # "rule": through `backward`; "jax": JAX differentiates `forward`
    derivative: str = "rule"
    portable: bool = False  # runs on every device
    # whether others come first for a call that nobody has measured
    defers: Callable[[Any], bool] = lambda args: False


@dataclasses.dataclass(frozen=True)
class Request:
    """What a caller asked for besides the computation itself."""

    platform: str = "auto"
    backend: str = "any"
    forward: Any = None  # configuration overrides, per direction
    backward: Any = None
    mesh: Any = None
    in_specs: Any = None
    out_specs: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Invocation(Generic[Cfg, Out]):
    """Everything the choice of a configuration may depend on."""

    kernel: "Kernel[Cfg, Out]"
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    call: Any = None  # the canonical arguments; built from args and kwargs when not given
    target: Target | None = None
    platform: str = "auto"
    backend: str = "any"
    placement: str | None = None  # how the arrays of an eager call are split over devices
    direction: str = FORWARD
    wanted: frozenset[str] = frozenset()  # perturbed arrays; backward only
    override: Any = None

    def __post_init__(self) -> None:
        fill = functools.partial(object.__setattr__, self)
        if self.call is None:
            fill("call", CallArgs.of(self.args, self.kwargs))
        elif isinstance(self.call, CallArgs):
            args, kwargs = self.call.call()
            fill("args", args)
            fill("kwargs", kwargs)
        else:
            fill("args", tuple(self.call.arrays().values()))
        if self.placement is None:
            arrays = (x for x in self.call.arrays().values() if isinstance(x, jax.Array))
            concrete = (x for x in arrays if not isinstance(x, jax.core.Tracer))
            first = next(concrete, None)
            fill("placement", None if first is None else fingerprint.of_sharding(first.sharding))
        if self.target is None:
            fill("target", _device.of_arrays(jax.tree.leaves(self.args)) or _device.find())

    @property
    def abstract_args(self) -> tuple[Any, ...]:
        """The positional arguments with every array replaced by its shape and dtype."""

        def abstract(leaf: Any) -> Any:
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            return leaf

        return jax.tree.map(abstract, self.args)

    @property
    def device_fingerprint(self) -> str:
        return fingerprint.device_fingerprint(self.target)

    @functools.cached_property
    def keyed(self) -> "Invocation":
        """The call whose key this one uses: itself, or the call of another op that it becomes."""
        return self.kernel.keyed(self)

    @property
    def op(self) -> str:
        """The op under which configurations of this call are remembered."""
        return self.document["op"]

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """Everything that tells this call from others, as plain values."""
        if self.keyed is not self:
            return self.keyed.document
        return fingerprint.document(
            op=self.kernel.name,
            direction=self.direction,
            platform=self.platform,
            device=self.device_fingerprint,
            arrays=self.call.arrays(),
            statics=self.call.statics(),
            placement=self.placement,
            wanted=sorted(self.wanted),
        )

    @functools.cached_property
    def key(self) -> str:
        """Equal for calls that may share a configuration, in every process."""
        return fingerprint.key(self.document)


class Kernel(Generic[Cfg, Out]):
    """An operation with one or more implementations; subclass it to bring your own.

    Define `run` or any of `run_{triton,pallas,cuda,cudnn,xla}` and `run_{gpu,tpu,cpu}`, each called
    as `run(*args, cfg=cfg, **kwargs)`, and `heuristic_cfg`. `custom_vjp(primals, cfg, kwargs,
    cotangents)` gives the gradients of the positional arguments; without it JAX differentiates.
    """

    custom_vjp: Callable[..., Any] | None = None

    def __init__(self, name: str | None = None, *, op_id: str | None = None):
        if name is not None and op_id is not None and name != op_id:
            raise ValueError(
                f"`Kernel`: `name` and `op_id` are one thing; got {name!r}, {op_id!r}."
            )
        self.name = name or op_id or type(self).__name__

    @property
    def op_id(self) -> str:
        return self.name

    def __call__(self, *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        from ejkernel.ops.execution import executor

        return executor.default_executor()(self, *args, cfg=cfg, **kwargs)

    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        raise NotImplementedError(f"{type(self).__name__} defines no `run` for this device.")

    def heuristic_cfg(self, inv: Invocation) -> Cfg:
        raise NotImplementedError(f"{type(self).__name__} defines no `heuristic_cfg`.")

    def config_space(self, inv: Invocation) -> Sequence[Cfg]:
        return ()

    def candidate_cfgs(self, inv: Invocation) -> Sequence[Cfg]:
        """Another name of `config_space`."""
        return self.config_space(inv)

    # What the executor asks; the ops of this library answer from their registry instead.

    def cache_token(self) -> Any:
        """Calls of kernels with equal tokens may share a compiled program."""
        return self

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any) -> dict[str, Any]:
        """The call as one pytree of values."""
        return {"args": args, "kwargs": kwargs, "cfg": cfg}

    def prepare(self, call: dict[str, Any]) -> tuple[AbstractArgs, Request]:
        """Canonical arguments, and what else was asked for."""
        request = Request(forward=call["cfg"], backward=call["cfg"])
        return CallArgs.of(call["args"], call["kwargs"]), request

    def finish(self, args: Any, outputs: Any) -> Any:
        """What the user gets from the outputs of an implementation."""
        return outputs

    def layout(self, args: Any) -> Any:
        """Axes of the arrays, for splitting a call over devices; None leaves that to JAX."""
        return None

    def residual_axes(self, args: Any) -> Sequence[tuple[str, ...]] | None:
        """Axes of what forward keeps for backward; None when somebody does not tell."""
        return None

    def derivative_parts(self, args: Any, choice: Any) -> dict[str, Any]:
        """The op's share of its derivative rule (see `autodiff.Rule`), for a choice."""
        count = sum(map(is_array, jax.tree.leaves(args.call()[0])))

        def formula(args: CallArgs) -> tuple[jax.Array, ...]:
            portable = self._methods("cpu")
            if not portable:
                return tuple(jax.tree.leaves(choice.implementation.forward(args, choice.cfg)[0]))
            positional, kwargs = args.call()
            return tuple(jax.tree.leaves(portable[-1][1](*positional, cfg=choice.cfg, **kwargs)))

        names = [str(i) for i in range(count)]
        return {
            "formula": formula,
            "differentiable": frozenset(names),
            "output_names": (),
            "residual_names": (),
        }

    def keyed(self, inv: Invocation) -> Invocation:
        """The call that an invocation is remembered and measured as.

        An op whose calls become calls of another op returns that op's invocation, so that both
        share their measured configurations.
        """
        return inv

    def example_inputs(self, inv: Invocation) -> Any:
        """Concrete arguments like those of a call, to measure it on; never zeros.

        The arguments themselves when the call was eager. Otherwise floats are drawn at random; a
        kernel that takes integers must say here what they look like.
        """
        if (concrete := concrete_call(inv)) is not None:
            return concrete
        made, keys = {}, jax.random.split(jax.random.key(0), max(len(inv.call.arrays()), 1))
        for key, (name, array) in zip(keys, inv.call.arrays().items(), strict=False):
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise NotImplementedError(
                    f"{type(self).__name__} takes {array.dtype} and defines no `example_inputs`."
                )
            made[name] = jax.random.normal(key, array.shape, jnp.float32).astype(array.dtype)
        return inv.call.with_arrays(made)

    def restore(self, document: dict[str, Any]) -> Invocation:
        """The invocation that `Invocation.document` describes, without data."""
        raise NotImplementedError(f"{type(self).__name__} cannot be restored from a label.")

    def check_candidate(
        self, inv: Invocation, implementation: Implementation, config: Any
    ) -> str | None:
        """Why a candidate's numbers are wrong; None when they are right or nobody can tell."""
        return None

    def compile_check(
        self, inv: Invocation, implementation: Implementation, config: Any
    ) -> Callable[[], str | None]:
        """`check_candidate`, to be called later; what can be compiled before is compiled here.

        The tuner calls this in several threads, so it must not run the candidate.
        """
        return functools.partial(self.check_candidate, inv, implementation, config)

    def implementations(self, inv: Invocation) -> Sequence[Implementation]:
        """Every way to run this call on `inv.target`, best first."""
        kind = inv.target.kind if inv.target is not None else "cpu"
        return [self._implementation(name, run, inv) for name, run in self._methods(kind)]

    @contextlib.contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """Says which method of which kernel an error comes from."""
        try:
            yield
        except NotImplementedError:  # which says that there is no answer
            raise
        except Exception as error:
            raise RuntimeError(
                f"`{self.name}`: `{method}` raised {type(error).__name__}: {error}. "
                f"Correct `{type(self).__name__}.{method}`, or give the call a `cfg=`."
            ) from error

    def _methods(self, kind: str) -> list[tuple[str, Callable[..., Any]]]:
        """The methods that run on a kind of device, best first, with their names."""
        found = [
            (f"{platform}/{kind}", getattr(self, f"run_{platform}"))
            for platform in _METHODS.get(kind, ("xla",))
            if hasattr(self, f"run_{platform}")
        ]
        if type(self).run is not Kernel.run:
            found.append(("run/any", self.run))
        return found

    def _implementation(
        self, name: str, run: Callable[..., Out], inv: Invocation
    ) -> Implementation:
        def forward(args: CallArgs, cfg: Cfg):
            positional, kwargs = args.call()
            return run(*positional, cfg=cfg, **kwargs), ()

        def backward(args: CallArgs, cfg: Cfg, outputs, residuals, cotangents, wanted):
            positional, kwargs = args.call()
            assert self.custom_vjp is not None
            given = (positional, cfg, kwargs, cotangents)
            signature = inspect.signature(self.custom_vjp)
            try:
                signature.bind(*given)
            except TypeError as error:
                raise TypeError(
                    f"`{self.name}`: `custom_vjp` must take (primals, cfg, kwargs, cotangents); "
                    f"it takes {signature}: {error}."
                ) from None
            names = _argument_names(run, len(positional))
            grads = self.custom_vjp(*given)
            return _gradients(self.name, dict(zip(names, positional, strict=True)), grads, wanted)

        def there(args: CallArgs, direction: str) -> Invocation:
            return dataclasses.replace(inv, direction=direction, call=args)

        def guess(args: CallArgs, direction: str) -> Cfg:
            with self._named("heuristic_cfg"):
                return self.heuristic_cfg(there(args, direction))

        def space(args: CallArgs, direction: str) -> Sequence[Cfg]:
            with self._named("config_space"):
                found = self.candidate_cfgs(there(args, direction))
                if not isinstance(found, Iterable):
                    raise TypeError(f"it must return configurations, and returned {found!r}")
                return list(found)

        def decode(args: CallArgs, direction: str, plain: Any) -> Cfg:
            return serialize.from_builtins(plain, type(guess(args, direction)))

        def misfit(args: CallArgs, direction: str, cfg: Any) -> str | None:
            own = [type(c) for c in space(args, direction)]
            try:
                own.append(type(guess(args, direction)))
            except NotImplementedError:
                pass
            return f"{cfg!r} is no config of {self.name}" if own and type(cfg) not in own else None

        return Implementation(
            name=name,
            forward=forward,
            backward=None if self.custom_vjp is None else backward,
            heuristic=guess,
            candidates=space,
            decode=decode,
            misfit=misfit,
            derivative="jax" if self.custom_vjp is None else "rule",
        )


def _gradients(
    kernel: str, arguments: Mapping[str, Any], grads: Any, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """The gradients that a user's `custom_vjp` returned, by array, each checked."""
    rule = f"`{kernel}`: `custom_vjp` must return "
    if not isinstance(grads, tuple | list) or len(grads) != len(arguments):
        got = f"{len(grads)} of them" if isinstance(grads, tuple | list) else _what(grads)
        raise ValueError(
            f"{rule}a tuple of gradients of {', '.join(f'`{n}`' for n in arguments)}, with None "
            f"for an argument that has none; got {got}."
        )
    made: list[Any] = []
    for (name, argument), grad in zip(arguments.items(), grads, strict=True):
        leaves, tree = jax.tree.flatten(argument)
        try:
            parts = [None] * len(leaves) if grad is None else tree.flatten_up_to(grad)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{rule}for `{name}` a gradient of its structure: {error}") from None
        for leaf, part in zip(leaves, parts, strict=True):
            if not is_array(leaf):
                continue
            if part is None and str(len(made)) in wanted:
                raise ValueError(
                    f"{rule}a gradient for `{name}`, which is differentiated; got None. Return "
                    "zeros if it has no influence."
                )
            if part is not None and (not _is_value(part) or jnp.shape(part) != leaf.shape):
                raise ValueError(
                    f"{rule}for `{name}` a gradient of shape {leaf.shape}; got {_what(part)}."
                )
            made.append(part)
    return {str(i): grad for i, grad in enumerate(made)}


def _is_value(x: Any) -> bool:
    return is_array(x) or isinstance(x, int | float | complex | np.generic)


def _what(x: Any) -> str:
    return f"an array of shape {jnp.shape(x)}" if _is_value(x) else f"a {type(x).__name__}"


def _argument_names(run: Callable[..., Any], count: int) -> list[str]:
    """Names of the positional arguments of a kernel's method; `args[2]` for one without a name."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(run).parameters.values()
    except (ValueError, TypeError):  # of a method that is not written in Python
        parameters = ()
    names = [p.name for p in parameters if p.kind in kinds][:count]
    return names + [f"args[{i}]" for i in range(len(names), count)]


def concrete_call(inv: Invocation) -> Any:
    """The arguments of an eager call, when they are at hand and have the shapes of `inv`."""
    get = inv.metadata.get("concrete")
    call = inv.call if get is None else get()
    if call is None:
        return None
    wanted, found = inv.call.arrays(), call.arrays()
    alike = wanted.keys() == found.keys() and all(
        (x.shape, x.dtype) == (found[n].shape, jax.dtypes.canonicalize_dtype(found[n].dtype))
        and is_array(found[n])
        and not isinstance(found[n], jax.core.Tracer)
        for n, x in wanted.items()
    )
    return call if alike else None
