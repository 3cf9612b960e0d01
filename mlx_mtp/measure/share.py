"""A measurement to paste into a forum or an issue. Owns: its Markdown."""

from __future__ import annotations

from mlx_mtp.measure.cell import Cell
from mlx_mtp.measure.report import Report

_HEADER = ("rows", "plain tok/s", "fastest depth", "tok/s", "speed-up", "auto tok/s", "tok/forward")


def share_block(report: Report) -> str:
    """One block of Markdown: what, where, which versions, a line for each number of rows."""
    options = report.options
    warmth = "greedy" if not options.temperature else f"temperature {options.temperature:g}"
    repeats = "one run" if options.repeat == 1 else f"medians of {options.repeat} runs"
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items() if value)
    lines = [
        f"**mlx-mtp bench**: {report.subject}",
        "",
        f"{report.machine}. {versions}.",
        f"{warmth}, up to {options.max_tokens} tokens, {repeats}, {report.prompts.source} prompts, "
        "decoding only.",
    ]
    if report.label:
        lines += ["", f"**{report.label.capitalize()}: not what this drafter reaches.**"]
    if report.interrupted:
        lines += ["", "Interrupted before its end."]
    lines += ["", _line(_HEADER), _line(["---:"] * len(_HEADER))]
    lines += [_line(_row(report, rows)) for rows in report.rows]
    lines += ["", _ids(report)]
    return "\n".join(lines)


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _row(report: Report, rows: int) -> list[str]:
    plain, auto, best = report.cell(rows, 0), report.cell(rows, "auto"), report.fastest(rows)
    gain = None if best is None else report.speed_up(best)
    return [
        str(rows),
        _speed(plain),
        "-" if best is None else str(best.depth),
        _speed(best),
        "-" if gain is None else f"{gain:.2f}",
        _speed(auto),
        "-" if best is None else f"{best.tokens_per_forward:.2f}",
    ]


def _speed(cell: Cell | None) -> str:
    speed = None if cell is None else cell.tokens_per_second
    return "-" if speed is None else f"{speed:.1f}"


def _ids(report: Report) -> str:
    counts = [cell.differing for cell in report.cells if cell.depth != 0]
    known = [count for count in counts if count is not None]
    if not known:
        return "Ids were not compared."
    if not any(known):
        return "All ids equal plain decoding's."
    return report.warnings()[0]
