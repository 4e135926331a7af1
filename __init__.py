"""Twofold: serve the same quantized language model on NVIDIA, AMD and plain CPUs from one pure-Python package.

    from twofold import LLM, SamplingParams

The names below are loaded on first use, so that ``import twofold`` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .engine.llm import LLM
    from .engine.sampling_params import SamplingParams
    from .engine.structured_output import StructuredOutput

__all__ = ["LLM", "SamplingParams", "StructuredOutput", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from .engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from .engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "StructuredOutput":
        from .engine.structured_output import StructuredOutput

        return StructuredOutput
    raise AttributeError(f"module 'twofold' has no attribute {name!r}")
