"""Files that go with a message. Owns: what can be read, and how it stands in the message."""

from __future__ import annotations

import mimetypes
import re
from pathlib import Path

from mlx_mtp.chat.paths import read_bytes
from mlx_mtp.errors import UsageError

_NO_TEXT = {"image": "an image", "audio": "sound", "video": "a film"}
MOST_FILE_BYTES = 4_000_000
"""More text than any context holds."""


def as_text(path: Path) -> str:
    """A file's name and its text between fences. Raises UsageError: absent, too large, no text."""
    content = _read(path)
    longest = max(map(len, re.findall("`+", content)), default=0)
    fence = "`" * max(3, 1 + longest)
    return f"File {path.name}:\n{fence}\n{content.rstrip()}\n{fence}\n\n"


def _read(path: Path) -> str:
    kind = (mimetypes.guess_type(path.name)[0] or "").split("/")[0]
    if kind in _NO_TEXT:
        raise UsageError(
            f"{path} is {_NO_TEXT[kind]}, and only text can be read.", "Name a text file."
        )
    try:
        text = read_bytes(path, MOST_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", "Convert it first.") from error
    if "\0" in text:
        raise UsageError(f"{path} is not text.", "Name another.")
    return text.replace("\r\n", "\n").replace("\r", "\n")
