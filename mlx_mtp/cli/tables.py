"""Tables for a screen of 80 columns. Owns: how they look, and figures of three digits."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table

from mlx_mtp.plain import printable_lines


class _PlainConsole(Console):
    """Names of models and files stand in tables: nothing in them can work the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable_lines(text), style, control)


def as_text(parts: Iterable[RenderableType]) -> str:
    """As wide as stdout and coloured where that shows colours."""
    console = _PlainConsole(
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
