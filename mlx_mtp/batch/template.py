"""Prompt templates. Owns: ``{field}`` placeholders over a record's fields, and what to say about a
name that is not known. Knows nothing of rows or files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_mtp.errors import UsageError, nearest_hint

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True)
class Template:
    """A prompt with ``{field}`` placeholders; ``{{`` and ``}}`` are braces. Names are plain keys:
    neither attributes nor indices can be reached.

    Attributes:
        parts: literal text and names of fields in turns, text first and last.
    """

    parts: tuple[str, ...]

    def check(self, known: Iterable[str]) -> None:
        """Raise UsageError for a placeholder that is not one of the known fields."""
        names = list(known)
        for name in self.parts[1::2]:
            if name not in names:
                raise UsageError(
                    f"The template's {{{name}}} is not a field.", nearest_hint(name, names)
                )

    def fill(self, record: Mapping[str, Any]) -> str:
        """The prompt of a record. Raises UsageError: an unknown field, one that is not text."""
        self.check(record)
        pieces = list(self.parts)
        pieces[1::2] = (_field_text(name, record[name]) for name in self.parts[1::2])
        return "".join(pieces)


@lru_cache(maxsize=8)
def parse_template(text: str) -> Template:
    """Raises UsageError for a lone brace and for a placeholder without a name."""
    parts, literal, end = [], "", 0
    for found in _BRACES.finditer(text):
        literal += text[end : found.start()]
        end = found.end()
        if found[0] in ("{{", "}}"):
            literal += found[0][0]
        elif found[1]:
            parts += [literal, found[1]]
            literal = ""
        else:
            what = "no name in {}" if found[0] == "{}" else f"a lone {found[0]}"
            raise UsageError(
                f"The template has {what} at character {found.start() + 1}.",
                "Write {name} for a field and {{ or }} for a brace.",
            )
    return Template((*parts, literal + text[end:]))


def _field_text(name: str, value: Any) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_number or (isinstance(value, float) and math.isfinite(value))
    if not isinstance(value, str) and not is_number:
        raise UsageError(
            f"The field {name!r} is neither text nor a number.", "Leave it out of the template."
        )
    return str(value)
