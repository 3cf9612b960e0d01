"""`mlx-mtp convert`: a target and its drafter as an MLX pair. Owns: its options."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

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
from mlx_mtp.errors import UsageError
from mlx_mtp.plain import json_line, printable

Bits = Literal["2", "3", "4", "5", "6", "8", "none"]
HeadBits = Literal["2", "3", "4", "5", "6", "8", "bf16"]
Recipe = Literal["mtp-4bit", "uniform", "mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

CONVERT_EXAMPLES = """Examples:

\b
  mlx-mtp convert google/gemma-4-E4B-it -o gemma-4-E4B-it-4bit
  mlx-mtp convert google/gemma-4-31B-it -o out --dry-run
  mlx-mtp convert google/gemma-4-12B-it -o out --bits 8 --drafter-bits 4
  mlx-mtp convert google/gemma-4-E4B-it -o out --keep '*.v_proj=8' --drafter-head bf16
  mlx-mtp convert ./fine-tuned -o out --drafter google/gemma-4-E4B-it-assistant
  mlx-mtp convert ./gemma-4-E4B-it-4bit -o out --dequantize
  mlx-mtp convert pocket -o pocket-8bit --bits 8

\b
Recipes:
  mtp-4bit   4 bit; router and small per-layer matrices 8, tables 6; drafter 8, its head 4
  uniform    --bits for all, but 8 for the router: what mlx-lm does by itself
  mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6   mlx-lm's own: low and high bits
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
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="REV", help="Branch, tag or commit of the target. [default: the hub's newest]"
        ),
    ] = None,
    recipe: Annotated[
        Recipe | None,
        typer.Option(
            help="Which matrices get which bits. [default: mtp-4bit, uniform with --bits]"
        ),
    ] = None,
    bits: Annotated[
        Bits | None,
        typer.Option(
            help="Bits per weight of a uniform recipe; none keeps the weights. "
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
        typer.Option(help="Bits per weight of the drafter. [default: the recipe's]"),
    ] = None,
    drafter_head: Annotated[
        HeadBits | None,
        typer.Option(
            help="Bits of the drafter's tied head; bf16 leaves it as it is. "
            "[default: --drafter-bits, or the recipe's]"
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=BITS",
            help="Other bits, or bf16, for matrices by name, such as '*.v_proj=8'; drafter.PATTERN "
            "is for the drafter; may be repeated. [default: none]",
        ),
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Turn quantized weights back into bfloat16.")
    ] = False,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Type of what is not quantized. [default: as stored]"),
    ] = None,
    towers: Annotated[
        Literal["drop", "keep"],
        typer.Option(help="Vision and audio: keep writes them for programs that can run them."),
    ] = "drop",
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Most bytes in one weight file.")
    ] = "5GB",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would do and take; write nothing.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not check what was written.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier conversion at OUT, at the end.")
    ] = False,
    low_disk: Annotated[
        bool, typer.Option("--low-disk", help="Remove each downloaded weight file after use.")
    ] = False,
    upload: Annotated[
        str | None,
        typer.Option(
            metavar="REPO", help="Upload OUT to this hub id, private; asks first. [default: no]"
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the upload.")] = False,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Convert a target and its drafter to an MLX pair.

    OUT becomes the target as mlx-lm loads it, OUT/drafter the drafter. Models may be larger than
    memory. After an interruption the same command goes on where it was.
    """
    console = console_of(context)
    console.start_logging()
    _check_recipe(recipe, bits, dequantize)

    from mlx_mtp.cli.convert_report import (
        plan_document,
        plan_lines,
        report_document,
        report_lines,
        show_conversion,
    )
    from mlx_mtp.convert import UNQUANTIZED, Options, plan
    from mlx_mtp.convert import convert as convert_pair
    from mlx_mtp.convert.output import folder_of

    options = Options(
        recipe="dequantize" if dequantize else "as-stored" if bits == "none" else recipe,
        bits=None if bits in (None, "none") else int(bits),
        group_size=group_size,
        mode=mode,
        drafter_bits=UNQUANTIZED if drafter_bits == "none" else drafter_bits and int(drafter_bits),
        drafter_head=UNQUANTIZED if drafter_head == "bf16" else drafter_head and int(drafter_head),
        keep=tuple(keep or ()),
        dtype=dtype,
        towers=towers,
        shard_bytes=_bytes(shard_size),
    )
    choice = drafter_choice(drafter)
    if dry_run:
        planned = plan(
            target, output, options, drafter=choice, revision=revision, low_disk=low_disk
        )
        for warning in planned.warnings:
            console.warn(warning)
        out = folder_of(output)
        if as_json:
            typer.echo(json_line(plan_document(planned, out)))
        else:
            typer.echo("\n".join(map(printable, plan_lines(planned, out))))
        return
    if upload is not None:
        _confirm(upload, yes)
    try:
        with show_conversion(console) as observe:
            report = convert_pair(
                target,
                output,
                options,
                drafter=choice,
                revision=revision,
                verify=not no_verify,
                overwrite=overwrite,
                low_disk=low_disk,
                observe=observe,
            )
    except (KeyboardInterrupt, SystemExit):
        _tell_how_to_go_on(console)
        raise
    for warning in report.warnings:
        console.warn(warning)
    url = None if upload is None else _uploaded(report.out, upload)
    if as_json:
        typer.echo(json_line(report_document(report) | {"url": url}))
    else:
        for line in report_lines(report):
            console.note(line)
        if url is not None:
            console.note(f"  uploaded to {url}, private")


def _check_recipe(recipe: str | None, bits: str | None, dequantize: bool) -> None:
    if dequantize and (recipe or bits):
        raise UsageError("--dequantize quantizes nothing.", "Give it without --recipe and --bits.")
    if bits == "none" and recipe:
        raise UsageError("--bits none keeps the weights.", "Give it without --recipe.")


def _bytes(text: str) -> int:
    """``5GB``, ``500 MB`` or a number of bytes. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", text.strip(), re.IGNORECASE)
    count = int(float(found[1]) * _UNITS[(found[2] or "B").upper()]) if found else 0
    if count < 1:
        raise UsageError(f"The shard size is {text!r}.", "Give a size such as 5GB or 500MB.")
    return count


def _confirm(upload: str, yes: bool) -> None:
    """Ask, before hours of work, whether the result may leave this machine."""
    from mlx_mtp.hub_client import logged_in_name

    user = logged_in_name(upload)
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("--upload asks first, but nobody is there.", "Add --yes to upload.")
    typer.confirm(f"Upload the result to {upload} as {user}, private?", abort=True, err=True)


def _uploaded(out: Path, name: str) -> str:
    from mlx_mtp.hub_client import upload_folder

    return upload_folder(out, name)


def _tell_how_to_go_on(console: Console) -> None:
    command = shlex.join(["mlx-mtp", *console.arguments])
    console.note(
        f"  interrupted; finished weight files are kept, and the same command goes on: {command}"
    )
