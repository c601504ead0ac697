"""Residuals are what the spec says, so that forward and backward of different kernels mix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _op_kernel, _oracle, kernel_registry
from ejkernel.kernels._specs import native_sparse_attention as nsa
from ejkernel.kernels._specs import recurrent
from ejkernel.ops.core.kernel import Invocation
from tests.kernels import harness

WITH_RESIDUALS = [op for op in kernel_registry.ops() if kernel_registry.spec(op).residuals]
WITH_BACKWARD = [
    op
    for op in kernel_registry.ops()
    if any(e.backward is not None for e in kernel_registry.list(op))
]


def shapes(arrays):
    return [(x.shape, str(x.dtype)) for x in arrays]


@pytest.mark.parametrize("op", WITH_BACKWARD)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_residuals_have_the_shapes_of_the_spec_in_every_configuration(op, dtype):
    spec, entry = kernel_registry.spec(op), harness.find_entry(op, "xla/any")
    seen = set()
    for case in spec.cases():
        if "core" not in case.tags:
            continue
        args = spec.make(case, jnp.dtype(dtype), jax.random.key(2))
        expected = spec.residual_shapes(args)
        configs = {entry.heuristic(args), harness.configs(entry, args, "testing")[0]}
        for config in {*configs, *entry.candidates(args)}:
            _, residuals = jax.eval_shape(lambda args, cfg=config: entry.fn(args, cfg), args)
            assert shapes(residuals) == shapes(expected.values()), (case.name, config)
        seen |= expected.keys()
    names = {residual.name for residual in spec.residuals}
    assert seen == names
    assert all(residual.meaning for residual in spec.residuals)


@pytest.mark.parametrize("op", WITH_RESIDUALS)
def test_a_forward_with_other_residuals_is_caught(op):
    spec = kernel_registry.spec(op)
    args = spec.make(spec.cases()[0], jnp.float32, jax.random.key(1))
    inv = Invocation(kernel=_op_kernel.RegisteredKernel(op), call=args)
    (right,) = (i for i in inv.kernel.implementations(inv) if i.name == "xla/any")

    def forward(args, cfg):
        outputs, (first, *rest) = right.forward(args, cfg)
        return outputs, (first[..., None], *rest)

    wrong = dataclasses.replace(right, forward=forward)
    reason = inv.kernel.check_candidate(inv, wrong, right.heuristic(args, "forward"))
    assert reason is not None
    assert reason.startswith("gives residuals ")


# A second kernel, written from the spec alone, in front of XLA's backward


def gradients(op, args, outputs, residuals):
    """XLA's gradients from another forward's outputs and residuals, with the oracle's answer."""
    spec, entry = kernel_registry.spec(op), harness.find_entry(op, "xla/any")
    assert shapes(residuals) == shapes(spec.residual_shapes(args).values())
    wanted = tuple(n for n in args.arrays() if n in spec.differentiable)
    made = _oracle.solve(spec, args, wanted, harness.QUICK)
    run = functools.partial(entry.backward, wanted=frozenset(wanted))
    cfg = entry.heuristic(args, "backward")
    found = run(args, cfg, tuple(outputs), tuple(residuals), made.cotangents)
    return _oracle.answer(spec, args, outputs, found), made


def steps_of(args):
    """Outputs and residuals of `recurrent`, one step at a time, as the spec describes them."""
    batch, t, _ = args.inputs.shape
    tanh, sigmoid = jnp.tanh, jax.nn.sigmoid
    dot = functools.partial(jnp.matmul, precision="highest")
    kept, last = [], []
    for p, backwards in enumerate(recurrent.directions(args)):
        states = [args.hidden] if args.cell is None else [args.hidden, args.cell]
        states = [s[p] if args.bidirectional else s for s in states]
        rows = [None] * t
        for i in range(t)[:: -1 if backwards else 1]:
            x = dot(args.inputs[:, i], args.w_ih[p].T) + (0 if args.b_ih is None else args.b_ih[p])
            y = dot(states[0], args.w_hh[p].T) + (0 if args.b_hh is None else args.b_hh[p])
            d = states[0].shape[1]
            if args.cell_type == "lstm":
                gates = x + y
                a, f, g, o = jnp.split(gates, 4, axis=1)
                c = sigmoid(f) * states[1] + sigmoid(a) * tanh(g)
                new = [sigmoid(o) * tanh(c), c]
            elif args.cell_type == "gru":
                gates = jnp.concatenate([(x + y)[:, : 2 * d], x[:, 2 * d :], y[:, 2 * d :]], axis=1)
                r, z = jnp.split(sigmoid(gates[:, : 2 * d]), 2, axis=1)
                n = tanh(gates[:, 2 * d : 3 * d] + r * gates[:, 3 * d :])
                new = [(1 - z) * n + z * states[0]]
            else:
                gates = x + y
                new = [tanh(gates)]
            seen = jnp.full((batch, 1), True)
            if args.lengths is not None:
                seen = (i < args.lengths)[:, None]
            new = [jnp.where(seen, a, b) for a, b in zip(new, states, strict=True)]
            rows[i] = (jnp.where(seen, new[0], 0), states[0], gates, *states[1:])
            states = new
        kept.append([jnp.stack(column, axis=1) for column in zip(*rows, strict=True)])
        last.append(states)
    joined = [jnp.concatenate(column, axis=-1) for column in zip(*kept, strict=True)]
    stack = jnp.stack if args.bidirectional else lambda x: x[0]
    final = [stack(states) for states in zip(*last, strict=True)]
    return (joined[0], *final), joined[1:]


@pytest.mark.parametrize(
    "cell_type", ["lstm", *(pytest.param(c, marks=pytest.mark.slow) for c in ("gru", "rnn"))]
)
def test_recurrent_takes_the_residuals_of_another_kernel(cell_type):
    spec = kernel_registry.spec("recurrent")
    keys = iter(jax.random.split(jax.random.key(3), 12))
    b, t, i, d, m = 3, 5, 4, 6, recurrent.GATES[cell_type] * 6
    normal = lambda *shape: jax.random.normal(next(keys), shape) / 2
    weights = {
        f"{name}{end}": normal(*shape)
        for end in ("", "_reverse")
        for name, shape in {"w_ih": (m, i), "w_hh": (m, d), "b_ih": (m,), "b_hh": (m,)}.items()
    }
    hidden = (normal(2, b, d), normal(2, b, d))
    values = {
        "inputs": normal(b, t, i),
        "hidden": hidden if cell_type == "lstm" else hidden[0],
        "weights": weights,
        "cell_type": cell_type,
        "bidirectional": True,
        "lengths": jnp.asarray([5, 2, 4]),
    }
    args = spec.canonicalize(spec.unpack(spec.complete(values)))
    outputs, residuals = steps_of(args)
    harness.assert_close_to_oracle(*gradients("recurrent", args, outputs, residuals))


def dense_selection(args):
    """Output, lse and bits of `apply_native_sparse_attention`, with every score at once."""
    (batch, t, heads, _), groups = args.query.shape, args.key.shape[2]
    block = np.arange(t) // args.block_size
    count = nsa.num_blocks(args)
    lists = np.asarray(args.block_indices)
    chosen = np.zeros((batch, t, groups, count), bool)
    for place in np.ndindex(lists.shape):
        if 0 <= lists[place] <= block[place[1]]:
            chosen[(*place[:3], lists[place])] = True
    seen = np.repeat(chosen, heads // groups, axis=2)[..., block]
    seen = seen & (np.arange(t) <= np.arange(t)[:, None])[None, :, None]
    k, v = (jnp.repeat(x, heads // groups, axis=2) for x in (args.key, args.value))
    exact = functools.partial(jnp.einsum, precision="highest")
    x = args.softmax_scale * exact("bthd,bshd->bths", args.query, k)
    x = jnp.where(seen, x, -jnp.inf)
    lse = jax.nn.logsumexp(x, axis=-1)
    weights = jnp.exp(x - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
    out = exact("bths,bshe->bthe", weights, v)
    words = np.zeros((batch, groups, t, -(-count // nsa.WORD)), np.float32)
    for b, i, g, n in np.argwhere(chosen):
        words[b, g, i, n // nsa.WORD] += 2 ** (n % nsa.WORD)
    return out, (out, lse.transpose(0, 2, 1), jnp.asarray(words))


def test_native_sparse_attention_takes_the_residuals_of_another_kernel():
    op = "apply_native_sparse_attention"
    spec = kernel_registry.spec(op)
    keys = jax.random.split(jax.random.key(8), 4)
    t, size = 40, 2  # twenty blocks: two words
    values = {
        "query": jax.random.normal(keys[0], (1, t, 4, 8)),
        "key": jax.random.normal(keys[1], (1, t, 2, 8)),
        "value": jax.random.normal(keys[2], (1, t, 2, 6)),
        "block_indices": nsa.lists_of(keys[3], (1, t, 2), size, 5),
        "block_size": size,
    }
    args = spec.canonicalize(spec.unpack(spec.complete(values)))
    out, residuals = dense_selection(args)
    assert residuals[2].shape[-1] == 2
    harness.assert_close_to_oracle(*gradients(op, args, (out,), residuals))
