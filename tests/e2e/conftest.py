"""`mlx-mtp batch` in this process: each start of the program takes seconds to import."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

import pytest
from batches import Done

from mlx_mtp.cli.app import run


class BatchCommand(Protocol):
    def __call__(self, *arguments: object, model: str | None = "pocket") -> Done:
        """Run `mlx-mtp batch`."""


@pytest.fixture
def batch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[BatchCommand]:
    for name in ("MLX_MTP_MODEL", "MLX_MTP_DRAFTER"):
        monkeypatch.delenv(name, raising=False)
    log = logging.getLogger("mlx_mtp")
    level, handlers = log.level, list(log.handlers)

    def call(*arguments: object, model: str | None = "pocket") -> Done:
        named = [] if model is None else ["--model", model]
        code = run(["batch", *map(str, arguments), *named])
        return Done(code, *capsys.readouterr())

    yield call
    log.setLevel(level)
    log.handlers[:] = handlers
