"""Text that others wrote, made fit to be shown. Owns: what is never sent to a terminal, and that no
token of the hub shows. Knows nothing of what the text is about.

Names of files, values of configs and what a model writes may hold escape sequences, which a
terminal would obey: they could rename its window, hide lines or answer questions nobody asked.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

# Beside control characters the marks that turn the direction of writing: they make a text look
# like another one. Halves of surrogate pairs cannot be written at all.
_HIDDEN = "\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[\x00-\x1f{_HIDDEN}]")
_UNPRINTABLE_LINES = re.compile(f"[\x00-\x08\x0b-\x1f{_HIDDEN}]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BEARER = re.compile(r"(Bearer\s+)[^\s'\"]+", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")
MAX_QUOTED = 100
"""Characters of a value from a file that a message shows."""
_SHORTEST = 8
"""Characters of a token; anything shorter would be found in words."""


def printable(text: str) -> str:
    """One line that a terminal can show, whatever is in it: control characters, ends of lines,
    marks of direction and halves of surrogate pairs as escapes."""
    return _UNPRINTABLE.sub(_escaped, text)


def printable_lines(text: str) -> str:
    """The same of a text that keeps its lines and tabs."""
    return _UNPRINTABLE_LINES.sub(_escaped, text)


def without_controls(text: str) -> str:
    """A model's text for a terminal: lines and tabs stay, other control characters go."""
    return _CONTROL.sub("", text)


def quoted(value: object) -> str:
    """A value as Python writes it, cut where it is long: files may hold any."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def json_line(document: Any) -> str:
    """A JSON document on one line, readable and of printable characters alone."""
    text = json.dumps(document, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def without_tokens(text: str) -> str:
    """A text in which the hub's tokens are not to be read, also where it is another program's."""
    for token in _tokens():
        for written in (token, repr(token)[1:-1], repr(token.encode(errors="replace"))[2:-1]):
            text = text.replace(written, "[token]")
    return _HUB_TOKEN.sub("[token]", _BEARER.sub(r"\1[token]", text))


def _tokens() -> set[str]:
    """Those that the hub's client would use."""
    found = [os.environ.get(name, "") for name in TOKEN_VARIABLES]
    if constants := sys.modules.get("huggingface_hub.constants"):
        with suppress(OSError, ValueError):
            found.append(Path(constants.HF_TOKEN_PATH).read_text())
    tokens = {"".join(token.splitlines()).strip() for token in found}
    return {token for token in tokens if len(token) >= _SHORTEST}


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
