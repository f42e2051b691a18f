"""Everystop: an LLM inference server with continuous batching; importing this package loads nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everystop.core.request import SamplingParams
    from everystop.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `LLM` and `SamplingParams` when they are first asked for."""
    if name == "LLM":
        from everystop.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from everystop.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
