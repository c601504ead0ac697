"""`attention`: the plain form, which also returns its weights."""

import dataclasses
import functools
from typing import Any

from ejkernel.kernels import _spec
from ejkernel.kernels._specs import _attention_cases, _common, _work_attention, flash_attention


@_spec.op_args
class AttentionArgs(flash_attention.FlashAttentionArgs):
    """Arguments of `attention`: those of `flash_attention` without lse and blocks."""

    return_lse: bool = _spec.hidden(default=False)
    deterministic: bool = _spec.hidden(default=False)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How to run `attention`; there is nothing to tune."""

    platform: str | None = None
    backend: str | None = None
    fwd_params: None = None
    bwd_params: None = None


def canonicalize(values: dict[str, Any]) -> AttentionArgs:
    made = flash_attention.canonicalize(values, op="attention")
    return AttentionArgs(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)})


def _cases() -> tuple[_spec.Case, ...]:
    def without_lse(case: _spec.Case) -> _spec.Case:
        def values(dtype: Any, key: Any) -> dict[str, Any]:
            made = case.values(dtype, key)
            made.pop("return_lse")
            return made

        return dataclasses.replace(case, values=values)

    made = [without_lse(case) for case in _attention_cases.cases()]
    # the masks are those of `flash_attention`: a shorter core checks that they arrive
    return (*made[:6], *(dataclasses.replace(case, tags=frozenset({"full"})) for case in made[6:]))


def _changes() -> dict[str, dict[str, Any]]:
    made = _attention_cases.changes()
    return {name: made[name] for name in made if name not in ("return_lse", "deterministic")}


SPEC = _spec.OpSpec(
    name="attention",
    work=_work_attention.attention,
    args=AttentionArgs,
    canonicalize=canonicalize,
    unpack=lambda values: flash_attention.unpack(values, op="attention"),
    reference="ejkernel.kernels._reference.attention:attention",
    differentiable=flash_attention.SPEC.differentiable,
    outputs=lambda args: ("out", "weights"),
    output_axes={"out": ("b", "t", "h", "e"), "weights": ("b", "h", "t", "s")},
    cases=_cases,
    padded=tuple(_attention_cases.PADDED),
    changes=_changes,
    examples=flash_attention.SPEC.examples,
    twin=flash_attention.twin,
    config=AttentionConfig,
    scalars={"dropout_seed": functools.partial(_common.seed_array, "attention")},
    publish=flash_attention.publish,
    shardable=flash_attention.SPEC.shardable,
    aliases=flash_attention.SPEC.aliases,
    localize=flash_attention.localize,
)
