"""What `mlx-mtp convert` says. Owns: the plan as a table, the report, both as
JSON, and the progress line. Decides nothing.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mlx_mtp.cli.progress import REFRESHES, duration, percent

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from mlx_mtp.cli.console import Console
    from mlx_mtp.convert import ConvertReport, PartPlan, Plan, Progress
    from mlx_mtp.convert.writer import Observer

_ROOM = 3
"""Columns left free, where the terminal shows ^C: the line must not wrap to be erased."""


def plan_document(plan: Plan, out: Path) -> dict[str, Any]:
    """A plan as JSON."""
    from mlx_mtp.convert.output import free_bytes

    return {
        "out": str(out),
        "recipe": plan.options.name,
        "target": _plan_part(plan.target),
        "drafter": None if plan.drafter is None else _plan_part(plan.drafter),
        "bytes": plan.bytes,
        "download_bytes": plan.download_bytes,
        "disk_bytes": plan.disk_bytes,
        "free_bytes": free_bytes(out),
        "working_bytes": plan.working_bytes,
        "peak_bytes": plan.peak_bytes,
        "warnings": list(plan.warnings),
    }


def plan_lines(plan: Plan, out: Path) -> Iterator[str]:
    """A plan as a table: one line for each part of the model."""
    from mlx_mtp.convert.card import how
    from mlx_mtp.convert.output import free_bytes
    from mlx_mtp.convert.plan import parts_of

    for name, part in _named(plan):
        yield _part_line(name, part.source_bytes, part.bytes, how(part))
        for kind, _, weights, before, after in parts_of(part):
            yield f"    {kind:21} {weights:>15,}  {size(before):>9} → {size(after):>9}"
        reasons = Counter(dropped.why for dropped in part.dropped)
        for why, count in reasons.items():
            dropped_bytes = sum(d.stored.info.nbytes for d in part.dropped if d.why == why)
            yield f"    {'dropped':21} {'':15}  {size(dropped_bytes):>9}   {why} ({count} tensors)"
        yield from _kept_lines(part)
    if plan.download_bytes:
        kept = "each file removed after use" if plan.low_disk else "kept in the hub's cache"
        yield f"  download {size(plan.download_bytes)}, {kept}"
    needed, free = plan.disk_bytes, free_bytes(out)
    verdict = "" if free >= needed else ": too little"
    yield f"  disk     {size(needed)} of {size(free)} free{verdict}"
    yield (
        f"  memory   {size(plan.peak_bytes)} while it is written; the check then loads the pair, "
        f"{size(plan.bytes)}, where it fits"
    )


def report_document(report: ConvertReport) -> dict[str, Any]:
    """A report as JSON."""
    from mlx_mtp.convert.card import document

    return {
        "out": str(report.out),
        "recipe": report.plan.options.name,
        "target": _document(report.target),
        "drafter": None if report.drafter is None else _document(report.drafter),
        "check": None if report.check is None else document(report.check),
        "seconds": round(report.seconds, 3),
        "bytes_resumed": report.bytes_resumed,
        "peak_bytes": report.peak_bytes,
        "was_done": report.was_done,
        "warnings": list(report.warnings),
    }


def report_lines(report: ConvertReport) -> Iterator[str]:
    """A report for people."""
    from mlx_mtp.convert.card import how

    if report.was_done:
        yield f"  {report.out} is this conversion already; nothing was done."
    for name, part in _named(report.plan):
        yield _part_line(name, part.source_bytes, part.bytes, how(part))
    for _, part in _named(report.plan):
        yield from _kept_lines(part)
    if report.check is not None:
        worst = max(report.check.errors.values(), default=0.0)
        error = f", relative error up to {worst:.3f}" if worst else ""
        tensors = f"{report.check.tensors} tensors against their source"
        yield f"  checked  {tensors}{error}{_decoded(report)}"
        on_grid = {t.part for part in report.plan.parts for t in part.tensors if t.on_grid}
        for kind in sorted(on_grid & report.check.errors.keys()):
            found = report.check.errors[kind]
            yield f"  {kind}: on the grid it was trained for, relative error up to {found:.4f}"
    command = shlex.join(["mlx-mtp", "chat", str(report.out)])
    yield f'  next: {command} -p "Hello"'


@contextmanager
def show_conversion(console: Console) -> Iterator[Observer | None]:
    """Within it a line at the foot of the terminal says how far the conversion is; in a pipe there
    is none. Gives what `convert` is to tell."""
    terminal = console.terminal
    if terminal is None:
        yield None
        return
    from rich.live import Live
    from rich.text import Text

    began = perf_counter()
    latest: list[Progress] = []

    def line() -> RenderableType:
        text = Text(progress_line(latest[-1], perf_counter() - began) if latest else "")
        text.truncate(terminal.width - _ROOM, overflow="ellipsis")
        return text

    def observe(progress: Progress) -> None:
        latest[:] = [progress]

    live = Live(get_renderable=line, console=terminal, refresh_per_second=REFRESHES, transient=True)
    with live:
        yield observe


def progress_line(progress: Progress, seconds: float) -> str:
    """For example ``target 3/14 · 12.4 GB of 62.5 GB · 410.0 MB/s · 2 min left``."""
    done = progress.bytes_done + progress.bytes_skipped
    parts = [
        f"{progress.part} {progress.shard}/{progress.shards}",
        f"{size(done)} of {size(progress.bytes_total)}",
    ]
    if progress.bytes_fetched:
        parts.insert(1, f"fetching {size(progress.bytes_fetched)}")
    if progress.step == "check":
        parts.insert(1, "checking")
    if progress.bytes_done and seconds > 0:
        rate = progress.bytes_done / seconds
        parts.append(f"{size(int(rate))}/s")
        parts.append(f"{duration((progress.bytes_total - done) / rate)} left")
    return " · ".join(parts)


def size(count: int) -> str:
    """Decimal units, as file managers and the hub count."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _named(plan: Plan) -> list[tuple[str, PartPlan]]:
    return list(zip(("target", "drafter"), plan.parts, strict=False))


def _document(part: PartPlan) -> dict[str, Any]:
    from mlx_mtp.convert.card import record

    sizes = {"source_bytes": part.source_bytes, "bytes": part.bytes}
    return record(part) | {"weights": part.parameter_count} | sizes


def _plan_part(part: PartPlan) -> dict[str, Any]:
    from mlx_mtp.convert.plan import parts_of

    keys = ("part", "tensors", "weights", "source_bytes", "bytes")
    return _document(part) | {
        "parts": [dict(zip(keys, row, strict=True)) for row in parts_of(part)],
        "tensors": [
            {
                "name": tensor.name,
                "part": tensor.part,
                "action": tensor.action,
                "quantization": tensor.params,
                "source_bytes": tensor.source_bytes,
                "bytes": tensor.bytes,
            }
            for tensor in part.tensors
        ],
        "dropped": [
            {"name": d.stored.name, "why": d.why, "bytes": d.stored.info.nbytes}
            for d in part.dropped
        ],
        "files": [{"name": shard.file, "bytes": shard.bytes} for shard in part.shards],
    }


def _part_line(name: str, before: int, after: int, how: str) -> str:
    """For example ``  target   9.2 GB → 2.6 GB  4 bit affine, groups of 64, the rest bfloat16``."""
    return f"  {name:7}  {size(before)} → {size(after)}  {how}"


def _kept_lines(part: PartPlan) -> Iterator[str]:
    for reason, count in Counter(part.unquantized.values()).items():
        matrices = "1 matrix stays" if count == 1 else f"{count} matrices stay"
        yield f"  {matrices} unquantized: {reason}"


def _decoded(report: ConvertReport) -> str:
    decoding = report.check.decoding if report.check is not None else None
    if decoding is None or decoding.note:
        return f"; {decoding.note}" if decoding is not None else ""
    if decoding.identical is None:
        return f", decoded {decoding.tokens} tokens"
    same = "the same" if decoding.identical else "not quite the same"
    accepted = percent(decoding.accepted / decoding.drafted) if decoding.drafted else "none"
    return f", decoded {decoding.tokens} tokens, {same} without drafts, drafts {accepted}"
