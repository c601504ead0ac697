"""A jitted function with an operation in it is traced once, in a process that starts with it."""

import json
import subprocess
import sys

from ejkernel.kernels import kernel_registry

SCRIPT = """
import collections, inspect, json
import jax
import jax.numpy as jnp
import ejkernel.modules
from ejkernel.kernels import kernel_registry

counts = collections.Counter()


def counted(name, function):
    def wrapped(*args):
        counts[name] += 1
        return function(*args)

    return jax.jit(wrapped)


before = counted("a function without an operation", jnp.sin)
before(1.0)
jitted, calls = {}, {}
for op in kernel_registry.ops():
    spec = kernel_registry.spec(op)
    function = getattr(ejkernel.modules, op)
    known = inspect.signature(function).parameters
    others = {}

    def make(key):
        call = spec.publish(spec.make(spec.cases()[0], jnp.dtype("float32"), key))
        is_array = lambda x: all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))
        arrays = {n: x for n, x in call.items() if is_array(x)}
        others.update((n, x) for n, x in call.items() if n in known and n not in arrays)
        return arrays

    jitted[op] = counted(op, lambda arrays, f=function, o=others: f(**arrays, **o))
    calls[op] = jax.eval_shape(make, jax.random.key(0))
for _ in range(2):
    for op, function in jitted.items():
        function.lower(calls[op])
before(1.0)
print(json.dumps(counts))
"""


def test_operations_are_traced_once():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=240
    )
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts.keys() >= set(kernel_registry.ops())
    assert {name: n for name, n in counts.items() if n != 1} == {}
