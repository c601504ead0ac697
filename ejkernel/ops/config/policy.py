"""Whether unknown configurations are measured, and for how long."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from ejkernel import _contexts, _settings
from ejkernel.ops.core.kernel import BACKWARD, FORWARD

_MODES = ("autotune", "heuristics", "always")
_BUDGET_S = {FORWARD: 8.0, BACKWARD: 12.0}


@dataclasses.dataclass(frozen=True)
class AutotunePolicy:
    """`mode` "autotune" measures within `budget_s` seconds a key; "heuristics" never measures.

    "autotune" measures nothing where the configuration of a near call is known; "always" does. None
    takes the value of the environment. `allow_in_trace=False` measures only ahead of time, by
    `autotune_recorded`, never while a function is traced or called.
    """

    mode: str | None = None
    budget_s: float | None = None
    allow_in_trace: bool = True

    def __post_init__(self) -> None:
        if self.mode not in (None, *_MODES):
            raise ValueError(
                f"`AutotunePolicy`: `mode` must be one of {_MODES}; got {self.mode!r}."
            )
        if self.budget_s is not None and not 0 <= self.budget_s < float("inf"):
            raise ValueError(
                f"`AutotunePolicy`: `budget_s` must be finite and not negative; got {self.budget_s}"
            )

    def resolved(self) -> "Policy":
        """The policy with the environment's values for what is None."""
        settings = _settings.current()
        budget = settings.autotune_budget_s if self.budget_s is None else self.budget_s
        mode = settings.autotune_policy if self.mode is None else self.mode
        measures = mode != "heuristics" and budget != 0
        return Policy(measures, mode == "always", budget, self.allow_in_trace)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy with nothing left open."""

    measures: bool
    always: bool  # also where the configuration of a near call is known
    budget_s: float | None  # None: what suits the direction
    allow_in_trace: bool

    def budget(self, direction: str) -> float:
        """Seconds that tuning one direction of a call may take."""
        return _BUDGET_S[direction] if self.budget_s is None else self.budget_s


def mode_of(caller: str, autotune: Any) -> str:
    """The mode that the short form `autotune=True` or `autotune=False` stands for."""
    if not isinstance(autotune, bool | np.bool_):
        raise TypeError(
            f"`{caller}`: `autotune` must be True, False or None; got {autotune!r}. Other policies "
            f"are values of `mode`: {', '.join(map(repr, _MODES))}."
        )
    return "autotune" if autotune else "heuristics"


def current(own: AutotunePolicy) -> Policy:
    """The policy in force for a chain: its own, with the fields that contexts override."""
    return dataclasses.replace(own, **dict(_contexts.policy.value)).resolved()


@contextlib.contextmanager
def policy_override(
    chain: Any = None,
    *,
    autotune: bool | None = None,
    policy: AutotunePolicy | None = None,
    **fields: Any,
) -> Iterator[AutotunePolicy]:
    """Changes the policy of whatever chain runs inside a `with` block.

    Args:
      chain: A chain whose whole policy is taken first; None keeps what is in force.
      autotune: Short for `mode="autotune"` or `mode="heuristics"`.
      policy: A whole policy.
      **fields: Single fields of `AutotunePolicy`; the others stay as they are.
    """
    changes = dict(_contexts.policy.value)
    for base in (getattr(chain, "policy", None), policy):
        if base is not None:
            changes = {f.name: getattr(base, f.name) for f in dataclasses.fields(AutotunePolicy)}
    if autotune is not None:
        fields["mode"] = mode_of("policy_override", autotune)
    changes |= fields
    made = AutotunePolicy(**changes)  # checks names and values
    with _contexts.policy(tuple(sorted(changes.items()))):
        yield made
