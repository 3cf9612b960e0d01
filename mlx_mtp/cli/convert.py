"""`mlx-mtp convert`: a target and its drafter as an MLX pair. Owns: its options and its report."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlx_mtp.cli.console import Console
from mlx_mtp.cli.options import (
    DebugFlag,
    JsonFlag,
    QuietFlag,
    VerboseFlag,
    console_of,
    drafter_choice,
)
from mlx_mtp.config_json import QUANTIZATION_MODES

if TYPE_CHECKING:
    from mlx_mtp.convert import ConvertReport, PartReport

Bits = Literal["2", "3", "4", "5", "6", "8", "none"]

CONVERT_EXAMPLES = """Examples:

\b
  mlx-mtp convert google/gemma-4-E4B-it -o gemma-4-E4B-it-4bit
  mlx-mtp convert google/gemma-4-12B-it -o out --bits 8 --drafter-bits 4
  mlx-mtp convert ./fine-tuned -o out --drafter google/gemma-4-E4B-it-assistant
  mlx-mtp convert pocket -o pocket-8bit --bits 8
"""


def convert(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A folder, a hub id, or pocket or pocket-moe, the bundled demonstrations.",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="OUT", help="The pair's folder; it must not exist yet."
        ),
    ],
    drafter: Annotated[
        str,
        typer.Option(
            metavar="auto|PATH|none",
            help="The drafter: auto looks for the target's own, none leaves it out.",
        ),
    ] = "auto",
    bits: Annotated[
        Bits | None,
        typer.Option(
            help="Bits per weight of the target; none keeps the weights. "
            "[default: 4, or what --mode demands]"
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Weights that share a scale: 32, 64 or 128; other modes than affine have one "
            "size each. [default: 64, or what --mode demands]",
        ),
    ] = None,
    mode: Annotated[
        Literal["affine", "mxfp4", "nvfp4", "mxfp8"],
        typer.Option(help="How weights are quantized."),
    ] = "affine",
    drafter_bits: Annotated[
        Bits | None,
        typer.Option(help="Bits per weight of the drafter. [default: as the target]"),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Type of what is not quantized. [default: as stored]"),
    ] = None,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Convert a target and its drafter to an MLX pair.

    OUT becomes the target as mlx-lm loads it, OUT/drafter the drafter.
    """
    console = console_of(context)
    console.start_logging()

    from mlx_mtp.convert import UNQUANTIZED
    from mlx_mtp.convert import convert as convert_pair

    report = convert_pair(
        target,
        output,
        drafter=drafter_choice(drafter),
        bits=_target_bits(bits, mode),
        group_size=group_size,
        mode=mode,
        drafter_bits=UNQUANTIZED if drafter_bits == "none" else drafter_bits and int(drafter_bits),
        dtype=dtype,
    )
    for warning in report.warnings:
        console.warn(warning)
    if as_json:
        typer.echo(json.dumps(_document(report), ensure_ascii=False))
    else:
        _tell(console, report)


def _target_bits(bits: Bits | None, mode: str) -> int | None:
    if bits is None:
        modes = QUANTIZATION_MODES[mode]
        return 4 if 4 in modes else next(iter(modes))
    return None if bits == "none" else int(bits)


def _document(report: ConvertReport) -> dict[str, Any]:
    return {
        "out": str(report.out),
        "target": report.target._asdict(),
        "drafter": None if report.drafter is None else report.drafter._asdict(),
        "warnings": list(report.warnings),
    }


def _tell(console: Console, report: ConvertReport) -> None:
    console.note(_part_line("target", report.target))
    if report.drafter is not None:
        console.note(_part_line("drafter", report.drafter))
    for part in (report.target, report.drafter):
        reasons = Counter([] if part is None else part.unquantized.values())
        for reason, count in reasons.items():
            matrices = "1 matrix stays" if count == 1 else f"{count} matrices stay"
            console.note(f"  {matrices} unquantized: {reason}")
    console.note(f'  next: mlx-mtp chat {shlex.quote(str(report.out))} -p "Hello"')


def _part_line(name: str, part: PartReport) -> str:
    """For example ``  target   9.2 GB → 2.6 GB  4 bit affine, groups of 64, the rest bfloat16``."""
    sizes = f"{_size(part.source_bytes)} → {_size(part.bytes)}"
    how = part.dtype
    if part.quantization is not None:
        bits, group = part.quantization["bits"], part.quantization["group_size"]
        mode = part.quantization["mode"]
        how = f"{bits} bit {mode}, groups of {group}, the rest {part.dtype}"
    return f"  {name:7}  {sizes}  {how}"


def _size(count: int) -> str:
    """Decimal units, as file managers and the hub count."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
