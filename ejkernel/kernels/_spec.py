"""What an operation is: its arguments, their checks, its oracle, its formula and its cases."""

import dataclasses
import functools
import importlib
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Integer

from ejkernel.ops.core.sharding import Layout
from ejkernel.ops.core.types import AbstractArgs

if TYPE_CHECKING:
    from ejkernel.kernels._derived import Lowering

_MISSING = dataclasses.MISSING
_INT32 = np.iinfo(np.int32)
# arguments that hold the offsets of packed sequences, in every op that has them
_OFFSETS = ("cu_seqlens", "cum_seqlens_q", "cum_seqlens_k")
_EXAMPLE_SCALE = 0.1  # of an option that is data of the call, about head size ** -0.5

_repr = reprlib.Repr()
_repr.maxlist = _repr.maxtuple = 8
_repr.maxother = _repr.maxstring = 100


def brief(value: Any) -> str:
    """The repr of a value for a message; what is long is cut."""
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer):
        if value.size <= 16:
            return str(np.asarray(value).tolist())
        return f"{_repr.repr(np.asarray(value).tolist())} with shape {list(value.shape)}"
    return _repr.repr(value)


def known(value: Any) -> np.ndarray | None:
    """The host's copy of an array whose values are known; None of others.

    Unsigned numbers become int64, so that differences have a sign.
    """
    if isinstance(value, jax.core.Tracer) or not isinstance(value, np.ndarray | jax.Array):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None  # a part of it is on devices of other processes
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
    return tuple(f for f in static_fields(cls) if _array_type(f.type) is not None)


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
        if self.lowers_to is not None:
            return self.lowers_to.base.residual_shapes(self.lowers_to.shapes(args))
        shapes = ((r, r.shape(args)) for r in self.residuals)
        return {
            r.name: jax.ShapeDtypeStruct(shape, r.dtype(args))
            for r, shape in shapes
            if shape is not None
        }

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
        if not all(_array_type(f.type) for f in array_fields(self.args)) or not self.output_axes:
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
    kinds = {f.name: _array_type(f.type) for f in array_fields(cls)}
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


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _array_type(annotation: Any) -> Any:
    return next((t for t in _alternatives(annotation) if hasattr(t, "dim_str")), None)


def plain_type(annotation: Any) -> Any:
    """The type of an option without the arrays that may stand for it."""
    kinds = [t for t in _alternatives(annotation) if not hasattr(t, "dim_str")]
    return functools.reduce(operator.or_, kinds)


@functools.cache
def axes_of(annotation: Any) -> tuple[str, ...]:
    """The axis names of a jaxtyping annotation."""
    return tuple(a.lstrip("#") for a in _array_type(annotation).dim_str.split())


def check_types(op: str, cls: type, values: Mapping[str, Any]) -> None:
    """Checks public arguments against the annotations of an args type; axes must agree."""
    sizes: dict[str, tuple[int, str]] = {}
    for field in dataclasses.fields(cls):
        if field.name not in values:
            continue
        value = values[field.name]
        if field.metadata.get("static"):
            _check_static(op, field, value)
        elif value is not None or field.default is _MISSING:
            _check_array(op, field, value, sizes)


def _check_static(op: str, field: dataclasses.Field, value: Any) -> None:
    from beartype import BeartypeConf
    from beartype.door import is_bearable

    if isinstance(value, jax.Array) and _array_type(field.type) is not None:
        return  # canonicalization checks it, with a message of its own
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"`{op}`: `{field.name}` is part of the compiled program and must be a Python value; "
            f"got {value.dtype}{list(value.shape)}, an array or traced value."
        )
    plain = value.item() if isinstance(value, np.generic) else value
    hint: Any = plain_type(field.type)
    if not is_bearable(plain, hint, conf=BeartypeConf(is_pep484_tower=True)):
        name = getattr(hint, "__name__", None) or str(hint)
        raise TypeError(
            f"`{op}`: `{field.name}` must be {name.replace('typing.', '')}; "
            f"got {brief(value)} of type {type(value).__name__}."
        )


def check_library(what: str, value: Any) -> None:
    """Refuses arrays of other libraries, such as torch's tensors; `what` names the argument."""
    if isinstance(value, jax.Array) or isinstance(value.dtype, np.dtype):
        return
    kind = type(value)
    raise TypeError(
        f"{what} must be a JAX or NumPy array; got a {kind.__module__}.{kind.__name__} of "
        f"{value.dtype}{list(value.shape)}. Convert it, for example with `jnp.from_dlpack(x)`, or "
        "`jnp.asarray(x.detach().cpu().numpy())` of a torch tensor."
    )


def _check_array(
    op: str, field: dataclasses.Field, value: Any, sizes: dict[str, tuple[int, str]]
) -> None:
    annotation = _array_type(field.type)
    axes = [] if annotation is None else annotation.dim_str.split()
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(
            f"`{op}`: `{field.name}` must be an array [{', '.join(axes)}]; "
            f"got {brief(value)} of type {type(value).__name__}. Convert it with `jnp.asarray`."
        )
    check_library(f"`{op}`: `{field.name}`", value)
    if annotation is None:  # an op from outside that does not say more
        return
    kind, dtypes = annotation.__name__.partition("[")[0], annotation.dtypes
    if kind == "Int":  # unsigned ids and lengths are converted, see `_check_integers`
        kind, dtypes = "Integer", Integer.dtypes
    if isinstance(dtypes, list | tuple) and str(value.dtype) not in dtypes:
        raise TypeError(
            f"`{op}`: `{field.name}` must have a dtype of kind {kind}; got {value.dtype}."
        )
    bound = ", ".join(f"{a}={sizes[a][0]} (from `{sizes[a][1]}`)" for a in axes if a in sizes)
    rule = f"[{', '.join(axes)}]" + (f" with {bound}" if bound else "")
    if len(value.shape) != len(axes):
        if len(value.shape) in (field.metadata.get("ranks") or ()):
            return
        hint = field.metadata.get("hint", "")
        raise ValueError(
            f"`{op}`: `{field.name}` must have {len(axes)} axes, {rule}; got {value.shape}.{hint}"
        )
    full = tuple(sizes[a.lstrip("#")][0] if a.lstrip("#") in sizes else None for a in axes)
    if None not in full and all(a.startswith("#") for a in axes):
        broadcasts = True
    else:
        broadcasts = False
    for axis, size in zip(axes, value.shape, strict=True):
        free = axis.startswith("#") and size == 1
        known = sizes.setdefault(axis.lstrip("#"), (size, field.name))[0] if not free else size
        if known != size:
            rule = f"broadcast to {full}" if broadcasts else f"have shape {rule}"
            raise ValueError(f"`{op}`: `{field.name}` must {rule}; got {value.shape}.")
