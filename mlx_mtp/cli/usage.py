"""What typer says of a wrong command line, in this program's words. Owns: sentence and hint."""

from __future__ import annotations

import re

import typer

from mlx_mtp.errors import nearest

_TOKEN = re.compile(r"--(hf|hub|auth|access|api)?[-_]?(token|key)")
_TOKEN_HINT = (
    "Set HF_TOKEN or run `hf auth login`: a token on a command line is kept in the shell's history "
    "and shown to every user of this machine."
)
_INNER = (
    (re.compile(r"Value error, "), ""),
    (re.compile(r"Input should be a valid number\b.*"), "that is no number"),
    (re.compile(r"Input should be a valid integer\b.*"), "that is no whole number"),
)
"""Words of a library below typer, and ours."""


def usage_sentence(error: typer.TyperException) -> str:
    """What is wrong."""
    message = error.format_message() if _option(error) is None else error.message
    for pattern, words in _INNER:
        message = pattern.sub(words, message)
    message = message.strip().rstrip(":")
    return message if message.endswith((".", "?", "!")) else f"{message}."


def usage_hint(error: typer.TyperException) -> str:
    """What to do about it."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "mlx-mtp"
    hint = f"See `{path} --help`."
    name = _option(error)
    if name is None:
        return hint
    if _TOKEN.fullmatch(name):
        return _TOKEN_HINT
    near = nearest(name, getattr(error, "possibilities", None) or ())
    return f"Did you mean {near}? {hint}" if near else hint


def _option(error: typer.TyperException) -> str | None:
    """The unknown option that an error is about; None where it is about something else."""
    name = getattr(error, "option_name", None)
    return name if isinstance(name, str) and hasattr(error, "possibilities") else None
