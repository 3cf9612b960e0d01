"""`mlx-mtp bench`: what drafting brings on this machine. Owns: its options and what it prints."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mlx_mtp.cli.console import Console
from mlx_mtp.cli.options import (
    DEFAULT_MODEL,
    DEMONSTRATION,
    EXAMPLE_MODEL,
    INTERRUPTED,
    DebugFlag,
    DrafterOption,
    JsonFlag,
    MemoryLimitOption,
    ModelArgument,
    QuietFlag,
    VerboseFlag,
    console_of,
    depth_choices,
    drafter_choice,
    memory_bytes,
    row_counts,
)
from mlx_mtp.errors import UsageError
from mlx_mtp.plain import printable_lines
from mlx_mtp.types import MAX_DEPTH, MAX_ROWS, SamplingParams

if TYPE_CHECKING:
    from mlx_mtp.measure.bench import Bench
    from mlx_mtp.measure.cell import Depth
    from mlx_mtp.measure.report import Report

BENCH_EXAMPLES = """Examples:

\b
  mlx-mtp bench google/gemma-4-E4B-it --quick
  mlx-mtp bench ./gemma-4-12B-it-4bit --plot speed.png --share
  mlx-mtp bench google/gemma-4-E4B-it --rows 1 --depths 0,2,4,auto --prompts mine.txt
  mlx-mtp bench ./random-weights --replay-acceptance .9,.8,.7
  mlx-mtp bench pocket --quick --json | jq .verdict

\b
Speeds count rounds in which all rows decode; "with prefill" is everything from the first prompt to
the last token. GB/s is what the rounds had to read: weights, drafter, keys and values.
"""


class Preset(NamedTuple):
    """What is measured where the options do not say it; depths None: all."""

    rows: tuple[int, ...]
    depths: tuple[Depth, ...] | None
    max_tokens: int
    repeat: int


FULL = Preset(rows=(1, 2, 4, 8), depths=None, max_tokens=128, repeat=3)
QUICK = Preset(rows=(1, 4), depths=(0, 2, 4, "auto"), max_tokens=48, repeat=1)


def bench(
    context: typer.Context,
    model: ModelArgument = None,
    drafter: DrafterOption = "auto",
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help=f"Numbers of rows that decode together, each 1 to {MAX_ROWS}. [default: 1,2,4,8]",
        ),
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help=f"Draft depths, each 0 to {MAX_DEPTH} or auto; 0 is always measured. "
            "[default: all]",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='One prompt per line, or JSONL of {"prompt", "kind"}. [default: built-in ones]',
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens per answer. [default: 128]")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(metavar="N", help="Runs to take the median of. [default: 3]")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Less of everything: rows 1,4, depths 0,2,4,auto, 48 tokens, one run. "
            "[default: no]",
        ),
    ] = False,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Randomness, from 0, which is none.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(metavar="S", help="Seed of sampling and replay, 0 to 4294967295.")
    ] = 0,
    replay_acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="P,P",
            help="Verify the model's own text instead of the drafter's drafts, so spoiled that "
            "draft 1, 2, ... is kept with these chances; the drafter's time still counts. "
            "[default: real drafts]",
        ),
    ] = None,
    memory_limit: MemoryLimitOption = None,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="OUT", help="Draw the speeds to a .png or .svg file. [default: no picture]"
        ),
    ] = None,
    share: Annotated[
        bool,
        typer.Option("--share", help="Print a block of Markdown to paste. [default: no]"),
    ] = False,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Measure what drafting brings on this machine.

    Plain decoding and each draft depth take turns on the same prompts, and their ids are compared.
    In a pipe the last line of stdout is one JSON document. Ctrl-C shows what was measured so far.
    """
    console = console_of(context)
    console.start_logging()
    preset = QUICK if quick else FULL
    many = preset.rows if rows is None else row_counts(rows)
    asked = None if depths is None else depth_choices(depths)
    params = SamplingParams(
        max_tokens=preset.max_tokens if max_tokens is None else max_tokens,
        temperature=temperature,
        seed=seed,
    )
    repeats = preset.repeat if repeat is None else repeat
    if repeats < 1:
        raise UsageError(f"{repeats} runs give no median.", "Give --repeat 1 or more.")
    limit = memory_bytes(memory_limit)
    chosen = drafter_choice(drafter)

    from mlx_mtp.measure.prompts import built_in, read_prompts
    from mlx_mtp.measure.replay import parse_acceptance

    replay = None if replay_acceptance is None else parse_acceptance(replay_acceptance)
    if replay is not None and temperature:
        raise UsageError(
            "Acceptance is replayed from the model's greedy text, not from sampled text.",
            "Leave --temperature at 0.",
        )
    own_prompts = None if prompts is None else read_prompts(Path(prompts))
    picture = None if plot is None else Path(plot)

    from mlx_mtp.measure.bench import Bench, BenchOptions, depths_to_run
    from mlx_mtp.measure.plot import check_plot

    if picture is not None:
        check_plot(picture)
    if chosen is None:
        depths_to_run(asked, False, replay is not None)
    if not model:
        model = DEFAULT_MODEL
        console.note(DEMONSTRATION.format(command=f"bench {EXAMPLE_MODEL}"))

    from mlx_mtp import load

    llm = load(model, drafter=chosen, memory_limit=limit)
    for warning in llm.warnings:
        console.warn(warning)
    to_run = depths_to_run(asked, llm.drafter is not None, replay is not None)
    if asked is None and preset.depths is not None:
        to_run = tuple(depth for depth in to_run if depth in preset.depths)
    options = BenchOptions(
        rows=many,
        depths=to_run,
        max_tokens=params.max_tokens or 1,
        temperature=temperature,
        seed=seed,
        repeat=repeats,
        replay=replay,
    )
    work = Bench(llm, own_prompts or built_in(llm.model_name, llm.path), options)
    interrupted = _run(console, work)
    report = _report(work, interrupted)
    _show(report, share=share, as_json=as_json, console=console)
    if picture is not None and report.cells:
        from mlx_mtp.measure.plot import draw

        draw(report, picture)
        console.note(f"  wrote {picture}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _run(console: Console, work: Bench) -> bool:
    """Run the plan; whether it was interrupted."""
    from mlx_mtp.cli.bench_screen import bench_progress

    try:
        with bench_progress(console.terminal, work.total) as show:
            work.choose_experts()
            for step in work.steps():
                show(step)
    except KeyboardInterrupt:
        return True
    return False


def _report(work: Bench, interrupted: bool) -> Report:
    from mlx_mtp.measure.machine import this_machine
    from mlx_mtp.measure.report import Report, Subject
    from mlx_mtp.versions import versions

    return Report(
        subject=Subject.of(work.llm),
        machine=this_machine(),
        versions=versions() | {"python": platform.python_version()},
        options=work.options,
        prompts=work.prompts,
        cells=tuple(work.cells()),
        experts=tuple(work.experts),
        strategy=work.llm.target.experts.strategy,
        interrupted=interrupted,
    )


def _show(report: Report, *, share: bool, as_json: bool, console: Console) -> None:
    """Everything on stdout; the JSON document comes last, and not on a terminal, where it would
    push the tables off the screen."""
    document = report.document()
    if share:
        from mlx_mtp.measure.share import share_block

        document["share"] = share_block(report)
    if not as_json:
        from mlx_mtp.cli.bench_screen import report_text

        typer.echo(report_text(report))
        if share:
            typer.echo("\n" + printable_lines(document["share"]) + "\n")
    for warning in report.warnings():
        console.warn(warning)
    if as_json or not sys.stdout.isatty():
        typer.echo(json.dumps(document))
    else:
        console.note("  the same and more as JSON: --json, or the last line in a pipe")
