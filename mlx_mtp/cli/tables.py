"""Tables for a screen of 80 columns. Owns: how they look, and figures of three digits."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table


def as_text(parts: Iterable[RenderableType]) -> str:
    """As wide as stdout and coloured where that shows colours."""
    console = Console(
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as captured:
        console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def empty_table() -> Table:
    """A table without columns yet."""
    return Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def figure(value: float | None) -> str:
    """Three digits, as far as that goes."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
