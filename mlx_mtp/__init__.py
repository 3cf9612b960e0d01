"""Gemma 4 with its Multi-Token-Prediction drafters on MLX: the same text, sooner.

The public API is imported on first use, so that ``import mlx_mtp`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_mtp.errors import MlxMtpError
    from mlx_mtp.llm import LLM
    from mlx_mtp.loading import load
    from mlx_mtp.session import Session
    from mlx_mtp.types import Chunk, Request, RequestStats, Result, RunStats, SamplingParams
    from mlx_mtp.worker import Handle

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Chunk",
    "Handle",
    "MlxMtpError",
    "Request",
    "RequestStats",
    "Result",
    "RunStats",
    "SamplingParams",
    "Session",
    "load",
]

_HOMES = {
    "LLM": "llm",
    "load": "loading",
    "Handle": "worker",
    "MlxMtpError": "errors",
    "Session": "session",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'types')}"), name)
