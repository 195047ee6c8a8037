"""moesaic: plan, run, watch and rebalance Mixture-of-Experts language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.engine.llm import LLM as LLM
    from moesaic.sched.request import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "moesaic.engine.llm", "SamplingParams": "moesaic.sched.request"}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: `import moesaic` needs neither torch nor numpy."""
    if name in _HOMES:
        from importlib import import_module

        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as missing:
            if missing.name != "torch":
                raise
            raise ImportError(
                f"moesaic.{name} needs torch: pip install 'moesaic[engine]'", name="torch"
            ) from None
    raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
