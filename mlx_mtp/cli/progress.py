"""How far a batch is, while it runs. Owns: the progress line, and what drafting saves in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from mlx_mtp.types import RunStats

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mlx_mtp.batch.runner import Batch
    from mlx_mtp.cli.console import Console

REFRESHES = 4
"""Per second."""
_ROOM = 3
"""Columns left free, where the terminal shows ^C: the line must not wrap to be erased."""


@contextmanager
def show_progress(console: Console, work: Batch, stats: RunStats, left: int) -> Iterator[None]:
    """Within it a line at the foot of the terminal says how far the batch is; none in a pipe.

    Args:
        work: about to run.
        stats: of the engine that runs it.
        left: rows to do.
    """
    terminal = console.terminal
    if terminal is None or not left:
        yield
        return
    from rich.live import Live
    from rich.text import Text

    began = perf_counter()

    def line() -> RenderableType:
        text = Text(progress_line(work, stats, left, perf_counter() - began))
        text.truncate(terminal.width - _ROOM, overflow="ellipsis")
        return text

    live = Live(get_renderable=line, console=terminal, refresh_per_second=REFRESHES, transient=True)
    with live:
        yield


def progress_line(work: Batch, stats: RunStats, left: int, seconds: float) -> str:
    """For example ``120/300 rows · 2 failed · 8 in flight · 312.0 tok/s · 3.4 tok/forward · drafts
    71 % · 3 min left``."""
    now = work.finished_now
    parts = [f"{work.total - left + now}/{work.total} rows"]
    if work.failed_now:
        parts.append(f"{work.failed_now} failed")
    parts.append(f"{work.in_flight} in flight")
    if stats.tokens:
        parts.append(f"{stats.tokens / seconds:.1f} tok/s")
    if stats.row_rounds:
        parts.append(f"{tokens_per_forward(stats):.1f} tok/forward")
    if stats.drafted:
        parts.append(f"drafts {percent(stats.accepted / stats.drafted)}")
    if now:
        parts.append(f"{duration((left - now) * seconds / now)} left")
    return " · ".join(parts)


def tokens_per_forward(stats: RunStats) -> float:
    """Tokens that a request gets from a target forward: 1 without a drafter."""
    return 1 + stats.accepted / max(stats.row_rounds, 1)


def savings(stats: RunStats) -> str:
    """What drafting brought, in words; empty where nothing was drafted."""
    if not stats.drafted:
        return ""
    return (
        f"{tokens_per_forward(stats):.1f} tokens per row and forward instead of 1, "
        f"drafts {percent(stats.accepted / stats.drafted)}"
    )


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """``12 s``, ``3 min`` or ``4 h 05 min``."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
