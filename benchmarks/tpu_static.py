"""Our TPU kernels by the cycles of their schedules.

Attention stands beside JAX's splash and flash attention, sparse attention beside dense, and the
linear recurrence and recurrent layers beside our XLA entry.

No TPU is needed: libtpu compiles for a chip and writes down what its kernels do in each cycle.
Loops and branches count as often as they run; waiting for memory does not count, and neither does
what XLA does around the kernels (theirs take heads first, ours tokens first). Peers have the best
of several block sizes, ours its first guess.
"""

import argparse
import concurrent.futures
import functools
import multiprocessing
import pathlib
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import tpu_linear
import tpu_recurrent
import tpu_sparse

from ejkernel import _device, _folders
from ejkernel.aot import _targets, _tpu
from ejkernel.bench import Document, Program, Row, _results
from ejkernel.kernels import kernel_registry

_TOKENS, _HEADS = 4096, 8
_CHIPS = ("v5e", "v6e")
_FLOORS = "v5e"  # the chip of all rows but those of dense attention
_MORE = {
    "blocksparse_attention": tpu_sparse,
    "linear_recurrence": tpu_linear,
    "recurrent": tpu_recurrent,
}
_SPEC = kernel_registry.spec("flash_attention")
_OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": (511, 0)},
}
# queries and keys of a block, keys of a step
_FORWARD = [
    (512, 512, 512),
    (512, 1024, 512),
    (512, 1024, 1024),
    (512, 2048, 1024),
    (1024, 1024, 512),
    (1024, 1024, 1024),
    (1024, 2048, 1024),
    (2048, 1024, 1024),
]
# the same for dk and dv, then queries and keys for dq; without these, one kernel makes all three,
# and what XLA takes to add its parts of dq is not counted
_BACKWARD = [
    (512, 512, 512, 512, 512),
    (512, 1024, 512, 512, 1024),
    (512, 1024, 1024, 1024, 512),
    (1024, 512, 512, 1024, 1024),
    (1024, 1024, 512, 512, 2048),
    (1024, 1024, 1024, 1024, 2048),
    (512, 512, 512),
    (1024, 1024, 512),
    (1024, 1024, 1024),
    (1024, 2048, 1024),
]


class Ours:
    """Cycles of our kernels for one chip."""

    def __init__(self, chip):
        self.compiler = _tpu.Compiler(_targets.parse(f"tpu:{chip}"), "chips")
        self.target = _device.Target(kind="tpu", model=_targets.CHIPS[chip].model)
        [self.entry] = (e for e in kernel_registry.list(_SPEC.name) if e.name == "pallas/tpu")

    def args(self, xs, options):
        values = dict(zip(("query", "key", "value"), xs, strict=True)) | options
        return _SPEC.canonicalize(_SPEC.unpack(_SPEC.complete(values)))

    def forward(self, options, d):
        def fn(*xs):
            args = self.args(xs, options)
            return self.entry.fn(args, self.entry.heuristic(args, "forward", self.target))

        return cycles(self.compiler, fn, [(1, _TOKENS, _HEADS, d)] * 3)

    def backward(self, options, d):
        def fn(lse, out, dout, *xs):
            args = self.args(xs, options)
            cfg = self.entry.heuristic(args, "backward", self.target)
            wanted = frozenset({"query", "key", "value"})
            return self.entry.backward(args, cfg, (out,), (lse,), (dout,), wanted)

        shape = (1, _TOKENS, _HEADS, d)
        return cycles(self.compiler, fn, [shape] * 5, [(1, _HEADS, _TOKENS)])


def cycles(compiler, fn, shapes, exact_shapes=()):
    """Of all kernels of a function of bfloat16 arrays, after float32 ones."""
    xs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in exact_shapes]
    xs += [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    kernels = compiler.compile(fn, tuple(xs), {})["kernels"]
    unknown = [k.name for k in kernels if not k.exact]
    if unknown or not kernels:
        raise RuntimeError(f"The schedule does not tell how often loops of {unknown} run.")
    return round(sum(k.cycles for k in kernels))


def splash(block_sizes):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.MultiHeadMask([masks.FullMask((_TOKENS, _TOKENS))] * _HEADS)
    sizes = kernel.BlockSizes(**block_sizes)
    return kernel.make_splash_mha(mask=mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def splash_forward(compiler, sizes, d):
    names = ("block_q", "block_kv", "block_kv_compute")
    fn = lambda q, k, v: splash(dict(zip(names, sizes, strict=True)))(q, k, v)
    return cycles(compiler, fn, [(_HEADS, _TOKENS, d)] * 3)


def splash_both(compiler, forward, backward, d):
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv")
    names = (*names, "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
    fused = len(backward) == 3
    names = names[:-2] if fused else names
    sizes = dict(zip(names, (*forward, *backward), strict=True)) | {"use_fused_bwd_kernel": fused}

    def both(q, k, v, dout):
        out, pull = jax.vjp(lambda q, k, v: splash(sizes)(q, k, v), q, k, v)
        return out, pull(dout)

    return cycles(compiler, both, [(_HEADS, _TOKENS, d)] * 4)


def flash_forward(compiler, sizes, d):
    from jax.experimental.pallas.ops.tpu import flash_attention

    block_q, block_k_major, block_k = sizes
    blocks = flash_attention.BlockSizes(
        block_q=block_q, block_k_major=block_k_major, block_k=block_k, block_b=1
    )
    fn = lambda q, k, v: flash_attention.flash_attention(q, k, v, block_sizes=blocks)
    # its kernel has no name, by which schedules are found
    named = functools.partial(flash_attention.pl.pallas_call, name="flash_attention_kernel")
    with mock.patch.object(flash_attention.pl, "pallas_call", named):
        return cycles(compiler, fn, [(1, _HEADS, _TOKENS, d)] * 3)


def best(measure, settings):
    """The least cycles, its setting, and what each setting took; one too large is left out."""
    found = {}
    for setting in settings:
        try:
            found[setting] = measure(setting)
        except jax.errors.JaxRuntimeError as error:
            print(f"{setting}: {str(error).splitlines()[0][:90]}", file=sys.stderr)
    setting = min(found, key=found.__getitem__)
    return found[setting], setting, {str(s): n for s, n in found.items()}


def measure(chip, ops):
    """Cycles on one chip, by label."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    ours = Ours(chip)
    found = dense(ours) if "flash_attention" in ops else {}
    for op, module in _MORE.items():
        if op in ops and chip == _FLOORS:
            found[op] = module.measure(ours.compiler, ours.target)
    return found


def dense(ours):
    found = {f"ours {name}": ours.forward(options, 128) for name, options in _OPTIONS.items()}
    found["ours full d=64"] = ours.forward({}, 64)
    peers = ours.compiler
    found["splash"], sizes, found["splash settings"] = best(
        lambda sizes: splash_forward(peers, sizes, 128), _FORWARD
    )
    found["flash"], _, found["flash settings"] = best(
        lambda sizes: flash_forward(peers, sizes, 128), _FORWARD
    )
    found["ours both"] = found["ours full"] + ours.backward({}, 128)
    found["splash both"], _, found["splash both settings"] = best(
        lambda backward: splash_both(peers, sizes, backward, 128), _BACKWARD
    )
    return found


_OURS = "pallas/tpu"
_FULL = "B1 S4096 H8 d128 full"


def row(chip, workload, mode, ours, peers, bars):
    """One row: cycles of ours and of peers, with the best setting of each, and what is promised.

    A bar is (what ours is compared with, its cycles, the most that ours / it may be).
    """
    programs = [Program(_OURS, _results.OURS, float(ours))]
    for name, (least, settings) in peers.items():
        told = {setting: f"{count} cycles" for setting, count in settings.items()}
        programs.append(Program(name, median=float(least), config=told))
    verdicts = [
        _results.Verdict(_OURS, beside, 1 / most, count / ours) for beside, count, most in bars
    ]
    name = f"{chip}: {workload}"
    options = {"unit": "cycles", "auto": _OURS, "bars": verdicts}
    return Row("flash_attention", name, mode, "bfloat16", programs, **options)


def rows_of(chip, found):
    rows = dense_rows(chip, found) if "splash" in found else []
    makers = {
        "blocksparse_attention": sparse_rows,
        "linear_recurrence": linear_rows,
        "recurrent": recurrent_rows,
    }
    for op, make in makers.items():
        rows += make(chip, found[op]) if op in found else []
    return rows


def dense_rows(chip, found):
    splash, flash = ((found[n], found[f"{n} settings"]) for n in ("splash", "flash"))
    both = (found["splash both"], found["splash both settings"])
    full = found["ours full"]
    splash_bar = 0.9 if chip == "v6e" else 1.0
    peers = {"jax splash_attention": splash, "jax flash_attention": flash}
    made = [
        (_FULL, "fwd", full, peers, [("jax splash_attention", splash[0], splash_bar)]),
        ("B1 S4096 H8 d128 causal", "fwd", found["ours causal"], {}, [(_FULL, full, 0.6)]),
        (
            "B1 S4096 H8 d128 causal, window 512",
            "fwd",
            found["ours window"],
            {},
            [("B1 S4096 H8 d128 causal", found["ours causal"], 0.5)],
        ),
        ("B1 S4096 H8 d64 full", "fwd", found["ours full d=64"], {}, [(_FULL, full, 1.25)]),
        (
            _FULL,
            "fwd+bwd",
            found["ours both"],
            {"jax splash_attention": both},
            [("jax splash_attention", both[0], 1.0)],
        ),
    ]
    return [row(chip, *one) for one in made]


def sparse_rows(chip, found):
    """Forward and backward, each at most a quarter of dense attention."""
    made = []
    sparse, dense = found["sparse"], found["dense"]
    for mode, ways in (("fwd", ["forward"]), ("fwd+bwd", ["forward", "backward"])):
        ours, whole = (sum(side[way] for way in ways) for side in (sparse, dense))
        bars = [
            _results.Verdict(_OURS, f"{tpu_sparse.DENSE}, {way}", 4.0, dense[way] / sparse[way])
            for way in ways
        ]
        parts = {way: f"{sparse[way]} cycles" for way in ways}
        programs = [
            Program(_OURS, _results.OURS, float(ours), config=parts),
            Program(tpu_sparse.DENSE, _results.OURS, float(whole), same_work=False),
        ]
        name = f"{chip}: {tpu_sparse.WORKLOAD}"
        options = {"unit": "cycles", "auto": _OURS, "bars": bars}
        made.append(Row("blocksparse_attention", name, mode, "bfloat16", programs, **options))
    return made


def linear_rows(chip, found):
    made = []
    for call, sizes in found.items():
        for size, (tokens, heads) in (("small", tpu_linear.SMALL), ("large", tpu_linear.LARGE)):
            for mode, ways in (("fwd", ["forward"]), ("fwd+bwd", ["forward", "backward"])):
                ours = sum(sizes[size][way] for way in ways)
                programs = [Program(_OURS, _results.OURS, float(ours))]
                if size == "small":
                    cycles = float(sum(sizes["xla"][way] for way in ways))
                    note = "at least: fusions that are alike count once"
                    programs.append(Program("xla/any", _results.OURS, cycles, note=note))
                name = f"{chip}: {call}, B1 T{tokens} H{heads} d128"
                options = {"unit": "cycles", "auto": _OURS}
                made.append(Row("linear_recurrence", name, mode, "bfloat16", programs, **options))
    return made


def recurrent_rows(chip, found):
    """Whole programs: projections and products around the steps are XLA's in both."""
    made = []
    for call, entries in found.items():
        for mode in ("fwd", "fwd+bwd"):
            note = "at least: fusions that are alike count once"
            programs = [
                Program(name, _results.OURS, float(entries[name][mode]), note=note)
                for name in (_OURS, "xla/any")
            ]
            options = {"unit": "cycles", "auto": _OURS}
            name = f"{chip}: {call}"
            made.append(Row("recurrent", name, mode, "bfloat16", programs, **options))
    return made


def document(found):
    """Results, as they are saved."""
    made = _results.new([r for chip in found for r in rows_of(chip, found[chip])])
    made.device = f"tpu|{' and '.join(found)}, cycles of compiled schedules"
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    ops = ("flash_attention", *_MORE)
    parser.add_argument("--ops", nargs="+", default=ops, choices=ops)
    parser.add_argument("--out", help="write the results; a file has those of one run")
    chosen = parser.parse_args()
    chips = _CHIPS if "flash_attention" in chosen.ops else (_FLOORS,)
    spawn = multiprocessing.get_context("spawn")  # libtpu serves one chip a process
    with concurrent.futures.ProcessPoolExecutor(len(chips), spawn) as pool:
        measured = pool.map(functools.partial(measure, ops=chosen.ops), chips)
        found = dict(zip(chips, measured, strict=True))
    made: Document = document(found)
    for one in made.rows:
        cycles = ", ".join(f"{p.name} {p.median:.0f}" for p in one.programs)
        print(f"{one.workload}, {one.mode}: {cycles}")
    if chosen.out:
        _folders.write_whole(pathlib.Path(chosen.out), _results.encode(made))
    missed = [(one, v) for one in made.rows for v in one.bars if not v.kept]
    for one, verdict in missed:
        print(f"missed: {one.workload}, {one.mode}, beside {verdict.beside}: {verdict.ratio:.3f}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
