"""`mlx-mtp batch`: a file of prompts. Owns: its options, the two Ctrl-Cs and the summary."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlx_mtp.chat.figures import idle_drafter
from mlx_mtp.cli.console import Console
from mlx_mtp.cli.options import (
    DEFAULT_MODEL,
    DEMONSTRATION,
    EXAMPLE_MODEL,
    INTERRUPTED,
    DebugFlag,
    DepthOption,
    DrafterOption,
    ExactFlag,
    JsonFlag,
    MaxTokensOption,
    MemoryLimitOption,
    MinPOption,
    ModelOption,
    QuietFlag,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    VerboseFlag,
    console_of,
    depth_choice,
    drafter_choice,
    memory_bytes,
)
from mlx_mtp.cli.progress import duration, savings, show_progress
from mlx_mtp.errors import UsageError
from mlx_mtp.plain import json_line
from mlx_mtp.types import MAX_ROWS, RunStats, SamplingParams

if TYPE_CHECKING:
    from mlx_mtp.batch.runner import Batch
    from mlx_mtp.batch.types import Problems, Summary

SOME_ROWS_FAILED = 6

BATCH_EXAMPLES = """Examples:

\b
  mlx-mtp batch prompts.jsonl -o answers.jsonl --model google/gemma-4-E4B-it
  mlx-mtp batch reviews.csv -o labels.csv --prompt "Positive or negative? {review}"
  mlx-mtp batch notes/ -o summaries.jsonl --prompt "Summarise: {text}" --max-tokens 200
  seq 5 | sed 's/.*/Multiplication table of &./' | mlx-mtp batch - -o tables.jsonl

\b
Input: JSONL of {"id", "prompt" or "messages", settings}, OpenAI's batch format, CSV with a header,
plain lines, or a folder of .txt and .md files. Finished rows are kept in OUTPUT.journal: the same
command goes on where it was stopped, and does again only what has changed.
"""


def batch(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="A file, a folder, or - for stdin.")
    ],
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="OUTPUT", help="The file of answers; replaced."),
    ],
    model: ModelOption = None,
    drafter: DrafterOption = "auto",
    draft_depth: DepthOption = "auto",
    batch_size: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help=f"Rows that decode together, 1 to {MAX_ROWS}; auto takes what memory allows.",
        ),
    ] = "auto",
    memory_limit: MemoryLimitOption = None,
    input_format: Annotated[
        Literal["auto", "jsonl", "csv", "lines", "folder"],
        typer.Option(help="How INPUT is written; auto goes by its name and first byte."),
    ] = "auto",
    format: Annotated[
        Literal["simple", "openai", "csv"] | None,
        typer.Option(
            help="How OUTPUT is written. [default: csv if it is named so, openai if INPUT is "
            "OpenAI's, else simple]"
        ),
    ] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Write rows in INPUT's order, not as they finished.")
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEMPLATE",
            help="A prompt with {column}, {text} or {name} in it. [default: the row's own]",
        ),
    ] = None,
    prompt_column: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The CSV column to ask. [default: prompt or text]"),
    ] = None,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    stop: StopOption = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="S", help="Gives each row a seed made of S and its id. [default: drawn]"
        ),
    ] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Let the model think first, if it can.")
    ] = False,
    exact: ExactFlag = False,
    skip_invalid: Annotated[
        bool,
        typer.Option("--skip-invalid", help="Record broken rows as failed instead of stopping."),
    ] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Do rows again that failed in an earlier run.")
    ] = False,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Answer a file of prompts, several at a time.

    A row's own settings win over the options. Ctrl-C finishes the rows in flight, a second one
    stops at once; the same command goes on.
    """
    console = console_of(context)
    console.start_logging()
    depth, size, target = (
        depth_choice(draft_depth, exact=exact),
        _batch_size(batch_size),
        _output(output),
    )
    limit = memory_bytes(memory_limit)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=tuple(stop or ()),
    )

    from mlx_mtp.batch.rows import RowOptions
    from mlx_mtp.batch.runner import Batch
    from mlx_mtp.batch.types import BatchOptions

    options = BatchOptions(
        rows=RowOptions(params, seed, system, prompt, prompt_column),
        kind=input_format,
        format=format,
        ordered=ordered,
        skip_invalid=skip_invalid,
        retry_errors=retry_errors,
        thinking=thinking,
        exact=exact,
        batch_size=size,
        draft_depth=depth,
    )
    if source == "-" and sys.stdin.isatty():
        console.note("reading one prompt per line; Ctrl-D ends them")
    with Batch(source, target, options) as work:
        _survey(console, work)
        if not model:
            model = DEFAULT_MODEL
            console.note(DEMONSTRATION.format(command=f"batch ... --model {EXAMPLE_MODEL}"))

        from mlx_mtp.hub import resolve

        left = work.use(resolve(model))
        for note in work.notes:
            console.note(f"note: {note}")
        run, idle = RunStats(), None
        if left:
            from mlx_mtp import load

            llm = load(model, drafter=drafter_choice(drafter), memory_limit=limit, exact=exact)
            run = llm.run_stats
            for warning in llm.warnings:
                console.warn(warning)
            with _interruptible(console, work), show_progress(console, work, run, left):
                work.run(llm)
            must_draft = llm.drafter is not None and depth != 0 and not llm.parked
            idle = idle_drafter(run, must_draft=must_draft)
        _warn(console, work.failures, "failed")
        summary = work.summary()
        if not summary.interrupted:
            work.write()
    if as_json:
        document: dict[str, Any] = {
            **asdict(summary),
            "output": output,
            "run": asdict(run),
            "model": work.model_name,
            "drafter": work.drafter_name,
            "exact": exact,
        }
        typer.echo(json_line(document))
    _tell(console, summary, run, output)
    if idle:
        console.warn(idle)
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)
    if summary.failed:
        raise typer.Exit(SOME_ROWS_FAILED)


def _batch_size(value: str) -> int | Literal["auto"]:
    """``auto`` or a number of rows. Raises UsageError."""
    if value == "auto":
        return "auto"
    if value.isascii() and value.isdigit() and 1 <= int(value) <= MAX_ROWS:
        return int(value)
    raise UsageError(
        f"The batch size is {value!r}.", f"Give auto or a whole number from 1 to {MAX_ROWS}."
    )


def _survey(console: Console, work: Batch) -> None:
    """Read all rows once, naming what is broken."""
    try:
        work.survey()
    finally:
        _warn(console, work.broken, "broken")


def _warn(console: Console, problems: Problems, kind: str) -> None:
    for problem in problems.shown:
        console.warn(f"{problem.place}: {problem.error}")
    if more := problems.count - len(problems.shown):
        console.warn(f"and {more} more {kind} row{'s' if more > 1 else ''}.")


def _output(value: str) -> Path:
    """OUTPUT as a path. Raises UsageError where it is not meant as a file."""
    if value in ("", "-") or value.endswith(os.sep):
        raise UsageError(
            f"The output {value!r} is no file.", "Name one; finished rows are kept beside it."
        )
    return Path(value)


@contextmanager
def _interruptible(console: Console, work: Batch) -> Iterator[None]:
    """Within it the first Ctrl-C lets the rows in flight finish and the second one raises
    KeyboardInterrupt."""

    before = signal.getsignal(signal.SIGINT)

    def finish(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        work.stop()
        console.note("finishing the rows in flight; Ctrl-C again stops now")

    if before is not signal.SIG_IGN:  # as for a job that a script has put in the background
        signal.signal(signal.SIGINT, finish)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        console.note(_resume_hint())
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _resume_hint() -> str:
    return f"  go on with: mlx-mtp {shlex.join(sys.argv[1:])}"


def _tell(console: Console, summary: Summary, run: RunStats, output: str) -> None:
    """For example ``300 rows · 2 failed · 41 s · 812 tok/s · 3.6 tok/forward · drafts 71 %``."""
    parts = [f"{summary.done + summary.failed} of {summary.rows} rows"]
    if summary.reused:
        parts.append(f"{summary.reused} from an earlier run")
    if summary.failed:
        parts.append(f"{summary.failed} failed")
    if summary.tokens and summary.seconds > 0:
        parts.append(f"{duration(summary.seconds)}")
        parts.append(f"{summary.tokens / summary.seconds:.1f} tok/s")
    console.note("  " + " · ".join(parts))
    saved = savings(run)
    console.note(f"  {summary.mode}" + (f"; {saved}" if saved else ""))
    if summary.interrupted:
        console.note(_resume_hint())
    else:
        console.note(f"  wrote {output}")
