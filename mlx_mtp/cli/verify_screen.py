"""A verification on a screen of 80 columns. Owns: its progress line, its tables and the lines
around them.
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
from mlx_mtp.cli.tables import as_text, empty_table
from mlx_mtp.measure.geometry import Noise
from mlx_mtp.measure.judge import SLACK, Parting
from mlx_mtp.measure.probe import COUNTS, Probed
from mlx_mtp.measure.verify import Compared, Step, Way
from mlx_mtp.measure.verify_report import Count, VerifyReport

SHOWN = 5
"""Differences that are shown; the document has all."""
PROMPT_WIDTH = 40
"""Characters of a prompt that name it."""


@contextmanager
def verify_progress(terminal: RichConsole | None, total: int) -> Iterator[Callable[[Step], None]]:
    """Within it a line at the foot of the terminal says what runs; None shows nothing."""
    if terminal is None:
        yield lambda step: None
        return
    began: float | None = None
    with Status("starting", console=terminal) as status:

        def show(step: Step) -> None:
            nonlocal began
            text = f"{step.answers}/{total} answers · {step.what}"
            if began is not None and step.answers >= total / 20:
                left = (perf_counter() - began) / step.answers * (total - step.answers)
                text += f" · about {duration(left)} left"
            began = began or perf_counter()
            status.update(text)

        yield show


def report_text(report: VerifyReport) -> str:
    """Everything for people."""
    return as_text(_parts(report))


def _parts(report: VerifyReport) -> list[RenderableType]:
    parts: list[RenderableType] = [*map(Text, _head(report)), Text()]
    if report.compared:
        parts += [Text("Answers beside those of plain decoding alone", style="bold")]
        parts += [_answers(report), Text()]
    if report.partings:
        parts += [*_differences(report), Text()]
    if report.noise is not None:
        parts += [*map(_indented, _noise(report.noise)), Text()]
    if report.probed:
        counts = f"{', '.join(map(str, COUNTS[:-1]))} or {COUNTS[-1]}"
        title = f"Kernels: where {counts} token rows give other bits than one"
        parts += [Text(title, style="bold"), _kernels(report.probed), Text()]
    for sentence in report.verdict():
        style = "bold red" if "FAULT" in sentence else "bold"
        parts.append(Text(sentence, style=style))
    parts += [Text(line) for line in _costs(report)]
    if report.interrupted:
        parts.append(Text("Interrupted: this is what was found so far.", style="yellow"))
    return parts


def _head(report: VerifyReport) -> list[str]:
    warmth = " and ".join(_warmth(one) for one in report.options.temperatures)
    return [
        str(report.subject),
        str(report.machine),
        f"{len(report.prompts)} {report.source} prompts, up to {report.options.max_tokens} tokens, "
        f"{warmth}, mlx {report.versions['mlx']}",
    ]


def _warmth(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def _answers(report: VerifyReport) -> Table:
    """How many answers of each way are equal."""
    table = empty_table()
    table.add_column("rows", justify="right")
    table.add_column("decoding", no_wrap=True)
    for temperature in report.options.temperatures:
        table.add_column(_warmth(temperature), justify="right")
    for way in sorted(report.ways, key=lambda way: (way.exact, way.depth == 0)):
        counts = [report.count(way, one) for one in report.options.temperatures]
        cells = [_counted(count) for count in counts]
        is_bad = any(count.faults for count in counts)
        table.add_row(str(way.rows), _decoding(way), *cells, style="red" if is_bad else None)
    return table


def _decoding(way: Way) -> str:
    name = {0: "plain", "auto": "auto"}.get(way.depth, f"depth {way.depth}")
    return f"{name}, exact" if way.exact else name


def _counted(count: Count) -> str:
    if not count.answers:
        return "-"
    parts = [f"{count.equal} equal"]
    if count.near_ties:
        parts.append(f"{count.near_ties} near tie" + "s" * (count.near_ties > 1))
    if count.faults:
        parts.append(f"{count.faults} FAULT" + "S" * (count.faults > 1))
    return ", ".join(parts)


def _differences(report: VerifyReport) -> list[RenderableType]:
    partings = report.partings
    shown = f"; {SHOWN} of {len(partings)}, all with --json" if len(partings) > SHOWN else ""
    parts: list[RenderableType] = [Text(f"Where answers part{shown}", style="bold")]
    for one in partings[:SHOWN]:
        parts += map(_indented, _difference(report, one))
    return parts


def _difference(report: VerifyReport, one: Compared) -> list[str]:
    parting, prompt = one.parting, report.prompts[one.prompt].text
    assert parting is not None
    if len(prompt) > PROMPT_WIDTH:
        prompt = prompt[: PROMPT_WIDTH - 3] + "..."
    where = f"{one.way}, {_warmth(one.temperature)}: {prompt!r}, token {parting.place + 1}"
    plain, other = (
        "the end" if token is None else repr(text)
        for token, text in zip((parting.plain, parting.other), one.texts, strict=True)
    )
    lines = [where, f"  {plain} became {other}."]
    if parting.plain_gap is not None and parting.block_gap is not None:
        lines[1] = (
            f"  {plain} leads {other} by {parting.plain_gap:.2g} in plain steps and by "
            f"{parting.block_gap:.2g} in {one.way.geometry}; rounding explains "
            f"{parting.allowed:.2g}."
        )
    return [*lines, f"  {parting.fault or _near_tie(parting)}"]


def _near_tie(parting: Parting) -> str:
    if abs(parting.plain_gap or 0.0) > parting.allowed:
        return "A near tie with the filters' threshold, which one of them passed by as little."
    return "A near tie."


def _noise(noise: Noise) -> list[str]:
    """What is known of rounding, in lines."""
    begin = f"Logits of {noise.positions} positions beside those of plain steps: "
    if not noise.largest:
        return [begin + "the same bits in all blocks and batches."]
    lines = [begin.rstrip()]
    for geometry, spread in noise.spreads.items():
        lines.append(f"  {geometry}: typically {spread.typical:.2g}, at most {spread.largest:.2g}")
    typical, largest = noise.shaken
    lines.append(f"  a changed last bit: typically {typical:.2g}, at most {largest:.2g}")
    lines.append(f"  rounding explains gaps up to {SLACK * noise.rounding:.2g}")
    return lines


def _kernels(probed: tuple[Probed, ...]) -> Table:
    """What differs from how many token rows on; shapes that came out alike share a line."""
    table = empty_table()
    table.add_column("kind", no_wrap=True)
    table.add_column("inputs x outputs")
    table.add_column("weights", no_wrap=True)
    for name in ("tokens\nof a row", "rows of\na token", "last\nplaces"):
        table.add_column(name, justify="right")
    lines: dict[tuple[str, ...], list[str]] = {}
    for one in probed:
        worst = "-" if one.is_equal else f"{one.worst:.3g}"
        key = (one.name, one.weights, _from(one.tokens), _from(one.rows), worst)
        lines.setdefault(key, []).append(one.shape)
    for (name, *rest), shapes in lines.items():
        table.add_row(name, ", ".join(shapes), *rest)
    return table


def _from(places: dict[int, float]) -> str:
    """For example ``from 2``, ``3, 5`` or, where all are equal, ``-``."""
    differing = [count for count, found in places.items() if found]
    if not differing:
        return "-"
    if differing == [count for count in places if count >= differing[0]]:
        return f"from {differing[0]}"
    return ", ".join(map(str, differing))


def _costs(report: VerifyReport) -> list[str]:
    """What exact mode costs, in one sentence."""
    parts = []
    for cost in report.costs():
        what = "plain decoding" if cost.depth == 0 else f"depth {cost.depth}"
        times, taken = cost.exact_seconds / cost.seconds, f"{cost.exact_seconds:.1f} s"
        parts.append(f"{times:.2f} times {what}'s time ({taken} for {cost.seconds:.1f} s)")
    answers = max((cost.answers for cost in report.costs()), default=0)
    return [f"Exact mode takes {' and '.join(parts)}; {answers} answers alone."] if parts else []


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))
