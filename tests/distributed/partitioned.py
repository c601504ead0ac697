"""The rule by which XLA cuts kernels for GPUs, around kernels that a CPU runs."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel._device import Target
from ejkernel.kernels import kernel_registry
from ejkernel.kernels._op_kernel import RegisteredKernel
from ejkernel.ops.core import autodiff
from ejkernel.ops.core.kernel import BACKWARD, Invocation
from ejkernel.ops.execution.spread import spread

GPU = Target("gpu", "NVIDIA H200", "9.0")


def kernel_of(op, name="xla/any"):
    """A kernel as if it were one for GPUs, which a program cannot look into."""
    entry = next(e for e in kernel_registry.list(op) if e.name == name)
    return dataclasses.replace(entry.implementation(None), name="cuda/gpu", portable=False)


def outputs_of(made, op, args):
    """The outputs of a call, whose kernel and backward XLA partitions."""
    spec = kernel_registry.spec(op)
    inv = Invocation(kernel=RegisteredKernel(op), call=args, target=GPU, platform="cuda")

    def forward(args):
        cfg = made.heuristic(args, "forward")
        return spread(inv, made, lambda args: made.forward(args, cfg), None)(args)

    def backward(args, outputs, residuals, cotangents, wanted):
        there = dataclasses.replace(inv, direction=BACKWARD, wanted=wanted, call=args)
        cfg = made.heuristic(args, BACKWARD)

        def run(args, *rest):
            found = made.backward(args, cfg, *rest, wanted)
            return {name: found[name] for name in sorted(wanted)}

        return spread(there, made, run, None)(args, outputs, residuals, cotangents)

    rule = autodiff.Rule(
        op=op,
        forward=forward,
        backward=backward,
        formula=spec.formula_fn(),
        differentiable=spec.differentiable,
        output_names=spec.outputs(args),
        residual_names=tuple(spec.residual_shapes(args)),
    )
    return autodiff.apply(rule, args)


def call(made, op, arrays, **options):
    spec = kernel_registry.spec(op)
    args = spec.canonicalize(spec.unpack(spec.complete(arrays | options)))
    return outputs_of(made, op, args)


def answers(run, arrays, wanted):
    """Outputs, and gradients of a sum of squares."""

    def loss(given):
        outs = run(arrays | given)
        squares = ((jnp.where(jnp.isfinite(x), x, 0.0) ** 2).sum() for x in outs)
        return sum(squares, jnp.zeros(())), outs

    given = {name: arrays[name] for name in wanted}
    (_, outs), grads = jax.value_and_grad(loss, has_aux=True)(given)
    return outs, grads
