"""Options that several commands share. Owns: their names, help and translation into values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import typer

from mlx_mtp.cli.console import Console
from mlx_mtp.errors import UsageError
from mlx_mtp.types import EXACT_DEPTH, MAX_DEPTH, MAX_ROWS

DEFAULT_MODEL = "pocket"
EXAMPLE_MODEL = "google/gemma-4-E4B-it"
DEMONSTRATION = (
    "note: no model was named, so the bundled demonstration model answers; name a real one: "
    "mlx-mtp {command}"
)
NO_DRAFTER = "none"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
MODELS_OWN = "[default: the model's own]"


def console_of(context: typer.Context) -> Console:
    """The console that `main` made for this run."""
    console = context.find_root().obj
    assert isinstance(console, Console)
    return console


def _raise_flag(name: str) -> Callable[[typer.Context, bool], bool]:
    # The flags stand before the command as well as behind it; either place turns them on.
    def turn_on(context: typer.Context, value: bool) -> bool:
        if value:
            setattr(console_of(context), name, True)
        return value

    return turn_on


VerboseFlag = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show the log.", callback=_raise_flag("verbose")),
]
QuietFlag = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show errors only.", callback=_raise_flag("quiet")),
]
DebugFlag = Annotated[
    bool,
    typer.Option("--debug", help="Show tracebacks and all logs.", callback=_raise_flag("debug")),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        envvar="MLX_MTP_MODEL",
        help="A folder, a hub id, or pocket or pocket-moe, the bundled demonstrations. "
        "[default: pocket]",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        envvar="MLX_MTP_MODEL",
        help="A folder, a hub id, or pocket or pocket-moe, the bundled demonstrations. "
        "[default: pocket]",
    ),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        metavar="auto|PATH|none",
        envvar="MLX_MTP_DRAFTER",
        help="The drafter: auto looks for the model's own, none decodes plainly.",
    ),
]
DepthOption = Annotated[
    str,
    typer.Option(
        metavar="auto|N",
        help=f"Tokens drafted per round, 0 to {MAX_DEPTH}; auto lets the program choose.",
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Most tokens to produce, from 1. [default: the context's rest]"),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(metavar="T", help=f"Randomness, from 0, which is none. {MODELS_OWN}"),
]
TopKOption = Annotated[
    int | None,
    typer.Option(metavar="K", help=f"Keep the K likeliest tokens; 0 keeps all. {MODELS_OWN}"),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        metavar="P", help=f"Keep the likeliest tokens up to probability P, in (0, 1]. {MODELS_OWN}"
    ),
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Keep tokens at least P times as likely as the likeliest, in [0, 1]. [default: 0]",
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="End the answer before this text; may be repeated. [default: none]"
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(metavar="S", help="Seed of the sampling, 0 to 4294967295. [default: drawn]"),
]
MemoryLimitOption = Annotated[
    float | None,
    typer.Option(
        metavar="GB",
        help="Memory for weights and rows. [default: what the GPU recommends, or all RAM]",
    ),
]
ExactFlag = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Run kernels of the same shapes with and without drafts, so that a GPU rounds alike; "
        f"slower, depth up to {EXACT_DEPTH}. `mlx-mtp verify` says what it costs.",
    ),
]
SystemOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System prompt. [default: none]")
]


def drafter_choice(value: str) -> str | None:
    """``none`` is no drafter; anything else is passed on. Raises UsageError: nothing is named."""
    if not value.strip():
        raise UsageError("No drafter is named.", "Give auto, none, a folder or a hub id.")
    return None if value == NO_DRAFTER else value


def memory_bytes(limit: float | None) -> int | None:
    """A limit in GB as bytes. Raises UsageError."""
    if limit is None:
        return None
    if not 0 < limit < 1e9:
        raise UsageError(f"The memory limit is {limit:g} GB.", "Give a positive number.")
    return int(limit * 1e9)


def depth_choice(value: str, *, exact: bool = False) -> int | Literal["auto"]:
    """``auto`` or a whole number of drafts per round. Raises UsageError."""
    most, where = (EXACT_DEPTH, " with --exact") if exact else (MAX_DEPTH, "")
    if value == "auto":
        return "auto"
    if _is_number(value) and int(value) <= most:
        return int(value)
    raise UsageError(
        f"The draft depth is {value!r}.", f"Give auto or a whole number from 0 to {most}{where}."
    )


def depth_choices(text: str) -> tuple[int | Literal["auto"], ...]:
    """``0,2,auto`` as depths. Raises UsageError."""
    return tuple(dict.fromkeys(depth_choice(part.strip()) for part in text.split(",")))


def row_counts(text: str) -> tuple[int, ...]:
    """``1,4`` as numbers of rows, ascending. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(_is_number(part) and 1 <= int(part) <= MAX_ROWS for part in parts):
        raise UsageError(
            f"The rows are {text!r}.",
            f"Give whole numbers from 1 to {MAX_ROWS} with commas between them.",
        )
    return tuple(sorted({int(part) for part in parts}))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
