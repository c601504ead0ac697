"""Programs of one device inside `shard_map`, where JAX would refuse what they do."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from ejkernel.xla_utils import manual


def run(fn: Callable[..., Sequence[jax.Array]], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """`fn(*arrays)`, traced as if no array differed over a mesh axis; the results do as they do.

    JAX does not let a program write to memory of arrays that differ. For `fn` with neither
    collectives nor axis indices, which computes the same on each device, that is no mistake.
    `fn` gets every traced array as an argument. It cannot be mapped or differentiated.
    """
    if not any(manual.varying_axes(x) for x in arrays):
        return tuple(fn(*arrays))
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    program = jax.make_jaxpr(fn)(*plain)
    return tuple(_unchecked_p.bind(*manual.vary_alike(arrays), program=program))


_unchecked_p = Primitive("ejkernel_unchecked")
_unchecked_p.multiple_results = True


@_unchecked_p.def_abstract_eval
def _abstract(*avals: Any, program: ClosedJaxpr) -> list[Any]:
    return [manual.type_like(avals[0], x.shape, x.dtype) for x in program.out_avals]


def _lower(ctx: Any, *operands: Any, program: ClosedJaxpr) -> Any:
    plain = ctx.replace(avals_in=program.in_avals, avals_out=program.out_avals)
    return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(plain, *operands)


mlir.register_lowering(_unchecked_p, _lower)
