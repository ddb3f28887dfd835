"""verl_lite: reinforcement learning of language models with Ray, FSDP2 and vLLM, from a laptop's CPU to many nodes.

Importing this package loads none of torch, Ray and vLLM; `DataProto` is loaded when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_lite.protocol import DataProto

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        from verl_lite.protocol import DataProto

        return DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
