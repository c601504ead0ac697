"""Block-sparse attention in Triton: flash attention's kernels over lists of blocks."""

from typing import Any

from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton import flash_attention as flash
from ejkernel.kernels._triton.blocksparse_attention import call, config


def _requires(args: Any) -> str | None:
    """What the kernels cannot do."""
    if args.block_size % config.LEAST:
        return (
            f"needs a `block_size` that is a multiple of {config.LEAST}, the smallest tile of a "
            f"product; got {args.block_size}"
        )
    return flash.requires(args)


kernel_registry.register(
    "blocksparse_attention",
    Platform.TRITON,
    Backend.GPU,
    backward=call.backward,
    config=config,
    version=1,
    requires=_requires,
)(call.forward)
