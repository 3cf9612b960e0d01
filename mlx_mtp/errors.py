"""The one exception tree. Owns: what can go wrong and the exit code of each kind.

Every message is one sentence of what is wrong; ``hint`` is one sentence of what to do about it.
The command line prints both and leaves with ``exit_code``; a library user catches `MlxMtpError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MAX_NAMED = 12
"""Known names that a hint lists at most."""


class MlxMtpError(Exception):
    """Base of all errors this package raises on purpose.

    Args:
        message: one sentence of what is wrong.
        hint: one sentence of what to do; may be empty where the message says it all.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class UsageError(MlxMtpError):
    """A parameter or a prompt that cannot be served as asked."""

    exit_code = 2


class ModelNotFoundError(MlxMtpError):
    """A model or drafter that is absent, gated, incomplete or damaged on disk."""

    exit_code = 3


class IncompatibleError(MlxMtpError):
    """A checkpoint of another kind, or a target and a drafter that do not belong together."""

    exit_code = 4


class ResourceError(MlxMtpError):
    """Not enough memory or disk."""

    exit_code = 5


class VerificationError(MlxMtpError):
    """Something that was written or generated is not what it must be."""

    exit_code = 7


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: the one it begins, or the most alike."""
    names = list(known)
    begun = [one for one in names if name and one.startswith(name)]
    return next(iter(begun or get_close_matches(name, names, n=1)), None)


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """What to say about an unknown name: the nearest known one, else the known ones."""
    names = list(known)
    if near := nearest(name, names):
        return f"Did you mean {near}?"
    more = " and others" if len(names) > MAX_NAMED else ""
    return f"Known: {', '.join(names[:MAX_NAMED])}{more}."
