"""Every name of Mosaic GPU that is not public: tensor-core products, waits and named barriers.

`plgpu.wgmma` always adds to its accumulator and decides itself when to wait. Kernels that overlap
two products with other work issue them here instead, inside functions made by `inlined`. JAX's
interpreter cannot run those, so each such function has a twin of public operations. Named barriers
run in both. The module fails to import where a name is missing; `probe.why_not` says so.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

WARPGROUP = 128  # threads
ROWS = 64  # of a product of one warpgroup
_SWIZZLE = 128  # bytes
_ATOM = 64  # bfloat16 values in a row of a swizzled tile
PART = _ATOM  # columns that are cleared at a time
_STEP = 16  # values that one instruction multiplies along the inner axis

# How bfloat16 tiles lie in shared memory, and how arrays lie in the registers of a warpgroup.
TRANSFORMS = (plgpu.TilingTransform((8, _ATOM)), plgpu.SwizzleTransform(_SWIZZLE))
# the same for float32 tiles that TMA copies
WIDE_TRANSFORMS = (plgpu.TilingTransform((8, _ATOM // 2)), plgpu.SwizzleTransform(_SWIZZLE))
TILE = plgpu.RefType(TRANSFORMS)
WGMMA = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
SPLAT = plgpu.Layout.WG_SPLAT
# Registers in the order in which a product writes them; a cast to WGMMA moves nothing.
ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT

_WGMMA = fragmented_array.WGMMA_LAYOUT
_ACCUMULATOR = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
_Array = fragmented_array.FragmentedArray

LANE_SEMANTICS = mgpu.LoweringSemantics.Lane
# Makes the interpreter act on `named_barrier`, which it knows by the name of the inner function.
_MODEL_NAMED_BARRIERS = "_hack_model_inline_mgpu_tokamax"


def interpreter(**options: Any) -> Any:
    """What `plgpu.kernel(interpret=)` takes to run a kernel on a CPU."""
    return plgpu.InterpretGPUParams(inline_mgpu=_MODEL_NAMED_BARRIERS, **options)


def reset_interpreter() -> None:
    """Makes the interpreter usable again after a kernel that failed in it."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


def tile(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Shared memory for tiles that products read, or of float32 for TMA alone."""
    transforms = TRANSFORMS if jnp.dtype(dtype).itemsize == 2 else WIDE_TRANSFORMS
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def load(ref: Any, layout: Any) -> jax.Array:
    """Shared memory as an array in registers."""
    typed: Any = plgpu.load  # has other parameters in JAX 0.10, which never comes here
    return typed(ref, layout=layout)


def indices(shape: tuple[int, int], row: Any, column: Any) -> tuple[jax.Array, jax.Array]:
    """Indices of rows and of columns in a tile of registers whose first ones are given."""
    rows, columns = (
        plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout) + first
        for size, layout, first in zip(shape, (ROW, COLUMN), (row, column), strict=True)
    )
    along = jax.lax.broadcast_in_dim
    return along(rows, shape, [0]), along(columns, shape, [1])


def load_global(ref: Any, layout: Any) -> jax.Array:
    """Device memory as an array in registers, past shared memory."""
    typed: Any = plgpu.load
    return typed(ref, layout=layout, optimized=False)  # there are no banks to mind


def clear_rows(tiles: Any, ids: Any) -> None:
    """Writes zeros into the rows of tiles [n, d] in shared memory whose ids are negative.

    The ids [n] are in device memory.
    """
    rows = lambda row: load_global(ids.at[pl.ds(row, ROWS)], ROW) >= 0
    _clear(tiles, rows, range(0, tiles.shape[1], _ATOM))


def clear_outside(tiles: Any, low: Any, high: Any, columns: range) -> None:
    """Writes zeros into the rows of tiles [n, d] in shared memory outside of [low, high).

    `columns` are those to work on, in steps of `PART`.
    """

    def rows(first: int) -> jax.Array:
        index = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + first
        return (index >= low) & (index < high)

    _clear(tiles, rows, columns)


def _clear(tiles: Any, are_kept: Callable[[int], jax.Array], columns: range) -> None:
    part = (ROWS, PART)  # small, since a warpgroup that loads has few registers
    for row in range(0, tiles.shape[0], ROWS):
        kept = jax.lax.broadcast_in_dim(are_kept(row), part, (0,))
        for column in columns:
            at = tiles.at[pl.ds(row, ROWS), pl.ds(column, PART)]
            values = load(at, WGMMA)
            at[...] = jnp.where(kept, values, jnp.zeros_like(values))


def store_plain(ref: Any, values: jax.Array) -> None:
    """Registers to shared memory without transforms, whose banks then conflict."""
    store: Any = getattr(plgpu, "store", None)  # since JAX 0.12, which refuses conflicts otherwise
    if store is None:
        ref[...] = values
    else:
        store(ref, values, optimized=False)


def compiler_params(**options: Any) -> Any:
    """Inlined functions see a warpgroup's registers under lane semantics only."""
    return plgpu.CompilerParams(
        approx_math=True, lowering_semantics=LANE_SEMANTICS, reduction_scratch_bytes=1024, **options
    )


def inlined(
    arg_types: tuple[Any, ...], results: tuple[tuple[tuple[int, ...], Any, Any], ...] = ()
) -> Callable[..., Any]:
    """Decorates a function of Mosaic values; `results` has shapes, dtypes and layouts."""
    types = tuple(plgpu.ShapeDtypeStruct(*result) for result in results)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        def emit(context: Any, *values: Any) -> Any:
            del context
            return fn(*values)

        return plgpu.inline_mgpu(arg_types=arg_types, return_type=types or None)(emit)

    return decorate


# Barriers among warpgroups: 16 of the hardware's, number 0 is the compiler's.


def named_barrier(operation: str, index: Any, num_threads: int) -> None:
    """`"arrive"` at barrier `index`, or `"sync"`: arrive and wait until `num_threads` have."""

    # The interpreter finds `operation` and `num_threads` in the closure of `bar_op`.
    def bar_op(context: Any, barrier: Any) -> None:
        del context
        arrive_or_sync(operation, barrier, num_threads)

    plgpu.inline_mgpu(arg_types=(SPLAT,))(bar_op)(jnp.asarray(index, jnp.int32))


def arrive_or_sync(operation: str, barrier: Any, num_threads: int) -> None:
    """The same inside an inlined function; `barrier` is an argument of layout `SPLAT`."""
    mgpu_utils.inline_ptx(f"bar.{operation} $0, {num_threads};", barrier.registers[()])


def any_set(values: jax.Array, layout: Any, index: Any, num_threads: int, twin: bool) -> jax.Array:
    """1 if a value of any of `num_threads` threads is not 0, else 0; they meet at barrier `index`.

    `values` are int32 in registers. Mosaic's own reductions over all rows share memory among the
    warpgroups, which then overwrite each other's.
    """
    if twin:  # the other warpgroups have the same values, or are not asked
        named_barrier("sync", index, num_threads)
        return (jnp.max(jnp.abs(values)) > 0).astype(jnp.int32)

    @inlined((layout, SPLAT), (((), jnp.int32, SPLAT),))
    def reduce(values: Any, barrier: Any) -> tuple[Any]:
        i32 = ir.IntegerType.get_signless(32)
        words = [llvm.extractelement(x, arith.constant(i32, 0)) for x in values.registers.flat]
        found = functools.reduce(arith.ori, words)
        ptx = (
            "{ .reg .pred mine, any; setp.ne.b32 mine, $1, 0; "
            f"bar.red.or.pred any, $2, {num_threads}, mine; selp.b32 $0, 1, 0, any; }}"
        )
        operands = [found, barrier.registers[()]]
        made: Any = llvm.inline_asm(i32, operands, ptx, "=r,r,r", has_side_effects=True)
        return (_Array.splat(made, (), is_signed=True),)

    return reduce(values, jnp.asarray(index, jnp.int32))[0]


def publish(index: Any) -> None:
    """Makes a warpgroup's stores to shared memory visible to TMA and products, then meets.

    `index` is a named barrier of this warpgroup alone. Outside inlined functions.
    """

    def fence_async_shared_cta(context: Any) -> None:
        del context
        _emit("fence.proxy.async.shared::cta;")

    plgpu.inline_mgpu()(fence_async_shared_cta)()
    named_barrier("sync", index, WARPGROUP)


# Inside inlined functions


def fence() -> None:
    """Orders earlier writes of registers before the products that follow."""
    nvvm.wgmma_fence_aligned()


def commit() -> None:
    """Ends a group of products."""
    _emit("wgmma.commit_group.sync.aligned;")


def wait(pending: int) -> None:
    """Waits until at most `pending` groups of products are unfinished."""
    _emit(f"wgmma.wait_group.sync.aligned {pending};")


def _emit(ptx: str) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [], ptx, "", has_side_effects=True)


def pinned(*arrays: Any) -> Any:
    """The arrays, computed before what follows; one array gives that array."""
    return fragmented_array.optimization_barrier(*arrays)


def transposed(tiles: Any) -> Any:
    """A tile [n, k] as [k, n]."""
    return mgpu.memref_transpose(tiles, (1, 0, 3, 2))


def as_wgmma(array: Any) -> Any:
    """The result of a product as an array to compute with."""
    return array.to_layout(_WGMMA)


def as_accumulator(array: Any) -> Any:
    """An array that a product adds to."""
    return array.to_layout(_ACCUMULATOR)


def along_rows(vector_: Any, shape: tuple[int, int]) -> Any:
    """A vector of layout `ROW` repeated along columns."""
    return vector_.broadcast_in_dim(shape, (0,), _WGMMA)


def along_columns(vector_: Any, shape: tuple[int, int]) -> Any:
    """A vector of layout `COLUMN` repeated along rows."""
    return vector_.broadcast_in_dim(shape, (1,), _WGMMA)


def to_bfloat16(array: Any) -> Any:
    return array.astype(ir.BF16Type.get())


def constant(value: float) -> Any:
    """A float32 to compute with."""
    f32 = ir.F32Type.get()
    return arith.constant(f32, ir.FloatAttr.get(f32, value))


def product(acc: Any, left: Any, right: Any) -> Any:
    """Issues left @ right, added to `acc`, or overwriting where `acc` is None.

    `left` is [64, k], a tile or bfloat16 registers; `right` is a tile [k, n]; the result is
    [64, n] in float32. `fence` comes before, `commit` after; nothing may read the result or write
    the operands until `wait`.
    """
    (depth, width), _ = mma_utils.tiled_memref_shape(right)
    operand_b = _Descriptor.of(right, (_ATOM, width), is_right=True)
    in_registers = isinstance(left, _Array)
    operand_a = left if in_registers else _Descriptor.of(left, (ROWS, _ATOM), is_right=False)
    registers = [] if acc is None else list(acc.registers.flat)
    for at in range(0, depth, _STEP):
        if in_registers:
            part = [_word(x) for x in left[:, at : at + _STEP].registers.flat]
        else:
            part = [operand_a.at(at)]
        registers = _issue(registers, part, operand_b.at(at), width, operand_a, operand_b)
    return _gathered(registers, (ROWS, width))


@dataclasses.dataclass(frozen=True)
class _Descriptor:
    """A tile as the tensor cores address it; offsets are in bytes along the inner axis."""

    base: Any
    step: int
    group: int
    is_transposed: bool

    @classmethod
    def of(cls, ref: Any, group_size: tuple[int, int], is_right: bool) -> "_Descriptor":
        (base, strides), (_, group), fastest = mma_utils.create_descriptor(
            ref,
            swizzle=_SWIZZLE,
            large_tile=(_ATOM, _ATOM),
            group_size=group_size,
            logical_k_major=is_right,
        )
        return cls(base, strides[1][0], group, fastest != mma_utils.Dim.K)

    def at(self, index: int) -> Any:
        """The descriptor from a value of the inner axis on; it counts in 16 bytes."""
        groups, rest = divmod(index, _ATOM)
        offset = groups * self.group + rest // _STEP * self.step
        if not offset:
            return self.base
        i64 = ir.IntegerType.get_signless(64)
        no_flags = llvm.IntegerOverflowFlags.none
        return llvm.add(self.base, arith.constant(i64, offset >> 4), overflow_flags=no_flags)


def _word(pair: Any) -> Any:
    """Two bfloat16 values as an int32."""
    i32 = ir.IntegerType.get_signless(32)
    word = vector.bitcast(ir.VectorType.get((1,), i32), pair)
    return llvm.extractelement(word, arith.constant(i32, 0))


def _issue(acc: list[Any], left: list[Any], right: Any, width: int, a: Any, b: Any) -> list[Any]:
    """One instruction; returns the registers of its result."""
    count = width // 2  # of float32 registers a thread
    names = iter(f"${i}" for i in range(2 * count + len(left) + 1))
    result = [next(names) for _ in range(count)]
    tied = [str(i) for i in range(count)] if acc else []  # an input in an output's register
    for _ in tied:
        next(names)
    operand = [next(names) for _ in left]
    from_registers = isinstance(a, _Array)
    first = "{" + ",".join(operand) + "}" if from_registers else operand[0]
    flips = [] if from_registers else [int(a.is_transposed)]
    signs_and_flips = ", ".join(map(str, (1, 1, *flips, int(b.is_transposed))))
    # The predicate says whether the product is added to what the registers hold.
    ptx = (
        "{ .reg .pred adds; "
        f"setp.ne.b32 adds, {int(bool(acc))}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 "
        f"{{{','.join(result)}}}, {first}, {next(names)}, adds, {signs_and_flips}; }}"
    )
    kinds = ["=f"] * count + tied + ["r" if from_registers else "l"] * len(left) + ["l"]
    single = ir.VectorType.get((1,), ir.F32Type.get())
    made: Any = llvm.inline_asm(
        llvm.StructType.get_literal([single] * count),
        [*acc, *left, right],
        ptx,
        ",".join(kinds),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(single, made, [i]) for i in range(count)]


def _gathered(registers: list[Any], shape: tuple[int, int]) -> Any:
    array = np.empty(_ACCUMULATOR.registers_shape(shape), dtype=object)
    array.flat[:] = registers
    return _Array(_registers=array, _layout=_ACCUMULATOR, _is_signed=None)


# Twins, outside inlined functions: what the interpreter runs in place of a product


def twin_product(acc: jax.Array | None, left: Any, right: Any) -> jax.Array:
    """left @ right, added to `acc` if given; `left` is a tile or an array, `right` a tile."""
    shape = (left.shape[0], right.shape[1])
    if isinstance(left, jax.Array):  # the interpreter's `plgpu.wgmma` takes tiles only
        made = jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # a product needs no fence between its reads and a later copy
    else:

        def multiply(acc_ref: Any) -> jax.Array:
            plgpu.wgmma(acc_ref, left, right)
            return acc_ref[...]

        acc_type = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        made = pl.run_scoped(multiply, acc_type)
    return made if acc is None else acc + made


def partial_sums(values: jax.Array, sums: jax.Array, twin: bool) -> jax.Array:
    """`sums` [64, 8] plus every eighth column of `values` [64, n]; needs no other thread."""
    width = values.shape[1]
    if twin:
        return sums + values.reshape(ROWS, width // 8, 8).sum(axis=1)

    @inlined((WGMMA, WGMMA), ((sums.shape, jnp.float32, WGMMA),))
    def add(values: Any, sums: Any) -> tuple[Any]:
        for at in range(0, width, 8):
            sums = sums + values[:, at : at + 8]
        return (sums,)

    return add(values, sums)[0]
