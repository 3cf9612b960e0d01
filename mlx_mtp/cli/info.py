"""`mlx-mtp info`: a pair, or this machine, described. Owns: its options and what it prints."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mlx_mtp.cli.console import Console
from mlx_mtp.cli.options import (
    DebugFlag,
    DrafterOption,
    JsonFlag,
    MemoryLimitOption,
    QuietFlag,
    VerboseFlag,
    console_of,
    drafter_choice,
    memory_bytes,
)
from mlx_mtp.errors import UsageError

INFO_EXAMPLES = """Examples:

\b
  mlx-mtp info
  mlx-mtp info google/gemma-4-E4B-it
  mlx-mtp info ./gemma-4-31B-it-4bit --memory-limit 24
  mlx-mtp info ./fine-tuned --drafter google/gemma-4-E4B-it-assistant
  mlx-mtp info pocket --json | jq .memory

\b
Configs and the headers of weight files are all that is read, also of a model that is only on the
hub. Where a target and a drafter do not belong together the exit code is 4.
"""


def info(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a hub id, or pocket or pocket-moe, the bundled demonstrations. "
            "[default: this machine and the models on it]",
        ),
    ] = None,
    drafter: DrafterOption = "auto",
    memory_limit: MemoryLimitOption = None,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Describe a target and its drafter, or this machine.

    Of a pair: what it holds, whether its two parts fit together, what it takes in memory. Nothing
    is loaded, and no weights are downloaded.
    """
    console = console_of(context)
    console.start_logging()
    limit = memory_bytes(memory_limit)
    if model is None:
        _check_nothing_named(context)
        _show_environment(as_json)
    else:
        _show_pair(console, model, drafter_choice(drafter), limit, as_json)


def _check_nothing_named(context: typer.Context) -> None:
    for name in ("drafter", "memory_limit"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is given without a model.", "Name one before it.")


def _show_environment(as_json: bool) -> None:
    from mlx_mtp.info.environment import read_environment

    environment = read_environment()
    if as_json:
        from mlx_mtp.info.document import environment_document

        typer.echo(json.dumps(environment_document(environment)))
    else:
        from mlx_mtp.cli.info_screen import environment_text

        typer.echo(environment_text(environment))


def _show_pair(
    console: Console, model: str, drafter: str | None, limit: int | None, as_json: bool
) -> None:
    from mlx_mtp.info.pair import read_pair

    pair = read_pair(model, drafter, limit)
    if as_json:
        from mlx_mtp.info.document import pair_document

        typer.echo(json.dumps(pair_document(pair)))
    else:
        from mlx_mtp.cli.info_screen import pair_text

        typer.echo(pair_text(pair))
    for warning in pair.warnings:
        console.warn(warning)
    for problem in pair.problems:
        console.error(problem.message, problem.hint)
    if pair.problems:
        raise typer.Exit(pair.problems[0].exit_code)
