"""Paths as they are typed. Owns: what is meant by one, and reading a text from it with distrust."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from mlx_mtp.errors import UsageError


def typed_path(text: str) -> Path:
    """The path that somebody typed, or dropped on the terminal, which puts it between quotation
    marks or backslashes before its blanks. Raises UsageError: it can be none."""
    if "\0" in text:
        raise UsageError(f"{text!r} is no path.", "Name a file.")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    elif "\\" in text and not os.path.lexists(text):
        text = _unescaped(text)
    return expanded(text)


def expanded(name: str) -> Path:
    """The path that a user names. Raises UsageError: ~ stands for no known user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{name} names no user's folder.", "Write the path out.") from error


def read_bytes(path: Path, most: int) -> bytes:
    """What a file holds. Raises UsageError: it is no file, cannot be read or is larger than
    `most` bytes."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # of a pipe or a device there may be no end
                raise UsageError(f"{path} is not a regular file.", "Name another.")
            if status.st_size > most:
                raise UsageError(
                    f"{path} has {status.st_size:,} bytes; the most is {most:,}.", "Name another."
                )
            return file.read(most)
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a folder.", "Name a file in it.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "Name another.") from error


def _unescaped(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError:
        return text
    return words[0] if len(words) == 1 else text


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
