"""Compiled programs of a workload: ours entry by entry, and those of peers."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _device
from ejkernel.bench import _workloads
from ejkernel.bench._workloads import AUTO, BOTH, FWD, TIME, Peer, Workload
from ejkernel.kernels import _op_kernel, kernel_registry
from ejkernel.ops.core.kernel import BACKWARD, FORWARD
from ejkernel.ops.execution.executor import default_executor

DIRECTIONS = {FWD: (FORWARD,), BOTH: (FORWARD, BACKWARD)}
PURE, LOOPED, IN_PLACE = "pure", "looped", "in place"  # kinds of programs


@dataclasses.dataclass(eq=False)
class Call:
    """The inputs of a workload, shared by all its programs: arrays, or only their shapes."""

    workload: Workload
    values: dict[str, Any]
    traced: dict[str, Any]
    static: dict[str, Any]
    args: Any
    grads: tuple[str, ...]
    cotangent: Any = None
    has_data: bool = True

    @classmethod
    def of(cls, workload: Workload, key: Any = None) -> "Call":
        spec = kernel_registry.spec(workload.op)
        key = jax.random.key(0) if key is None else key
        values = workload.values(jnp.dtype(workload.dtype), key)
        traced, static = _workloads.split(values)
        args = spec.canonicalize(spec.unpack(spec.complete(values)))
        grads = workload.grads
        if grads is None:
            grads = tuple(name for name in traced if name in spec.differentiable)
        return cls(workload, values, traced, static, args, grads)

    @classmethod
    def of_shapes(cls, workload: Workload) -> "Call":
        """A call without data, whose programs can be compiled and not run."""
        found: list[Call] = []

        def make(key: Any) -> Any:
            found.append(cls.of(workload, key))
            return found[0].traced, found[0].args

        shapes, args = jax.eval_shape(make, jax.random.key(0))
        (call,) = found
        traced = {name: shapes[name] for name in call.traced}  # in the order of the arguments
        more: dict[str, Any] = {"traced": traced, "values": call.static | traced, "args": args}
        return dataclasses.replace(call, has_data=False, **more)

    def without_data(self) -> "Call":
        traced = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.traced)
        return dataclasses.replace(self, traced=traced, cotangent=None, has_data=False)

    def while_traced(self, ask: Callable[["Call"], Any]) -> Any:
        """What `ask` says of this call while it is traced, when arrays have no numbers."""
        said: list[Any] = []

        def trace(traced: dict[str, Any]) -> None:
            values = {**self.static, **traced}
            said.append(ask(dataclasses.replace(self, traced=traced, values=values)))

        jax.eval_shape(trace, self.traced)
        return said[0]

    def prepared(self, peer: Peer | None) -> "Call":
        """This call with the arrays that a peer takes besides."""
        if peer is None or peer.prepare is None:
            return self
        if self.has_data:
            more = peer.prepare(self.values)
        else:
            prepare = peer.prepare
            more = jax.eval_shape(lambda traced: prepare({**self.static, **traced}), self.traced)
        return dataclasses.replace(self, traced=self.traced | more)

    @property
    def op(self) -> str:
        return self.workload.op

    def work(self, mode: str) -> tuple[int | None, int | None]:
        """Operations and bytes of a mode."""
        work = kernel_registry.spec(self.op).work
        if work is None:
            return None, None
        directions = DIRECTIONS[mode]
        flops = sum(work.flops(self.args, d) for d in directions)
        return flops, sum(work.traffic(self.args, d) for d in directions)

    def with_cotangent(self, fn: Callable[[dict[str, Any]], Any]) -> None:
        """Draws a cotangent for the outputs of a function, once; without data, its shapes."""
        if self.cotangent is not None:
            return
        made = jax.eval_shape(lambda traced: fn({**self.static, **traced}), self.traced)
        if not self.has_data:
            self.cotangent = made
            return
        leaves, tree = jax.tree.flatten(made)
        keys = jax.random.split(jax.random.key(1), max(len(leaves), 1))
        drawn = [
            jax.random.normal(k, x.shape, jnp.float32).astype(x.dtype)
            for k, x in zip(keys, leaves, strict=False)
        ]
        self.cotangent = jax.tree.unflatten(tree, drawn)


@dataclasses.dataclass(eq=False)
class Ours:
    """One of our programs: an entry, or what platform="auto" runs."""

    name: str
    fn: Callable[[dict[str, Any]], Any]
    choices: dict[str, Any]  # by direction
    version: int | None

    def config(self) -> dict[str, str]:
        return {d: f"{c.cfg}, said by {c.source}" for d, c in self.choices.items()}

    def same_as(self, other: "Ours") -> bool:
        """Whether both run the same kernels with the same configurations."""
        mine, others = (
            {d: (c.implementation.name, c.cfg) for d, c in x.choices.items()} for x in (self, other)
        )
        return mine == others


def entries(call: Call, mode: str, wanted: Any = None) -> Iterator[tuple[Any, str | None]]:
    """The entries of an op on this device, and why each cannot serve the call, or None."""
    target = _device.find()
    for entry in kernel_registry.list(call.op):
        if not entry.runs_on(target):
            continue
        if wanted is None and entry.priority < 0:  # it only stands in for another one
            continue
        if wanted is not None and not {entry.name, str(entry.platform)} & set(wanted):
            continue
        reasons = [entry.why_not(call.args, target, d) for d in DIRECTIONS[mode]]
        if mode == BOTH and entry.backward is None and entry.derivative != "jax":
            reasons.append("has no backward kernel")
        yield entry, next((reason for reason in reasons if reason is not None), None)


def kernel_of(op: str) -> Any:
    """The kernel that stands for an op in `ejkernel.modules`."""
    import ejkernel.modules  # noqa: F401 - it knows how to import its classes

    public = _op_kernel.OpKernel.public(op)
    if public is None:
        raise ValueError(f"`{op}` has no function in `ejkernel.modules`.")
    return public()


def of_entry(call: Call, entry: Any, mode: str) -> Ours:
    """The program of one entry, asked for by its platform."""
    alike = [e for e, why in entries(call, mode) if e.platform == entry.platform and why is None]
    if call.workload.ours is not None:
        chosen = call.workload.ours
        fn: Callable[..., Any] = lambda values: chosen(str(entry.platform), values)
    elif alike == [entry]:
        public = type(kernel_of(call.op)).function
        fn = lambda values: public(**values, platform=str(entry.platform))
    else:
        one = _op_kernel.keyword_function(kernel_registry.spec(call.op), entry)
        fn = lambda values: one(**values)
    made = Ours(entry.name, fn, {}, entry.version)
    if call.workload.devices == 1:
        platform = str(entry.platform) if alike == [entry] else entry.name
        made.choices = _choices(call, mode, platform)
    return made


def of_auto(call: Call, mode: str) -> Ours:
    """What a user gets who asks for nothing."""
    chosen, public = call.workload.ours, type(kernel_of(call.op)).function
    fn: Callable[..., Any] = lambda values: public(**values)
    if chosen is not None:
        fn = lambda values: chosen(AUTO, values)
    choices = _choices(call, mode, AUTO) if call.workload.devices == 1 else {}
    return Ours(AUTO, fn, choices, None)


def stand_in(auto: Ours, working: Sequence[Ours]) -> Ours | None:
    """The program of an entry that is what "auto" runs; None where no single one is."""
    same = [ours for ours in working if auto.choices and ours.same_as(auto)]
    return (same or working)[0] if same or len(working) == 1 else None


def checked(call: Call, entry: Any) -> tuple[str, dict[str, Any]]:
    """The mode in which an entry is compared with the oracle, and the chosen configurations."""
    reasons = dict(entries(call, BOTH, (entry.name,)))
    both = BOTH in call.workload.modes and reasons.get(entry) is None
    mode = BOTH if both and kernel_registry.spec(call.op).differentiable else FWD
    choices = of_entry(call, entry, mode).choices
    return mode, {direction: choice.cfg for direction, choice in choices.items()}


def invocations(call: Call, mode: str, platform: str) -> dict[str, Any]:
    """The invocations of a call, by direction."""
    kernel, made = kernel_of(call.op), {}
    wanted = frozenset(n for n in call.args.arrays() if n in _differentiable(call))
    for direction in DIRECTIONS[mode]:
        extra = {"direction": direction, "wanted": wanted if direction == BACKWARD else frozenset()}
        made[direction] = default_executor().invocation(
            kernel, **call.values, platform=platform, **extra
        )
    return made


def _differentiable(call: Call) -> frozenset[str]:
    """Canonical arrays whose gradients a backward of this workload makes."""
    spec = kernel_registry.spec(call.op)
    named = spec.differentiable & set(call.grads)
    return spec.differentiable if call.grads and not set(call.grads) <= named else named


def _choices(call: Call, mode: str, platform: str) -> dict[str, Any]:
    """What is chosen for the directions of a mode; nothing where JAX makes the backward."""
    if "/" in platform:  # an entry beside others of its platform: its own kernel chooses
        return {}
    chooser, made = default_executor().chooser, {}
    for direction, inv in invocations(call, mode, platform).items():
        forward = made.get(FORWARD)
        if direction == BACKWARD and forward.implementation.derivative == "jax":
            continue
        made[direction] = chooser.choose(inv)
    return made


# Programs that run


@dataclasses.dataclass(eq=False)
class Runnable:
    """A program with its inputs; one whose inputs are shapes can only be compiled."""

    jitted: Any
    inputs: tuple[Any, ...]
    # names in the first input, which is donated, each with the output that the next call takes
    follows: dict[str, str] = dataclasses.field(default_factory=dict)
    compiled: Any = None  # else `jitted` is compiled by the first call
    _held: dict[str, Any] | None = None  # what the next call donates

    def compile(self) -> Any:
        if self.compiled is None:
            self.compiled = self.jitted.lower(*self.inputs).compile()
        return self.compiled

    def __call__(self) -> Any:
        program = self.jitted if self.compiled is None else self.compiled
        if not self.follows:
            return program(*self.inputs)
        first, *rest = self.inputs
        if self._held is None:  # a copy: the arrays of the call stay as they are
            self._held = {name: jnp.array(x) for name, x in first.items()}
        made = program(self._held, *rest)
        self._held = {name: made[out] for name, out in self.follows.items()}
        return made


def kinds(call: Call, mode: str, peer: Peer | None) -> tuple[str, ...]:
    """The programs that a row makes of one function: the first is compared, the last timed."""
    workload = call.workload
    if workload.quantity != TIME:
        return (PURE,)
    if kernel_registry.spec(call.op).written or (peer is None and workload.carried):
        return PURE, IN_PLACE
    return (PURE, LOOPED) if workload.repeats > 1 and mode == FWD else (PURE,)


def program(call: Call, fn: Callable[[dict[str, Any]], Any], mode: str, kind: str) -> Runnable:
    """The program of a kind; `fn` takes the public arguments of the call."""
    if kind == IN_PLACE:
        return in_place(call, fn, mode, call.workload.repeats)
    if kind == LOOPED:
        return looped(call, fn, call.workload.repeats)
    return pure(call, fn, mode)


def pure(call: Call, fn: Callable[[dict[str, Any]], Any], mode: str) -> Runnable:
    """Gives outputs, and gradients where the mode has them."""
    static, grads = call.static, call.grads
    if mode == FWD:
        return Runnable(jax.jit(lambda traced: fn({**static, **traced})), (call.traced,))

    @jax.jit
    def both(traced: dict[str, Any], cotangent: Any) -> Any:
        point = {name: traced[name] for name in grads}
        out, pull = jax.vjp(lambda some: fn({**static, **traced, **some}), point)
        return out, pull(cotangent)[0]

    call.with_cotangent(fn)
    return Runnable(both, (call.traced, call.cotangent))


def carried(call: Call) -> dict[str, str]:
    """Arguments that a program may overwrite, each with the output that follows it."""
    written = {name: name for name in kernel_registry.spec(call.op).written}
    return written | dict(call.workload.carried)


def looped(call: Call, fn: Callable[[dict[str, Any]], Any], repeats: int) -> Runnable:
    """Makes so many forward calls one after another.

    The first array of a call goes through a barrier with the outputs of the call before, so that
    the compiler neither drops a call nor takes it out of the loop.
    """
    name = next(iter(call.traced))
    one = lambda traced: fn({**call.static, **traced})

    @jax.jit
    def program(traced: dict[str, Any]) -> Any:
        def step(_: Any, carry: Any) -> Any:
            first, _ = carry
            return jax.lax.optimization_barrier((first, one(traced | {name: first})))

        made = jax.eval_shape(one, traced)
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
        return jax.lax.fori_loop(0, repeats, step, (traced[name], start))[1]

    return Runnable(program, (call.traced,))


def in_place(
    call: Call, fn: Callable[[dict[str, Any]], Any], mode: str, repeats: int = 1
) -> Runnable:
    """As `pure`; arguments that may be overwritten are those of the call before, donated.

    A program makes `repeats` calls one after another; in a loop, XLA would copy what is carried.
    """
    names = kernel_registry.spec(call.op).outputs(call.args)
    follows = carried(call)
    if not follows:
        return pure(call, fn, mode)
    rest = {n: x for n, x in call.traced.items() if n not in follows}

    def steps(written: dict[str, Any], rest: dict[str, Any]) -> Any:
        for _ in range(repeats):
            found = fn({**call.static, **rest, **written})
            made = dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))
            written = {name: made[out] for name, out in follows.items()}
        return made

    first = {name: call.traced[name] for name in follows}
    return Runnable(jax.jit(steps, donate_argnums=0), (first, rest), follows)
