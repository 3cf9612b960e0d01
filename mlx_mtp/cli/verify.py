"""`mlx-mtp verify`: whether the text is the same with and without drafts on this machine. Owns: its
options, what it prints and its exit code.
"""

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
from mlx_mtp.errors import UsageError, VerificationError
from mlx_mtp.types import MAX_DEPTH, MAX_ROWS, SamplingParams

if TYPE_CHECKING:
    from mlx_mtp.decode.policy import Depth
    from mlx_mtp.llm import LLM
    from mlx_mtp.measure.verify import Verification
    from mlx_mtp.measure.verify_report import VerifyReport

VERIFY_EXAMPLES = f"""Examples:

\b
  mlx-mtp verify google/gemma-4-E4B-it
  mlx-mtp verify ./gemma-4-12B-it-4bit --quick
  mlx-mtp verify google/gemma-4-E4B-it --prompts mine.txt --depths 4 --max-tokens 200
  mlx-mtp verify pocket --json | jq .verdict

\b
The exit code is {VerificationError.exit_code} where something differs by more than rounding.
"""


class Preset(NamedTuple):
    """What is compared where the options do not say it."""

    prompts: int
    rows: tuple[int, ...]
    depths: tuple[Depth, ...]
    max_tokens: int
    positions: int


FULL = Preset(prompts=24, rows=(1, 4), depths=(4, 7, "auto"), max_tokens=64, positions=128)
QUICK = Preset(prompts=4, rows=(1, 4), depths=(4, "auto"), max_tokens=32, positions=48)


def verify(
    context: typer.Context,
    model: ModelArgument = None,
    drafter: DrafterOption = "auto",
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help=f"Numbers of rows that decode together, each 1 to {MAX_ROWS}. [default: 1,4]",
        ),
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help=f"Draft depths, each 1 to {MAX_DEPTH} or auto. [default: 4,7,auto]",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='One prompt per line, or JSONL of {"prompt", "kind"}. '
            f"[default: {FULL.prompts} built-in ones]",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Most tokens per answer. [default: {FULL.max_tokens}]"),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"Less of everything: {QUICK.prompts} prompts, depths 4,auto, "
            f"{QUICK.max_tokens} tokens. [default: no]",
        ),
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            help="Randomness, from 0, which is none. [default: both 0 and the model's own]",
        ),
    ] = None,
    memory_limit: MemoryLimitOption = None,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Check that drafts do not change the text on this machine.

    The same prompts are answered plainly and with drafts, alone and together, greedily and
    sampled, and their ids are compared. Where they part, it says if two tokens were nearly tied.
    In a pipe the last line of stdout is one JSON document. Ctrl-C shows what was found so far.
    """
    console = console_of(context)
    console.start_logging()
    preset = QUICK if quick else FULL
    many = preset.rows if rows is None else row_counts(rows)
    asked = None if depths is None else depth_choices(depths)
    if asked is not None and not (asked := tuple(depth for depth in asked if depth != 0)):
        raise UsageError("There is no depth to compare.", f"Give depths from 1 to {MAX_DEPTH}.")
    params = SamplingParams(
        max_tokens=preset.max_tokens if max_tokens is None else max_tokens, temperature=temperature
    )
    limit = memory_bytes(memory_limit)
    chosen = drafter_choice(drafter)
    if chosen is None and asked:
        raise _nothing_drafts()

    from mlx_mtp.measure.prompts import built_in, read_prompts

    own_prompts = None if prompts is None else read_prompts(Path(prompts))
    if not model:
        model = DEFAULT_MODEL
        console.note(DEMONSTRATION.format(command=f"verify {EXAMPLE_MODEL}"))

    from mlx_mtp import load
    from mlx_mtp.measure.verify import Verification, VerifyOptions, chosen_prompts

    llm = load(model, drafter=chosen, memory_limit=limit)
    for warning in llm.warnings:
        console.warn(warning)
    if llm.drafter is None and asked:
        raise _nothing_drafts()
    options = VerifyOptions(
        rows=many,
        depths=() if llm.drafter is None else preset.depths if asked is None else asked,
        temperatures=_temperatures(llm, temperature),
        max_tokens=params.max_tokens or 1,
        positions=preset.positions,
    )
    source = own_prompts or built_in(llm.model_name, llm.path)
    texts = chosen_prompts(source, preset.prompts) if own_prompts is None else source.prompts
    work = Verification(llm, texts, options)
    interrupted = _run(console, work)
    report = _report(work, source.source, interrupted)
    _show(report, as_json=as_json, console=console)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.has_faults:
        raise typer.Exit(VerificationError.exit_code)


def _nothing_drafts() -> UsageError:
    return UsageError(
        "There is no drafter for these depths.", "Name one with --drafter, or leave --depths out."
    )


def _temperatures(llm: LLM, asked: float | None) -> tuple[float, ...]:
    """Greedy and the model's own, once if they are the same."""
    if asked is not None:
        return (asked,)
    return tuple(dict.fromkeys((0.0, float(llm.defaults.temperature))))


def _run(console: Console, work: Verification) -> bool:
    """Run the plan; whether it was interrupted."""
    from mlx_mtp.cli.verify_screen import verify_progress

    try:
        with verify_progress(console.terminal, work.total) as show:
            for step in work.steps():
                show(step)
    except KeyboardInterrupt:
        return True
    return False


def _report(work: Verification, source: str, interrupted: bool) -> VerifyReport:
    from mlx_mtp.measure.machine import this_machine
    from mlx_mtp.measure.report import Subject
    from mlx_mtp.measure.verify_report import VerifyReport
    from mlx_mtp.versions import versions

    return VerifyReport(
        subject=Subject.of(work.llm),
        machine=this_machine(),
        versions=versions() | {"python": platform.python_version()},
        options=work.options,
        prompts=work.prompts,
        source=source,
        probed=tuple(work.probed),
        noise=work.noise,
        compared=tuple(work.compared),
        seconds=work.seconds,
        interrupted=interrupted,
    )


def _show(report: VerifyReport, *, as_json: bool, console: Console) -> None:
    """Everything on stdout; the JSON document comes last, and not on a terminal."""
    if not as_json:
        from mlx_mtp.cli.verify_screen import report_text

        typer.echo(report_text(report))
    for warning in report.warnings():
        console.warn(warning)
    if as_json or not sys.stdout.isatty():
        typer.echo(json.dumps(report.document()))
    else:
        console.note("  the same and more as JSON: --json, or the last line in a pipe")
