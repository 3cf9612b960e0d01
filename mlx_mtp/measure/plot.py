"""A measurement as a picture. Owns: the drawing; matplotlib comes with the extra `plot`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_mtp.errors import UsageError
from mlx_mtp.measure.cell import Cell
from mlx_mtp.measure.report import Report
from mlx_mtp.types import MAX_DEPTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
COLOURS = ("#1b6ca8", "#d1495b", "#2a9d5c", "#8a5cc2", "#c77f1a", "#4aa3a3", "#7a7a7a", "#b04f92")
AUTO_AT = MAX_DEPTH + 1.2


def check_plot(path: Path) -> None:
    """See that a picture could be written to `path`, before anything is measured.

    Raises UsageError: another suffix, no such folder, not writable, or matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path} is no name of a picture.", "End it with .png or .svg.")
    place = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"{path} cannot be written.", "Name a file in a folder of your own.")
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed.",
            "Install it with: pip install matplotlib",
        )


def draw(report: Report, path: Path) -> None:
    """Write the picture: speed, and speed over plain decoding, by depth; a line per row count."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), dpi=150, layout="constrained")
    speeds, gains = figure.subplots(1, 2)
    has_auto = any(cell.depth == "auto" for cell in report.cells)
    for colour, rows in zip(COLOURS, report.rows, strict=False):
        cells = [cell for cell in report.cells if cell.rows == rows]
        label = "1 row" if rows == 1 else f"{rows} rows"
        _line(speeds, cells, [cell.tokens_per_second for cell in cells], colour, label)
        _line(gains, cells, [report.speed_up(cell) for cell in cells], colour, label)
    speeds.set_ylabel("tokens per second, all rows together")
    gains.set_ylabel("times plain decoding of as many rows")
    gains.axhline(1, color="black", linewidth=0.8, linestyle=":", zorder=1)
    for axes in (speeds, gains):
        _dress(axes, has_auto)
    speeds.set_ylim(bottom=0)
    handles, labels = speeds.get_legend_handles_labels()
    figure.legend(
        handles[::-1],  # most rows first, as the lines mostly lie
        labels[::-1],
        frameon=False,
        loc="outside lower center",
        ncols=max(1, len(report.rows)),
    )
    title = f"{report.subject}\n{report.machine}"
    figure.suptitle(title if report.label is None else f"{title}\n{report.label}", fontsize=10)
    figure.savefig(path)


def _line(
    axes: Axes, cells: list[Cell], values: list[float | None], colour: str, label: str
) -> None:
    """Fixed depths as a line, auto as a diamond beside it."""
    points = [
        (cell.depth, value) for cell, value in zip(cells, values, strict=True) if value is not None
    ]
    fixed = [(depth, value) for depth, value in points if depth != "auto"]
    axes.plot(
        [depth for depth, _ in fixed],
        [value for _, value in fixed],
        color=colour,
        marker="o",
        markersize=4,
        label=label,
    )
    for depth, value in points:
        if depth == "auto":
            axes.plot([AUTO_AT], [value], color=colour, marker="D", markersize=6, linestyle="none")


def _dress(axes: Axes, has_auto: bool) -> None:
    depths = list(range(MAX_DEPTH + 1))
    names = ["0\nplain", *map(str, depths[1:])]
    axes.set_xticks(
        [*depths, *([AUTO_AT] if has_auto else [])], [*names, *(["auto"] if has_auto else [])]
    )
    axes.set_xlabel("tokens drafted per round")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
