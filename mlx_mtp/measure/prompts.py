"""What a model is measured on. Owns: the built-in prompts, files of prompts, and how many of them
a number of rows needs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from mlx_mtp.errors import UsageError
from mlx_mtp.files import read_optional_json
from mlx_mtp.hub import BUNDLED

BUILT_IN = 10
"""Built-in prompts that are used with few rows; more rows take more of them."""
FILLS = 2
"""Prompts per row, so that all rows are taken most of the time."""
NO_KIND = "prompts"
"""The kind of prompts that name none."""
_KEYS = ("prompt", "kind")


class BenchPrompt(NamedTuple):
    """One user message and the kind of text that it asks for."""

    kind: str
    text: str


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order in which they are asked.

    Attributes:
        prompts: at least one.
        at_least: how many are asked with few rows.
        source: "general", "pocket" or the file's name.
    """

    prompts: tuple[BenchPrompt, ...]
    at_least: int
    source: str

    def for_rows(self, rows: int) -> list[BenchPrompt]:
        """Those to ask with this many rows; where there are too few, again from the first."""
        count = max(self.at_least, FILLS * rows)
        return [self.prompts[place % len(self.prompts)] for place in range(count)]


def built_in(model_name: str, path: Path) -> PromptSet:
    """The prompts for a model: the bundled pairs, converted ones too, have their own, which no
    training text of theirs holds.

    Args:
        model_name, path: of the target, as `LLM` has them.
    """
    origin = (read_optional_json(path / "mlx_mtp.json") or {}).get("target")
    source = origin.get("source") if isinstance(origin, dict) else None
    name = "pocket" if model_name in BUNDLED or source in BUNDLED else "general"
    text = files("mlx_mtp.measure").joinpath(f"{name}.jsonl").read_text(encoding="utf-8")
    return PromptSet(_parse(text.splitlines(), name), BUILT_IN, name)


def read_prompts(path: Path) -> PromptSet:
    """The prompts of a file: one per line, or JSONL of {"prompt", "kind"} where its first line
    begins with a brace.

    Raises:
        UsageError: not readable, without prompts, or a line that is none.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", "Convert it first.") from error
    prompts = _parse(text.splitlines(), path.name)
    if not prompts:
        raise UsageError(f"{path} has no prompts.", "Write one per line.")
    return PromptSet(prompts, len(prompts), path.name)


def _parse(lines: Sequence[str], name: str) -> tuple[BenchPrompt, ...]:
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered or not numbered[0][1].lstrip().startswith("{"):
        return tuple(BenchPrompt(NO_KIND, line.strip()) for _, line in numbered)
    return tuple(_from_json(line, f"{name}, line {number}") for number, line in numbered)


def _from_json(line: str, place: str) -> BenchPrompt:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place} is not JSON.", 'Write {"prompt": "..."}.') from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise UsageError(f"{place} has no prompt.", 'Write {"prompt": "..."}.')
    if unknown := sorted(row.keys() - set(_KEYS)):
        raise UsageError(
            f"{place} has the key {unknown[0]!r}, which is not measured.",
            "Give prompt and kind only.",
        )
    kind = row.get("kind", NO_KIND)
    if not isinstance(kind, str) or not kind.strip():
        raise UsageError(f"{place} has a kind that is no text.", "Give a word, or leave it out.")
    if not row["prompt"].strip():
        raise UsageError(f"{place} has an empty prompt.", "Write one, or leave the line out.")
    return BenchPrompt(kind.strip(), row["prompt"])
