"""A backward kernel may be partitioned by hand, though only lowering shows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

from ejkernel.kernels import kernel_registry
from ejkernel.modules import flash_attention


@custom_partitioning
def doubled(x):
    return 2 * x


doubled.def_partition(
    partition=lambda mesh, args, result: (
        mesh,
        lambda x: 2 * x,
        result.sharding,
        (args[0].sharding,),
    ),
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    sharding_rule="... -> ...",
)


@pytest.fixture
def entry():
    plain = next(e for e in kernel_registry.list("flash_attention") if e.name == "xla/any")

    def backward(*args):
        return {name: doubled(x) for name, x in plain.backward(*args).items()}

    register = kernel_registry.register(
        "flash_attention", "xla", "cpu", priority=9, backward=backward, config=plain.config
    )
    register(lambda args, cfg: plain.fn(args, cfg))
    made = next(e for e in kernel_registry.list("flash_attention") if e.name == "xla/cpu@9")
    yield made
    kernel_registry.unregister(made)


def test_a_gradient_with_custom_partitioning_lowers(entry):
    query = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
    key = jax.random.normal(jax.random.key(1), (1, 16, 2, 8))
    loss = lambda q: jnp.sin(flash_attention(q, key, key)).sum()
    twice = jax.jit(jax.grad(loss))(query)
    kernel_registry.unregister(entry)
    try:
        once = jax.jit(jax.grad(loss))(query)
    finally:
        kernel_registry._add(entry, replace=False)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)
