"""Odd environments: folders that cannot be used, closed streams, other locales. What can be done
without them is done."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_mtp.chat.store import Saved, Store
from mlx_mtp.cli.app import run
from mlx_mtp.errors import ResourceError

PROGRAM = str(Path(sys.executable).with_name("mlx-mtp"))
ASK = ["chat", "pocket", "-p", "Spell banana.", "--temperature", "0"]


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    log = logging.getLogger("mlx_mtp")
    level, handlers = log.level, list(log.handlers)
    log.handlers.clear()
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture(params=["a file", "nobody's", "no place"])
def odd_folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "file").write_text("x")
    places = {"a file": tmp_path / "file", "nobody's": "~nobody-at-all/x", "no place": "/proc/x"}
    return str(places[request.param])


def test_a_cache_that_cannot_be_written_costs_no_answer(
    odd_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_MTP_CACHE", odd_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    assert run(ASK) == 0
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("b-a-n-a-n-a\n", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("odd_folder", ["a file", "no place"], indirect=True)
def test_a_home_that_cannot_be_written_holds_no_conversations(
    odd_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_MTP_HOME", odd_folder)
    assert run(["chat", "--list"]) == 0
    assert capsys.readouterr() == ("", "There is no conversation yet.\n")
    with pytest.raises(ResourceError, match="cannot be written") as caught:
        Store().save(Saved("a", "m", [{"role": "user", "content": "x"}]))
    assert "MLX_MTP_HOME" in caught.value.hint


@pytest.mark.parametrize("no_color", ["", "1"])
def test_errors_are_coloured_on_terminals_that_want_it(
    no_color: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    assert run(["cht"]) == 2
    assert ("\x1b" in stream.getvalue()) == (not no_color)


def test_closed_streams_and_other_locales_change_no_exit_code() -> None:
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "HF_HUB_OFFLINE": "1"}
    script = """
        "$0" --version >&-; echo $?
        "$0" cht <&- 2>&-; echo $?
        "$0" chat "$(printf 'n\\303\\266\\377where')" -p "$(printf '\\303\\266')"; echo $?
    """
    done = subprocess.run(
        ["sh", "-c", script, PROGRAM],
        capture_output=True,
        env={**os.environ, **plain},
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [b"0", b"2", b"3"]
    assert done.stderr.decode("ascii").startswith("error: There is no folder n")
    assert len(done.stderr.splitlines()) == 2
