"""What people and files get wrong: one sentence, what to do, the right exit code, and nothing else.

The tables are in tests/bad_*.py. Each case runs the whole command line in this process.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from bad_batches import BATCHES
from bad_checkpoints import CONFIGS_AND_WEIGHTS
from bad_commands import COMMANDS, ENVIRONMENTS
from bad_jobs import JOBS
from bad_pairs import PAIRS_AND_TEMPLATES
from bad_rows import ROWS
from mistakes import Case

from mlx_mtp.cli.app import run

TABLES = (CONFIGS_AND_WEIGHTS, PAIRS_AND_TEMPLATES, COMMANDS, BATCHES, JOBS, ENVIRONMENTS)
CASES = {name: case for table in TABLES for name, case in table.items()}
SAID_BEFORE = ("note: ", "warning: ")


class Said(NamedTuple):
    code: int
    out: str
    err: list[str]


@pytest.fixture(autouse=True)
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, a user without a past, and no network."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("MLX_MTP_MODEL", "MLX_MTP_DRAFTER", "HF_TOKEN", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLX_MTP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    log = logging.getLogger("mlx_mtp")
    level, handlers = log.level, list(log.handlers)
    log.handlers.clear()
    yield here
    log.setLevel(level)
    log.handlers[:] = handlers


def say(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> Said:
    code = run(command)
    out, err = capsys.readouterr()
    return Said(code, out, err.splitlines())


def files() -> dict[str, int]:
    """What lies in the working directory."""
    return {str(path): path.lstat().st_size for path in Path().rglob("*")}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_and_nothing_is_left_behind(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case: Case = CASES[name]
    for variable, value in case.environment.items():
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    here = os.getcwd()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(case.stdin)))
    case.make()
    before = files()
    said = say(tuple(word.replace("{here}", here) for word in case.command), capsys)
    assert (said.code, said.out) == (case.code, "")
    *earlier, error, hint = said.err
    assert all(line.startswith(SAID_BEFORE) for line in earlier)
    assert re.fullmatch(pattern(f"error: {case.error}", here), error)
    assert hint == f"  {case.hint}"
    assert all(line.isprintable() for line in said.err)
    assert files() == before
    assert not Path("owned").exists()


def pattern(sentence: str, here: str) -> str:
    parts = sentence.replace("{here}", here).split("{any}")
    return ".+".join(map(re.escape, parts))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_cannot_be_served_is_named(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, warning = ROWS[name]
    Path("in.jsonl").write_bytes(line if isinstance(line, bytes) else line.encode())
    said = say(("batch", "in.jsonl", "-o", "out.jsonl", "--model", "pocket"), capsys)
    assert (said.code, said.out) == (2, "")
    assert said.err == [
        f"warning: line 1: {warning}",
        "error: 1 row of 1 cannot be served.",
        "  Mend the input, or record them as failed with --skip-invalid.",
    ]
    assert set(files()) == {"in.jsonl"}


def test_the_tables_are_whole() -> None:
    assert len(CASES) == sum(map(len, TABLES)) > 180  # no name twice
    assert len(ROWS) > 60
