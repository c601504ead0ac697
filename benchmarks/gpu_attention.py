"""`flash_attention` on a GPU: our entries, tuned, beside cuDNN, torch and another JAX library.

Correctness first: no row is timed before it agrees with cuDNN; options have their oracle in
tests/kernels. One run, one table: each shape is tuned anew (EJKERNEL_AUTOTUNE_BUDGET_S), then
timed; with `--save` the rows go to benchmarks/results/. `--public PATH` names a folder with the
public package of our name, which is timed in a process of its own. `--workers N` compiles
candidates beforehand.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

import common
import jax
import jax.numpy as jnp

from ejkernel import _device
from ejkernel.callib import _triton_call, _triton_compile
from ejkernel.kernels import kernel_registry
from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.ops.execution.benchmark import measure
from ejkernel.ops.execution.executor import default_executor

# name -> heads, key heads, head size; 16k tokens
MODELS = {"d128": (16, 16, 128), "d64": (32, 32, 64), "gqa": (32, 8, 128)}
LENGTHS = (1024, 4096, 16384)
TOKENS = 16384
DIRECTIONS = {"fwd": ("forward",), "fwd+bwd": ("forward", "backward")}
MODES = tuple(DIRECTIONS)
INPUTS = frozenset({"query", "key", "value"})
ROUNDS = 16
# in ROUNDS of many a program may differ from itself by 4 %: what looks slow is measured in pairs
PAIR_ROUNDS = 48
OPTIONS_AT, OPTION_ROUNDS = ("d128", 16384), 24
MEASURED = ("triton", "cudnn")
PEERS = ("jax.nn cuDNN", "torch FA2", "torch cuDNN", "public", "public as set", "public unset")
# (mode, head size) -> our Triton kernel against a peer
BARS = {("fwd", 128): ("jax.nn cuDNN", 0.80), ("fwd", 64): ("jax.nn cuDNN", 0.95)}
BACKWARD_BARS = {"torch FA2": 1.2, "public": 5.0}
# option -> the most it may cost per visible pair, over the plain kernel
OPTION_BARS = {
    "sinks": 1.05,
    "8 documents": 1.25,
    "soft cap": 1.4,
    "window 1024": 8.25 / 6,  # six times as fast as all pairs
    "deterministic": 1.25,
}
AUTO_BAR = 0.98  # of the best of our entries


def shapes(models, lengths=LENGTHS):
    every = itertools.product(models, lengths, (True, False))
    return [x for x in every if x[0] != "gqa" or x[2]]


def arrays(model, length, like=jax.random.normal):
    heads, groups, d = MODELS[model]
    keys = jax.random.split(jax.random.key(length), 4)
    sizes = [(TOKENS // length, length, n, d) for n in (heads, groups, groups, heads)]
    return [like(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]


def flops(model, length, causal, mode):
    heads, _, d = MODELS[model]
    once = 4 * TOKENS * length * heads * d * (0.5 if causal else 1.0)
    return once * (1.0 if mode == "fwd" else 3.5)


def ours(platform, **options):
    return lambda q, k, v: flash_attention(q, k, v, platform=platform, **options)


def cudnn(causal):
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation="cudnn"
    )


def program(fn, mode):
    return jax.jit(fn if mode == "fwd" else common.with_gradient(fn, 3))


def programs(causal):
    """Everybody's, by (name, mode)."""
    fns = {platform: ours(platform, causal=causal) for platform in (*MEASURED, "auto")}
    fns["jax.nn cuDNN"] = cudnn(causal)
    return {(name, mode): program(fn, mode) for name, fn in fns.items() for mode in MODES}


def milliseconds(cases, rounds=ROUNDS):
    """Of programs and their inputs by name, a time a round.

    In turns, shuffled each time, so that a slow moment or a hot neighbour hits all.
    """
    times, order = {name: [] for name in cases}, list(cases.items())
    for _ in range(rounds):
        random.shuffle(order)
        for name, (run, inputs) in order:
            # peers' clocks are on the device: waiting for ours must not show
            timing = measure(lambda r=run, x=inputs: r(*x), num_iters=2, together_ms=25.0)
            times[name].append(timing.median)
    return times


def inputs_of(mode, xs):
    return xs[:3] if mode == "fwd" else xs


def check(made, xs):
    """Our entries agree with cuDNN to what bfloat16 allows."""
    f32 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    expected = f32(made["jax.nn cuDNN", "fwd+bwd"](*xs))
    for platform in (*MEASURED, "auto"):
        actual = f32(made[platform, "fwd+bwd"](*xs))
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            # on the device: the arrays are large
            error, limit = float(jnp.abs(a - e).max()), 0.02 * float(jnp.abs(e).max())
            assert error <= limit, f"{platform}: {error} from cuDNN, at most {limit}"


def torch_times(model, length, causal):
    """Milliseconds of torch's own kernels, by mode."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    heads, groups, d = MODELS[model]
    make = lambda n: torch.randn(
        TOKENS // length, n, length, d, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    q, k, v, dout = make(heads), make(groups), make(groups), make(heads).detach()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    times = {}
    for name, backend in (
        ("torch FA2", SDPBackend.FLASH_ATTENTION),
        ("torch cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        with sdpa_kernel(backend):
            forward = lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=heads != groups)
            both = lambda forward=forward: torch.autograd.grad(forward(), (q, k, v), dout)
            for mode, fn in (("fwd", forward), ("fwd+bwd", both)):
                try:
                    times[name, mode] = float(do_bench(fn, return_mode="median"))
                except RuntimeError as error:
                    print(f"{name} {mode}: {str(error).splitlines()[0]}")
    return times


class Public:
    """The public package, in a process of its own."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, pathlib.Path(__file__).with_name("gpu_public.py")],
            env=os.environ | {"PYTHONPATH": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, sizes):
        """Its milliseconds for a shape, by setting and mode; nothing when it has ended."""
        try:
            print(json.dumps(sizes), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return {}
        return json.loads(self.process.stdout.readline() or "{}")


def compile_main(number, count, capability, calls):
    """In a process without a device: compiles every count-th candidate into the cache on disk."""
    target = _device.Target("gpu", "", capability)
    entry = next(e for e in kernel_registry.list("flash_attention") if e.platform == "triton")
    jobs = []
    for make, options in calls:
        xs = jax.eval_shape(make)

        def args_of(q, k, v, options=options):
            kernel = FlashAttention()
            return kernel.prepare(kernel.bind((q, k, v), options, None))[0]

        def forward(cfg, q, k, v, args_of=args_of):
            return entry.fn(args_of(q, k, v), cfg)

        def backward(cfg, q, k, v, dout, args_of=args_of):
            args = args_of(q, k, v)
            lse = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))
            return entry.backward(args, cfg, (dout,), (lse,), (dout,), INPUTS)

        args = jax.eval_shape(args_of, *xs[:3])
        jobs += [(forward, c, xs[:3]) for c in entry.candidates(args, "forward", target)]
        jobs += [(backward, c, xs) for c in entry.candidates(args, "backward", target)]
    for fn, cfg, inputs in jobs[number::count]:
        jaxpr = jax.make_jaxpr(lambda *x, f=fn, c=cfg: f(c, *x))(*inputs).jaxpr
        for eqn in _triton_call.launches(jaxpr):
            avals = [v.aval for v in eqn.invars]
            gpu = _triton_compile.GpuTarget.of(capability)
            _triton_call.compile_launch(eqn.params["launch"], avals, gpu)


def in_processes(commands, **environment):
    running = [
        subprocess.Popen([sys.executable, __file__, *c], env=os.environ | environment)
        for c in commands
    ]
    for process in running:
        process.wait()


@dataclasses.dataclass(frozen=True)
class Option:
    """A causal call with an option, what it sees, and what it is compared with."""

    given: dict
    pairs: float
    base: str = "plain"
    mode: str = "fwd"
    batch: int = 1

    @property
    def call(self):
        return {"causal": True, **self.given}

    def arrays(self):
        xs = arrays(*OPTIONS_AT)
        return [x.reshape(self.batch, -1, *x.shape[2:]) for x in xs]


def option_cases():
    model, length = OPTIONS_AT
    pairs = length * (length + 1) / 2
    documents, window = 8, 1024
    ids = jnp.repeat(jnp.arange(documents), length // documents)[None]
    inside = documents * (length // documents) * (length // documents + 1) / 2
    near = pairs - (length - window - 1) * (length - window) / 2
    both = {"mode": "fwd+bwd", "base": "plain, fwd+bwd"}
    return {
        "plain": Option({}, pairs),
        "sinks": Option({"softmax_aux": jnp.ones((MODELS[model][0], 1))}, pairs),
        "soft cap": Option({"logits_soft_cap": 30.0}, pairs),
        "window 1024": Option({"sliding_window": (window, 0)}, near),
        # that documents are short is not the cost of their ids: beside the same rows of a batch
        "8 rows": Option({}, inside, batch=documents),
        "8 documents": Option({"q_segment_ids": ids, "kv_segment_ids": ids}, inside, "8 rows"),
        "plain, fwd+bwd": Option({}, pairs, **both),
        "soft cap, fwd+bwd": Option({"logits_soft_cap": 30.0}, pairs, **both),
        "deterministic": Option({"deterministic": True}, pairs, **both),
    }


def options_table():
    """Cost of options per visible pair, over the plain causal kernel, each in turns with it."""
    cases, rows = option_cases(), []

    def made(name):
        case = cases[name]
        run = program(ours("triton", **case.call), case.mode)
        return run, inputs_of(case.mode, case.arrays())

    for name, case in cases.items():
        base = cases[case.base]
        directions = DIRECTIONS[case.mode]
        xs = case.arrays()[:3]
        chosen = [tuned(invocation(xs, case.call, "triton", d)) for d in directions]
        if name == case.base:  # the others are compared with it
            continue
        times = milliseconds({x: made(x) for x in (case.base, name)}, OPTION_ROUNDS)
        ratios = [a / b for a, b in zip(times[name], times[case.base], strict=True)]
        cost = statistics.median(ratios) * base.pairs / case.pairs
        medians = {"ms": statistics.median(times[name]), "base": case.base}
        medians |= {"base ms": statistics.median(times[case.base]), "cost": cost}
        print(f"{name:<18} {medians['ms']:>8.3f} ms  {cost:.2f} per visible pair; {chosen}")
        rows.append({"option": name, **medians})
    return rows


def invocation(xs, options, platform, direction):
    wanted = INPUTS if direction == "backward" else frozenset()
    call = {**options, "platform": platform, "direction": direction, "wanted": wanted}
    return default_executor().invocation(FlashAttention(), *xs, **call)


def tuned(inv):
    """What a call is run with, measured now."""
    choice = default_executor().chooser.tune(inv)
    return f"{choice.implementation.name} {choice.cfg}, said by {choice.source}"


def twins(xs, causal, mode):
    """Our entries that "auto" runs, with the same configuration."""

    def chosen(platform, direction):
        choice = default_executor().chooser.choose(
            invocation(xs[:3], {"causal": causal}, platform, direction)
        )
        return choice.implementation.name, choice.cfg

    same = lambda name: all(chosen(name, d) == chosen("auto", d) for d in DIRECTIONS[mode])
    return [name for name in MEASURED if same(name)]


def compare(model, length, causal, public):
    """Milliseconds of everybody, and what is to be said of "auto", by (name, mode)."""
    xs, made = arrays(model, length), programs(causal)
    check(made, xs)
    cases = {(n, mode): (run, inputs_of(mode, xs)) for (n, mode), run in made.items()}
    times = {name: statistics.median(some) for name, some in milliseconds(cases).items()}
    if public is not None:
        sizes = (TOKENS // length, length, *MODELS[model], causal)
        for name, by_mode in public.ask(sizes).items():
            times |= {(name, mode): ms for mode, ms in by_mode.items()}
    for mode in MODES:
        times["auto runs", mode] = twins(xs, causal, mode)
        times["best / auto", mode] = auto_ratio(cases, times, mode)
    return times | torch_times(model, length, causal)


def auto_ratio(cases, times, mode):
    """How fast "auto" is beside the best of our entries; measured again, in pairs, if too slow."""
    best = min(MEASURED, key=lambda name: times[name, mode])
    ratio = times[best, mode] / times["auto", mode]
    if ratio >= AUTO_BAR:
        return ratio
    pair = milliseconds({name: cases[name, mode] for name in (best, "auto")}, PAIR_ROUNDS)
    again = statistics.median(a / b for a, b in zip(pair[best], pair["auto"], strict=True))
    print(f"auto beside {best}: {ratio:.3f}; in {PAIR_ROUNDS} pairs {again:.3f}")
    return again


def tune(model, length, causal, platforms):
    """Measures our entries for a shape now, whatever is known of it; rows of a table that ships."""
    xs = arrays(model, length)[:3]
    executor, made = default_executor(), []
    # a table's first row for a call serves every platform that it can
    for platform, direction in itertools.product(platforms, ("forward", "backward")):
        inv = invocation(xs, {"causal": causal}, platform, direction)
        choice = executor.chooser.tune(inv)
        if (stored := executor.chooser.known(inv.key)) is None:
            print(f"not tuned: {model} {length} {causal} {platform} {direction}: {choice.source}")
            continue
        best = sorted(stored.times_ms.items(), key=lambda item: item[1])[:3]
        print(f"{platform} {direction}: {stored.implementation} of {best}")
        made.append(
            {
                "call": {k: v for k, v in inv.document.items() if k not in ("device",)},
                "implementation": stored.implementation,
                "version": stored.version,
                "config": None if stored.config is None else dataclasses.asdict(stored.config),
                "rivals": dict(stored.rivals),
            }
        )
    return made


def judge(model, length, causal, mode, row):
    """What falls short of its bar."""
    short = []
    bars = dict([BARS[mode, MODELS[model][2]]]) if mode == "fwd" else BACKWARD_BARS
    for peer, bar in bars.items():
        if peer in row and row[peer] / row["triton"] < bar:
            short.append(
                f"{model} {length} causal={causal} {mode}: {row[peer] / row['triton']:.2f}"
            )
    if (ratio := row["best / auto"]) < AUTO_BAR:
        runs = f", which runs {row['auto runs']}" if row["auto runs"] else ""
        short.append(f"{model} {length} causal={causal} {mode}: auto {ratio:.3f}{runs}")
    return short


def timed():
    """Versions of our entries; a row of other shapes may be of earlier ones."""
    entries = kernel_registry.list("flash_attention")
    return {e.name: e.version for e in entries if e.platform in MEASURED and not e.priority}


def keep(options, rows, extras, table):
    """Writes what is known so far to the files that were asked for."""
    if options.table:
        lines = ",\n".join(json.dumps(row) for row in table)
        pathlib.Path(options.table).write_text(f"[\n{lines}\n]\n")
    if options.save:
        shape = "16k tokens, bfloat16; d128: 16 heads, d64: 32, gqa: 32/8 of 128; milliseconds"
        earlier = common.load("gpu_attention")
        here = {"device": common.device_fingerprint(), "versions": common.versions()}
        if here == {k: earlier.get(k) for k in here}:  # other shapes, on the same device
            case = lambda row: [row[x] for x in ("model", "length", "causal", "mode")]
            new = [case(row) for row in rows]
            rows = [row for row in earlier["rows"] if case(row) not in new] + rows
            extras = extras or earlier["options"]
        more = {"options": extras, "models": MODELS}
        common.save("gpu_attention", shape, rows=rows, **more)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--tune", nargs="*", choices=("auto", "triton"), default=["auto", "triton"])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--options", action="store_true", help="the costs of options too")
    parser.add_argument("--public", default="", help="folder of the public package")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile first")
    parser.add_argument("--table", default="", help="a file for the tuned configurations")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = arguments()
    same = ["--models", *options.models, "--lengths", *map(str, options.lengths)]
    same += ["--options"] if options.options else []
    if options.role:
        number, count, capability = options.role.split("/")
        calls = [
            (lambda m=model, n=length: arrays(m, n), {"causal": causal})
            for model, length, causal in shapes(options.models, options.lengths)
        ]
        calls += [(c.arrays, c.call) for c in option_cases().values() if options.options]
        return compile_main(int(number), int(count), capability, calls)
    workers = options.workers
    roles = [f"{i}/{workers}/{_device.find().capability}" for i in range(workers)]
    in_processes([["--role", role, *same] for role in roles], JAX_PLATFORMS="cpu")
    public = Public(options.public) if options.public else None
    rows, short, table = [], [], []
    extras = []
    if options.options:
        extras = [row | {"entries": timed()} for row in options_table()]
        keep(options, rows, extras, table)
    names = ("triton", "cudnn", "auto", *PEERS)
    print(f"{'TFLOP/s':<30}" + "".join(f"{n:>14}" for n in names))
    for model, length, causal in shapes(options.models, options.lengths):
        table += tune(model, length, causal, options.tune)
        times = compare(model, length, causal, public)
        for mode in MODES:
            row = {n: times[n, mode] for n in names if (n, mode) in times}
            rate = {n: flops(model, length, causal, mode) / ms / 1e9 for n, ms in row.items()}
            label = f"{model} {length} {'causal' if causal else 'full'} {mode}"
            cells = (f"{rate[n]:>14.0f}" if n in rate else f"{'-':>14}" for n in names)
            print(f"{label:<30}" + "".join(cells), flush=True)
            row |= {x: times[x, mode] for x in ("auto runs", "best / auto")}
            case = {"model": model, "length": length, "causal": causal, "mode": mode}
            rows.append(case | row | {"entries": timed()})
            short += judge(model, length, causal, mode, row)
        keep(options, rows, extras, table)  # a long run may be cut short
    for row in extras:
        if row["cost"] > (bar := OPTION_BARS.get(row["option"], float("inf"))):
            short.append(f"{row['option']}: {row['cost']:.2f} per visible pair, bar {bar:.2f}")
    print(f"Triton kernels compiled here: {_triton_compile.counts}")
    for line in short:
        print("below the bar: " + line)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
