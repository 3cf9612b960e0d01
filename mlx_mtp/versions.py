"""Which versions of packages are installed. Owns: asking for them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

OWN = ("mlx-mtp", "mlx", "mlx-lm")
"""Packages that have a say in what is computed."""


def versions(packages: Iterable[str] = OWN) -> dict[str, str | None]:
    """By package; None for one that was never installed, such as a bare source tree."""
    return {name: _version(name) for name in packages}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
