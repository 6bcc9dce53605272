"""mini-DeepInfer: a small, readable, prefill-first inference engine for DeepSeek-V4.1-Flash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import LLM, RequestOutput
    from .sampler import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the front end when it is asked for, so that `import mini_deepinfer` stays light."""
    if name in ("LLM", "RequestOutput"):
        from . import engine

        return getattr(engine, name)
    if name == "SamplingParams":
        from .sampler import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
