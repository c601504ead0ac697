"""Block sizes of attention over given blocks: those of native sparse attention."""

from collections.abc import Sequence
from typing import Any

from ejkernel._device import Target
from ejkernel.kernels._xla.apply_native_sparse_attention import fwd
from ejkernel.kernels._xla.native_sparse_attention import config
from ejkernel.kernels._xla.native_sparse_attention.config import Config as Config
from ejkernel.kernels._xla.native_sparse_attention.config import from_params as from_params


def heuristic(args: Any, direction: str, target: Target) -> Config:
    return config.heuristic(fwd.as_branch(args), direction, target)


def candidates(args: Any, direction: str, target: Target) -> Sequence[Config]:
    return config.candidates(fwd.as_branch(args), direction, target)


def memory(args: Any, direction: str, cfg: Config) -> int:
    return config.memory(fwd.as_branch(args), direction, cfg)


def testing(args: Any, direction: str) -> Config:
    return config.testing(fwd.as_branch(args), direction)
