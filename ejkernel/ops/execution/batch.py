"""Batched and parallel calls that choose one configuration for all elements."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.execution.executor import Executor, default_executor


def vmap_with_config(
    kernel: Kernel,
    in_axes: int | Sequence[Any] | None = 0,
    out_axes: Any = 0,
    *,
    cfg: Any = None,
    executor: Executor | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """`jax.vmap` of a kernel; the configuration is chosen once, for one element.

    Keyword arguments are the kernel's and the same for every element.
    """

    def mapped(*args: Any) -> Any:
        run = executor or default_executor()
        return jax.vmap(
            lambda *element: run(kernel, *element, cfg=cfg, **kwargs), in_axes, out_axes
        )(*args)

    return mapped


def pmap_with_config(
    kernel: Kernel,
    axis_name: str = "devices",
    *,
    cfg: Any = None,
    executor: Executor | None = None,
    devices: Sequence[Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """A kernel over devices: each takes one element of the leading axis of every array.

    A jitted `jax.shard_map`; the leading axis must have one element for each device used.
    """

    def mapped(*args: Any) -> Any:
        run = executor or default_executor()
        leading = {x.shape[0] for x in jax.tree.leaves(args)}
        if len(leading) != 1:
            raise ValueError(
                f"`pmap_with_config`: all arrays need one leading size; got {sorted(leading)}."
            )
        (count,) = leading
        found = list(devices or jax.devices())
        if count > len(found):
            raise ValueError(
                f"`pmap_with_config`: {count} elements need {count} devices; there are "
                f"{len(found)}. Use `vmap_with_config`."
            )
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((count,), (axis_name,), axis_types=auto, devices=found[:count])
        spec = PartitionSpec(axis_name)

        def local(*xs: Any) -> Any:
            element = jax.tree.map(lambda x: x[0], xs)
            out = run(kernel, *element, cfg=cfg, **kwargs)
            return jax.tree.map(lambda x: x[None], out)

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(*args)

    return mapped
