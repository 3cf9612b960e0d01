"""Inputs of a batch for tests: read twice, and what is said where they cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlx_mtp.batch.rows import BadRow, Row, RowOptions
from mlx_mtp.batch.sources import open_source
from mlx_mtp.errors import UsageError

Write = Callable[..., str]
"""``write("a.txt", b"...")`` writes a file and returns its path."""


def read(path: str, kind: str = "auto", **options: str) -> list[Row | BadRow]:
    with open_source(path, kind, RowOptions(**options)) as source:  # type: ignore[arg-type]
        found = list(source.rows())
        assert list(source.rows()) == found
    assert [row.index for row in found] == list(range(len(found)))
    return found


def prompts(rows: list[Row | BadRow]) -> list[str]:
    """Prompts of rows, errors of bad ones."""
    return [row.messages[-1]["content"] if isinstance(row, Row) else row.error for row in rows]


def refusal(path: str, kind: str = "auto", **options: str) -> str:
    with pytest.raises(UsageError) as caught:
        open_source(path, kind, RowOptions(**options))  # type: ignore[arg-type]
    assert caught.value.hint
    return str(caught.value)
