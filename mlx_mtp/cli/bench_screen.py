"""A measurement on a screen of 80 columns. Owns: its progress line, its tables and the lines around
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.padding import Padding
from rich.status import Status
from rich.table import Table
from rich.text import Text

from mlx_mtp.cli.progress import duration
from mlx_mtp.cli.tables import as_text, empty_table, figure
from mlx_mtp.measure.bench import Step
from mlx_mtp.measure.cell import Cell
from mlx_mtp.measure.experts import NEVER
from mlx_mtp.measure.report import Report
from mlx_mtp.model.experts import ExpertStrategy
from mlx_mtp.types import MAX_DEPTH

GB, MB = 1e9, 1e6


@contextmanager
def bench_progress(terminal: RichConsole | None, total: int) -> Iterator[Callable[[Step], None]]:
    """Within it a line at the foot of the terminal says what runs; None shows nothing."""
    if terminal is None:
        yield lambda step: None
        return
    began, done = perf_counter(), -1
    with Status("starting", console=terminal) as status:

        def show(step: Step) -> None:
            nonlocal done
            done += 1
            what = f"run {step.repeat}" if step.repeat else "warm-up"
            rows = "1 row" if step.rows == 1 else f"{step.rows} rows"
            text = f"{done}/{total} · {rows} · depth {step.depth} · {what}"
            if done >= 3:
                left = (perf_counter() - began) / done * (total - done)
                text += f" · about {duration(left)} left"
            status.update(text)

        yield show


def report_text(report: Report) -> str:
    """Everything for people."""
    return as_text(_parts(report))


def _parts(report: Report) -> list[RenderableType]:
    parts: list[RenderableType] = [*map(Text, _head(report)), Text()]
    for rows in report.rows:
        parts += [_title(report, "1 row" if rows == 1 else f"{rows} rows together")]
        parts += [_row_table(report, rows), *map(_indented, _below(report, rows)), Text()]
    if report.rows and len(report.cells[0].kinds) > 1:
        parts += [*_by_kind(report), Text()]
    if report.experts:
        parts += [*_experts(report), Text()]
    parts += [Text(sentence, style="bold") for sentence in report.verdict()]
    if report.interrupted:
        parts.append(Text("Interrupted: these are the figures so far.", style="yellow"))
    return parts


def _head(report: Report) -> list[str]:
    options, versions = report.options, report.versions
    warmth = "greedy" if not options.temperature else f"temperature {options.temperature:g}"
    repeats = "one run each" if options.repeat == 1 else f"medians of {options.repeat} runs"
    if report.interrupted:
        repeats = "interrupted"
    lines = [
        str(report.subject),
        str(report.machine),
        f"{report.prompts.source} prompts, up to {options.max_tokens} tokens, {warmth}, {repeats}, "
        f"mlx {versions['mlx']}",
    ]
    return lines + ([report.label] if report.label else [])


def _row_table(report: Report, rows: int) -> Table:
    """Speeds, costs and memory of all depths of one number of rows."""
    table = empty_table()
    for name in ("depth", "tok/s", "times\nplain", "with\nprefill", "ms per\nround"):
        table.add_column(name, justify="right")
    for name in ("round\ncost", "tok per\nforward", "drafts\nkept", "GB/s"):
        table.add_column(name, justify="right")
    peak = max(cell.peak_bytes for cell in report.cells)
    unit, name = (GB, "GB") if peak >= GB else (MB, "MB")
    table.add_column(f"peak\n{name}", justify="right")
    best = report.fastest(rows)
    for cell in report.cells:
        if cell.rows == rows:
            figures = [*_figures(report, cell), figure(cell.peak_bytes / unit)]
            table.add_row(*figures, style="bold green" if cell is best else None)
    return table


def _figures(report: Report, cell: Cell) -> list[str]:
    milliseconds = None if cell.round_seconds is None else 1e3 * cell.round_seconds
    bandwidth = None if cell.bytes_per_second is None else cell.bytes_per_second / GB
    return [
        str(cell.depth),
        figure(cell.tokens_per_second),
        _ratio(report.speed_up(cell)),
        figure(cell.end_to_end),
        figure(milliseconds),
        _ratio(report.round_cost(cell)),
        _ratio(cell.tokens_per_forward),
        "-" if not cell.drafted else f"{100 * cell.accepted / cell.drafted:.0f} %",
        figure(bandwidth),
    ]


def _below(report: Report, rows: int) -> list[str]:
    """What stands below the table of a number of rows."""
    lines = []
    plain, auto = report.cell(rows, 0), report.cell(rows, "auto")
    if plain is not None and plain.first_token_seconds is not None:
        lines.append(f"first token after {plain.first_token_seconds:.2f} s")
    if auto is not None:
        total = sum(auto.depths.values())
        by_use = sorted(auto.depths.items(), key=lambda item: -item[1])
        shares = [(depth, 100 * count / total) for depth, count in by_use]
        shown = ", ".join(f"{depth} ({share:.0f} %)" for depth, share in shares if share >= 0.5)
        lines.append(f"auto chose depth {shown}")
        if auto.parked:
            lines.append(f"auto decoded plainly at the end: {auto.parked}")
    return lines


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))


def _by_kind(report: Report) -> list[RenderableType]:
    """Kinds of prompt with the fewest rows: speeds, and drafts kept by position."""
    rows = report.rows[0]
    title = "By kind, " + ("1 row" if rows == 1 else f"{rows} rows together")
    plain, auto, best = report.cell(rows, 0), report.cell(rows, "auto"), report.fastest(rows)
    speeds = [(plain, "plain"), (auto, "auto")]
    if best is not None and best.depth != 0:
        speeds.insert(1, (best, f"depth {best.depth}"))
    columns = [(cell, name) for cell, name in speeds if cell is not None and rows == 1]
    fixed = [c for c in report.cells if c.rows == rows and c.depth != "auto" and c.drafts.tried]
    deepest = fixed[-1] if fixed else None
    table = empty_table()
    table.add_column("kind", no_wrap=True)
    for _, name in columns:
        table.add_column(f"{name}\ntok/s", justify="right")
    if deepest is not None:
        title += f"; drafts at depth {deepest.depth}"
        table.add_column("tok per\nforward", justify="right")
        table.add_column("chance that 1, 2, ...\ndrafts are kept", no_wrap=True)
    for kind in report.cells[0].kinds:
        figures = [kind, *(figure(cell.kinds[kind].tokens_per_second) for cell, _ in columns)]
        if deepest is not None:
            own = deepest.kinds[kind]
            figures += [_ratio(own.tokens_per_forward), _shares(own.drafts.shares)]
        table.add_row(*figures)
    return [_title(report, title), table]


def _experts(report: Report) -> list[RenderableType]:
    """Times of one layer's experts by strategy, and which one the figures above were made with."""
    table = empty_table()
    for name in ("token\nrows", "pairs", "distinct\nexperts", "as\nmlx-lm", "sorted"):
        table.add_column(name, justify="right")
    for name in ("stacked", "sorted,\nstacked"):
        table.add_column(name, justify="right")
    for one in report.experts:
        times = [
            one.seconds.get(ExpertStrategy(start, stacked), one.seconds[ExpertStrategy(0, stacked)])
            for stacked in (False, True)
            for start in (NEVER, 0)
        ]
        table.add_row(
            str(one.tokens),
            str(one.pairs),
            f"{one.distinct:.1f}",
            *(figure(1e6 * seconds) for seconds in times),
        )
    title = _title_of_experts(report.strategy)
    return [Text(f"Experts of one layer, microseconds; {title}", style="bold"), table]


def _title_of_experts(strategy: ExpertStrategy) -> str:
    how = "stacked" if strategy.stacked else "gate and up apart"
    if strategy.sort_from >= NEVER:
        return f"used: {how}"
    return f"used: {how}, sorted from {strategy.sort_from} pairs"


def _shares(shares: list[float]) -> str:
    """For example ``.93 .85 .71``."""
    return " ".join(f"{share:.2f}".removeprefix("0") for share in shares[:MAX_DEPTH])


def _title(report: Report, text: str) -> Text:
    return Text(f"{text} (replayed)" if report.label else text, style="bold")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
