"""What an operation is: its arguments, their checks, its oracle, its formula and its cases."""

import dataclasses
import functools
import importlib
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._types import (
    array_type,
    axes_of,
    brief,
)
from ejkernel.ops.core.sharding import Layout
from ejkernel.ops.core.types import AbstractArgs

if TYPE_CHECKING:
    from ejkernel.kernels._derived import Lowering

_MISSING = dataclasses.MISSING
_INT32 = np.iinfo(np.int32)
# arguments that hold the offsets of packed sequences, in every op that has them
_OFFSETS = ("cu_seqlens", "cum_seqlens_q", "cum_seqlens_k")
_EXAMPLE_SCALE = 0.1  # of an option that is data of the call, about head size ** -0.5


def known(value: Any) -> np.ndarray | None:
    """The host's copy of an array whose values are known; None of others.

    Unsigned numbers become int64, so that differences have a sign.
    """
    if isinstance(value, jax.core.Tracer) or not isinstance(value, np.ndarray | jax.Array):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None  # a part of it is on devices of other processes
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None  # keys of random numbers, which NumPy does not have
    host = np.asarray(value)
    if host.dtype.kind != "u":
        return host
    return np.minimum(host.astype(np.uint64), np.uint64(2**63 - 1)).astype(np.int64)


def static(
    default: Any = _MISSING,
    unset: Callable[[Any, Any], bool] | None = None,
    computed: bool = False,
) -> Any:
    """An option of an op; part of the compiled program.

    `unset(value, args)` tells that a call does not ask for it; `computed`: canonicalization always
    fills it in, and every kernel acts on it. An option whose annotation also names an array may be
    given as one; it is then data of the call, and one of its `arrays()`.
    """
    metadata = {"static": True, "unset": unset, "computed": computed}
    return dataclasses.field(default=default, metadata=metadata)


def hidden(default: Any, unset: Callable[[Any, Any], bool] | None = None) -> Any:
    """An option that an op has inherited but does not offer, or that canonicalization fills in."""
    metadata = {"static": True, "internal": True, "unset": unset}
    return dataclasses.field(default=default, metadata=metadata)


def array(*, ranks: tuple[int, ...] | None = None, hint: str = "") -> Any:
    """An optional array; `ranks` it may also have in a call, a `hint` for a bad rank."""
    return dataclasses.field(default=None, metadata={"ranks": ranks, "hint": hint})


def internal() -> Any:
    """An array that canonicalization or sharding fills in; no argument of the public function."""
    return dataclasses.field(default=None, metadata={"internal": True})


class OpArgs(AbstractArgs):
    """Canonical arguments of an op of this library; see `op_args`."""

    __dataclass_fields__: typing.ClassVar[dict[str, Any]]

    def arrays(self) -> dict[str, jax.Array]:
        names = (*(f.name for f in array_fields(type(self))), *self.traced_options())
        values = ((name, getattr(self, name)) for name in names)
        return {name: value for name, value in values if value is not None}

    def statics(self) -> dict[str, Any]:
        traced = self.traced_options()
        fields = (f for f in static_fields(type(self)) if f.name not in traced)
        return {f.name: getattr(self, f.name) for f in fields}

    def traced_options(self) -> tuple[str, ...]:
        """Names of the options that this call gives as arrays."""
        names = (f.name for f in traceable_fields(type(self)))
        # canonicalization makes floats of numbers, so whatever else stands here is a leaf
        return tuple(n for n in names if not isinstance(getattr(self, n), float | None))

    def with_arrays(self, arrays: Mapping[str, Any]) -> typing.Self:
        return dataclasses.replace(self, **arrays)

    def given(self) -> set[str]:
        """Names of the optional arguments that this call sets."""
        names = set(self.traced_options())
        for field in dataclasses.fields(self):
            value, unset = getattr(self, field.name), field.metadata.get("unset")
            if field.default is _MISSING or field.name in names:
                continue
            if unset is not None:
                is_set = not unset(value, self)
            else:
                is_set = value is not None if field.default is None else value != field.default
            if is_set:
                names.add(field.name)
        return names


def op_args(cls: type) -> type:
    """Makes a frozen keyword-only pytree of a class: arrays are leaves, options are not."""
    made = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    arrays, statics = ([f.name for f in fs(made)] for fs in (array_fields, static_fields))
    if not traceable_fields(made):
        return jax.tree_util.register_dataclass(made, data_fields=arrays, meta_fields=statics)

    def flatten(args: Any) -> tuple[list[tuple[Any, Any]], Any]:
        names = (*arrays, *args.traced_options())
        leaves = [(jax.tree_util.GetAttrKey(n), getattr(args, n)) for n in names]
        return leaves, (names, tuple(args.statics().items()))

    def unflatten(rest: Any, leaves: Any) -> Any:
        names, options = rest
        return made(**dict(zip(names, leaves, strict=True)), **dict(options))

    jax.tree_util.register_pytree_with_keys(made, flatten, unflatten)
    return made


@functools.cache
def array_fields(cls: type) -> tuple[dataclasses.Field, ...]:
    return tuple(f for f in dataclasses.fields(cls) if not f.metadata.get("static"))


@functools.cache
def static_fields(cls: type) -> tuple[dataclasses.Field, ...]:
    return tuple(f for f in dataclasses.fields(cls) if f.metadata.get("static"))


@functools.cache
def traceable_fields(cls: type) -> tuple[dataclasses.Field, ...]:
    """The options that a call may also give as arrays."""
    return tuple(f for f in static_fields(cls) if array_type(f.type) is not None)


@functools.cache
def public_fields(cls: type) -> tuple[dataclasses.Field, ...]:
    """The fields that are arguments of the public function, in its order."""
    return tuple(f for f in dataclasses.fields(cls) if not f.metadata.get("internal"))


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One call that tests, tuning and benchmarks make: public arguments from a dtype and a key."""

    name: str
    values: Callable[[Any, jax.Array], dict[str, Any]]
    tags: frozenset[str] = frozenset({"core"})
    grads: tuple[str, ...] | None = None  # None: every differentiable array present


def wide_dtype(args: Any) -> Any:
    """The dtype in which a call sums: float64 if its first array has that, else float32."""
    first = next(iter(args.arrays().values()))
    return jnp.dtype(jnp.float64 if first.dtype == jnp.float64 else jnp.float32)


@dataclasses.dataclass(frozen=True)
class Residual:
    """An array that a forward kernel hands to a backward kernel, of whatever platform either is.

    Shape and dtype follow from the arguments of a call alone, never from a kernel's configuration.
    """

    name: str
    meaning: str
    shape: Callable[[Any], tuple[int, ...] | None]  # of a call; None: the call has no such array
    dtype: Callable[[Any], Any] = wide_dtype
    # names of its axes, as in `output_axes`; empty: nobody tells, and no program may cut it
    axes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """What a call of an op costs, and the calls that `ejkernel bench` measures.

    Both counts take canonical arguments and "forward" or "backward". Where lengths, ids and masks
    are concrete, what they hide does not count; where only their shapes are known, they hide
    nothing.
    """

    flops: Callable[[Any, str], int]  # two for a multiplication and an addition
    traffic: Callable[[Any, str], int]  # the least bytes that are read and written
    benchmarks: Callable[[], Sequence[Case]] = lambda: ()


@dataclasses.dataclass(frozen=True, eq=False)
class OpSpec:
    """An operation; functions given as "module:function" are imported when they are asked for."""

    name: str
    args: type[OpArgs]
    canonicalize: Callable[[dict[str, Any]], OpArgs]  # of unpacked values, types checked
    reference: str | Callable[[Any], tuple[jax.Array, ...]]
    differentiable: frozenset[str]
    outputs: Callable[[Any], tuple[str, ...]]  # names of the outputs of a call
    output_axes: dict[str, tuple[str, ...]]
    # arguments that stand for others, such as `mask_info`, taken apart before types are checked
    unpack: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values
    formula: str | Callable[[Any], tuple[jax.Array, ...]] | None = None
    # a derived op: how its calls become calls of another op, whose kernels then serve it
    lowers_to: "Lowering | None" = None
    residuals: tuple[Residual, ...] = ()
    # of arguments, outputs and cotangents: gradients with absolute values in place of signed ones,
    # which say how large rounding errors may be where a gradient cancels
    magnitudes: str | Callable[[Any, Any, Any], dict[str, jax.Array]] | None = None
    cases: Callable[[], Sequence[Case]] = lambda: ()
    # cases in which all numbers that no result depends on are padding, and so may be NaN
    padded: tuple[str, ...] = ()
    work: Work | None = None  # None: nobody counted this op
    # arrays that are no plain random numbers, such as lengths and ids, for shapes given as avals
    examples: Callable[[Any], dict[str, jax.Array]] = lambda args: {}
    # sizes by axis of a small call with the same options, for blocks of a size; None: no twin
    twin: Callable[[Any, int], dict[str, int]] | None = None
    changes: Callable[[], dict[str, dict[str, Any]]] = dict  # arguments that set each option
    config: type | None = None  # the typed config of the public function
    # Python scalars of array arguments, made arrays so that a new value compiles nothing
    scalars: dict[str, Callable[[Any], np.ndarray]] = dataclasses.field(default_factory=dict)
    # values of canonical arguments as the public function takes them, for kernels from outside
    publish: Callable[[Any], dict[str, Any]] = lambda args: args.arrays() | args.statics()
    # checks of values: always, where they are known; and only under `EJKERNEL_DEBUG`
    check: Callable[[dict[str, Any]], None] | None = None
    debug: Callable[[dict[str, Any]], None] | None = None
    # outputs of kernels as the public function returns them
    finish: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]] = lambda args, outputs: outputs
    written: tuple[str, ...] = ()  # arrays that the op writes into; it then has `donate_cache`
    shardable: frozenset[str] = frozenset()
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    localize: Callable[[Any, dict[str, jax.Array]], Any] = lambda args, offsets: args
    instead: str = "leave that axis whole"
    heads: str = "h"  # the axis of heads, which a mesh without specs splits

    def reference_fn(self) -> Callable[[Any], tuple[jax.Array, ...]]:
        return _load(self.reference)

    def formula_fn(self) -> Callable[[Any], tuple[jax.Array, ...]]:
        if self.formula is None and self.lowers_to is not None and self.differentiable:
            return self.lowers_to.formula()
        return _load(self.formula or self.reference)

    def magnitudes_fn(self) -> Callable[[Any, Any, Any], dict[str, jax.Array]]:
        return (lambda *_: {}) if self.magnitudes is None else _load(self.magnitudes)

    def residual_shapes(self, args: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """What forward kernels of a call hand to backward kernels, by name, in order."""
        if self.lowers_to is not None and not self.residuals:
            return self.lowers_to.base.residual_shapes(self.lowers_to.shapes(args))
        shapes = ((r, r.shape(args)) for r in self.residuals)
        return {
            r.name: jax.ShapeDtypeStruct(shape, r.dtype(args))
            for r, shape in shapes
            if shape is not None
        }

    def residual_axes(self, args: Any) -> list[tuple[str, ...]] | None:
        """Axes of the same; None if somebody does not tell."""
        if self.lowers_to is not None and not self.residuals:
            return self.lowers_to.base.residual_axes(self.lowers_to.shapes(args))
        found = [(r.axes, shape) for r in self.residuals if (shape := r.shape(args)) is not None]
        if not all(axes for axes, _ in found):
            return None
        # one that a call does without is empty, and has no axes
        return [a if len(a) == len(shape) else ("",) * len(shape) for a, shape in found]

    def check_values(self, values: dict[str, Any], debug: bool) -> None:
        """Refuses bad values: known ones now; with `debug`, traced ones when the program runs."""
        checks = (self.check, self.debug if debug else None)

        def run(values: dict[str, Any]) -> None:
            _check_integers(self, values)
            for check in checks:
                if check is not None:
                    check(values)

        run(values)
        traced = {name: x for name, x in values.items() if _is_traced_integer(x)}
        if debug and traced:
            # a callback that kept tracers would keep their whole trace alive
            rest = {
                name: jax.tree.map(_without_tracer, x)
                for name, x in values.items()
                if name not in traced
            }
            jax.debug.callback(lambda **host: run(rest | host), **traced)

    def make(self, case: Case, dtype: Any, key: jax.Array) -> OpArgs:
        """The canonical arguments of a case."""
        return self.canonicalize(self.unpack(self.complete(case.values(dtype, key))))

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Public arguments with the defaults of those left out, scalars made arrays."""
        filled = {f.name: f.default for f in public_fields(self.args) if f.default is not _MISSING}
        filled |= dict(values)
        for name, convert in self.scalars.items():
            if filled.get(name) is not None:
                filled[name] = convert(filled[name])
        return filled

    def example(self, args: Any) -> Any:
        """Representative concrete arguments with the shapes of a call."""
        special, made = self.examples(args), {}
        arrays = args.arrays()
        keys = jax.random.split(jax.random.key(0), max(len(arrays), 1))
        for key, (name, array) in zip(keys, arrays.items(), strict=False):
            if name in special:
                made[name] = special[name].astype(array.dtype)
            elif name in args.traced_options():
                made[name] = jnp.asarray(_EXAMPLE_SCALE, array.dtype)
            elif jnp.issubdtype(array.dtype, jnp.floating):
                made[name] = jax.random.normal(key, array.shape, jnp.float32).astype(array.dtype)
            else:
                raise NotImplementedError(f"`{self.name}`: no example of `{name}` is known.")
        return args.with_arrays(made)

    def reduced(self, args: Any, block: int) -> Any | None:
        """A small concrete call with the same options, dtypes and head sizes."""
        if self.twin is None:
            return None
        sizes, layout, shapes = self.twin(args, block), self.layout(args), {}
        axes = self._axes(args) if layout is None else layout.arrays
        for name, array in args.arrays().items():
            shape = tuple(
                min(n, sizes.get(a, n)) if n > 1 else n
                for a, n in zip(axes[name], array.shape, strict=True)
            )
            shapes[name] = jax.ShapeDtypeStruct(shape, array.dtype)
        return self.example(args.with_arrays(shapes))

    def layout(self, args: Any) -> Layout | None:
        """The axes of the arrays; None when their annotations do not tell."""
        if not all(array_type(f.type) for f in array_fields(self.args)) or not self.output_axes:
            return None
        return Layout(
            arrays=self._axes(args),
            outputs=tuple(self.output_axes[name] for name in self.outputs(args)),
            shardable=self.shardable,
            aliases=self.aliases,
            localize=self.localize,
            instead=self.instead,
            heads=self.heads,
        )

    def _axes(self, args: Any) -> dict[str, tuple[str, ...]]:
        """The axes of all arrays that a call may have, in the order of the public function."""
        traced = [f for f in traceable_fields(self.args) if f.name in args.traced_options()]
        return {f.name: axes_of(f.type) for f in (*array_fields(self.args), *traced)}


def _is_traced_integer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer) and jnp.issubdtype(value.dtype, jnp.integer)


def _without_tracer(value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return value


@functools.cache
def _integer_names(cls: type) -> tuple[str, ...]:
    """The arrays that are annotated as `Int`: ids, lengths, offsets and tables."""
    kinds = {f.name: array_type(f.type) for f in array_fields(cls)}
    return tuple(name for name, t in kinds.items() if t and t.__name__.startswith("Int["))


def _check_integers(spec: OpSpec, values: dict[str, Any]) -> None:
    """Ids, lengths and tables fit into 32 bits, in which kernels hold them; offsets start at 0."""
    for name in _integer_names(spec.args):
        value = values.get(name)
        dtype = getattr(value, "dtype", None)
        if not isinstance(dtype, np.dtype) or dtype.kind not in "iu":
            continue
        offsets = name in _OFFSETS
        wide = dtype.itemsize > 4 or dtype == np.uint32
        if not (offsets or wide) or (host := known(value)) is None or not host.size:
            continue
        if wide and not _INT32.min <= host.min() <= host.max() <= _INT32.max:
            raise ValueError(
                f"`{spec.name}`: `{name}` must fit into 32 bits with a sign; got values from "
                f"{host.min()} to {host.max()}."
            )
        if offsets and host.ndim == 1 and host[0] != 0:
            raise ValueError(
                f"`{spec.name}`: `{name}` must start at 0; got {brief(host)}. Put a 0 before it: "
                "the tokens before the first sequence are then a sequence of their own."
            )


def _load(path: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(path):
        return path
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
