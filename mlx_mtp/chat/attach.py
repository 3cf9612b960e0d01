"""Files that go with a message. Owns: what can be read, and how it stands in the message."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from mlx_mtp.errors import UsageError

_NO_TEXT = {"image": "an image", "audio": "sound", "video": "a film"}
MOST_FILE_BYTES = 4_000_000
"""More text than any context holds."""


def as_text(path: Path) -> str:
    """A file's name and its text between fences. Raises UsageError: absent, too large, no text."""
    content = _read(path)
    fence = "`" * max(3, 1 + _longest_run(content))
    return f"File {path.name}:\n{fence}\n{content.rstrip()}\n{fence}\n\n"


def _read(path: Path) -> str:
    kind = (mimetypes.guess_type(path.name)[0] or "").split("/")[0]
    if kind in _NO_TEXT:
        raise UsageError(
            f"{path} is {_NO_TEXT[kind]}, and only text can be read.", "Name a text file."
        )
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file.", "Name a text file.")
        if path.stat().st_size > MOST_FILE_BYTES:
            raise UsageError(f"{path} is larger than any context.", "Take a part of it.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", "Convert it first.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "Name another.") from error


def _longest_run(text: str) -> int:
    """Most backticks in a row."""
    longest = run = 0
    for letter in text:
        run = run + 1 if letter == "`" else 0
        longest = max(longest, run)
    return longest
