"""The linear recurrence for TPUs beside our XLA entry, by the cycles of their compiled schedules.

No TPU is needed: libtpu compiles for a chip and writes down what its kernels do in each cycle.
Waiting for memory does not count. Of XLA's programs every fusion counts as often as its loop runs;
libtpu writes one schedule for fusions that are alike, which then count once, so that the sum is a
lower bound. It needs minutes for XLA's programs, which is why they are of one head and few tokens;
work grows with tokens times heads.
"""

import argparse
import re

import jax
import jax.numpy as jnp

from ejkernel import _device
from ejkernel.aot import _schedule, _targets, _tpu
from ejkernel.kernels import kernel_registry

SMALL, LARGE, _SIZE = (1024, 1), (4096, 8), 128  # tokens and heads
_SPEC = kernel_registry.spec("linear_recurrence")
CALLS = ("lightning", "scalar", "gla")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_WHILE = re.compile(r" while\(.*condition=%([\w.\-]+), body=%([\w.\-]+)")


def calls(sizes, call):
    """Functions and inputs of forward and backward for an entry."""
    tokens, heads = sizes
    tensor = (1, tokens, heads, _SIZE)
    gates = {
        "lightning": {"g_gamma": (heads,)},
        "scalar": {"g": (1, tokens, heads)},
        "gla": {"gk": tensor},
    }
    shapes = dict.fromkeys(("query", "key", "value"), tensor) | gates[call]
    values = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "g_gamma" else jnp.bfloat16)
        for name, shape in shapes.items()
    }
    make = lambda values: _SPEC.canonicalize(_SPEC.unpack(_SPEC.complete(values)))

    def of(entry, target):
        def forward(values):
            args = make(values)
            return entry.fn(args, entry.heuristic(args, "forward", target))[0]

        def backward(values, dout):
            args = make(values)
            cfg = entry.heuristic(args, "backward", target)
            return entry.backward(args, cfg, (dout,), (), (dout,), frozenset(values))

        dout = jax.ShapeDtypeStruct(tensor, jnp.bfloat16)
        return {"forward": (forward, (values,)), "backward": (backward, (values, dout))}

    return of


def find(name):
    [entry] = (e for e in kernel_registry.list(_SPEC.name) if e.name == name)
    return entry


def kernels(compiler, target, sizes, call):
    """Our kernels with their cycles and bytes of spills, by direction."""
    for way, (fn, inputs) in calls(sizes, call)(find("pallas/tpu"), target).items():
        for kernel in compiler.compile(fn, inputs, {})["kernels"]:
            if kernel.cycles is None:
                raise RuntimeError(f"libtpu wrote no schedule of {kernel.name}.")
            yield way, kernel.name, round(kernel.cycles), kernel.spill_bytes


def program_cycles(text, folder):
    """A lower bound of the cycles of XLA's fusions; `text` is the compiled program."""
    where, lines, loops, current, main = {}, {}, [], "", ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            current = start[2]
            main = current if start[1] else main
        elif found := _INSTRUCTION.match(line):
            where[found[1]] = current
            lines.setdefault(current, []).append(line)
            if loop := _WHILE.search(line):
                loops.append((current, *loop.groups()))
    trips = {main: 1.0}
    for outside, condition, body in reversed(loops):  # inner computations are printed first
        limits = [n for line in lines[condition] for n in re.findall(r"constant\((\d+)\)", line)]
        trips[body] = trips[outside] * int(limits[-1])
    total = 0.0
    for file in folder.glob("*-final_bundles.txt"):
        name = re.fullmatch(r"\d+-(.+?)(?:\.refs_\d+_)?-\d+-final_bundles", file.stem)
        if name is not None and where.get(name[1]) in trips:
            total += trips[where[name[1]]] * _schedule.read(file.read_text(), "").cycles
    return round(total)


def xla(compiler, target, sizes, call):
    """Cycles of the XLA entry by direction."""
    made = {}
    for way, (fn, inputs) in calls(sizes, call)(find("xla/any"), target).items():
        _, compiled, folder = compiler.build(fn, inputs)
        made[way] = program_cycles(compiled.as_text(), folder)
    return made


def measure(compiler, target):
    """Cycles by call, size and direction: ours at both sizes, XLA's at the small one."""
    found = {}
    for call in CALLS:
        found[call] = {}
        for name, sizes in (("small", SMALL), ("large", LARGE)):
            ours = {"forward": 0, "backward": 0}
            for way, _, cycles, _ in kernels(compiler, target, sizes, call):
                ours[way] += cycles
            found[call][name] = ours
        found[call]["xla"] = xla(compiler, target, SMALL, call)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", default="v5e", choices=sorted(_targets.CHIPS))
    parser.add_argument("--calls", nargs="*", default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--xla", action="store_true", help="the XLA entry too, which takes minutes")
    chosen = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    compiler = _tpu.Compiler(_targets.parse(f"tpu:{chosen.chip}"), "chips")
    target = _device.Target(kind="tpu", model=_targets.CHIPS[chosen.chip].model)
    for call in chosen.calls:
        for tokens, heads in (SMALL, LARGE):
            label = f"{chosen.chip} {call} T{tokens} H{heads}"
            for _, name, cycles, spills in kernels(compiler, target, (tokens, heads), call):
                print(f"{label} {name}: {cycles} cycles, {spills} bytes of spills")
        if chosen.xla:
            for way, cycles in xla(compiler, target, SMALL, call).items():
                print(f"{chosen.chip} {call} T{SMALL[0]} H{SMALL[1]} XLA {way}: {cycles} cycles")


if __name__ == "__main__":
    main()
