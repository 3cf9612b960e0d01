"""Journals for tests: filled in this process, or worked on by one of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_mtp.batch.journal import Journal

HEADER = b'{"mlx_mtp_journal": 1}\n'
OK: dict[str, Any] = {"text": "fine", "error": None}
BAD: dict[str, Any] = {"text": "", "error": {"message": "too long"}}

_NAMES = """
import os, resource, signal, sys
from pathlib import Path
from mlx_mtp.batch.index import Index
from mlx_mtp.batch.journal import Journal
"""


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that runs a script with the journal's names imported."""
    command = [sys.executable, "-c", _NAMES + script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def output_of(script: str, *arguments: object) -> list[str]:
    """The lines that such a process writes."""
    with run(script, *arguments) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.splitlines()


def fill(
    output: Path, rows: Iterable[tuple[str, dict[str, Any]]], end: str | None = "done"
) -> None:
    """Make a journal of one run, with `rows` of (key, record)."""
    with Journal.open(output) as journal:
        journal.begin(rows=8)
        for key, record in rows:
            journal.append(key, record)
        if end:
            journal.end(end)  # type: ignore[arg-type]


def keys(output: Path) -> list[str]:
    """The keys of a journal in its order."""
    with Journal.open(output) as journal:
        return [row.key for row in journal.finished()]
