"""What `mlx-mtp convert` reports, and that its pair answers. Run in this process, for speed."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_mtp.cli.app import run

SIZE = r"[\d.]+ [kMG]B"


@pytest.fixture(autouse=True)
def _restored_log() -> Iterator[None]:
    log = logging.getLogger("mlx_mtp")
    level, handlers = log.level, list(log.handlers)
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


def test_a_conversion_tells_sizes_exceptions_and_what_to_do_next(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "my pair"
    assert run(["convert", "pocket", "-o", str(out), "--bits", "8", "--group-size", "32"]) == 0
    done = capsys.readouterr()
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    how = "8 bit affine, groups of 32, the rest bfloat16"
    assert re.fullmatch(rf"  target   {SIZE} → {SIZE}  {how}", lines[0])
    assert re.fullmatch(rf"  drafter  {SIZE} → {SIZE}  {how}", lines[1])
    kept = [line for line in lines[2:-1] if re.fullmatch(r"  \d+ matri.*unquantized: .*", line)]
    assert len(kept) == len(lines) - 3 > 0
    assert lines[-1] == f"  next: mlx-mtp chat '{out}' -p \"Hello\""

    table = ["-p", "Multiplication table of 7.", "--temperature", "0", "--max-tokens", "7"]
    assert run(["chat", str(out), *table]) == 0
    done = capsys.readouterr()
    assert done.out == "7 x 1 = 7\n"
    assert " · drafts " in done.err


def test_json_says_the_same_to_programs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--bits", "none", "--drafter", "none", "--dtype", "float32", "--json"]
    assert run(["convert", "pocket", "-o", str(tmp_path / "out"), *arguments]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    found = json.loads(done.out)
    assert list(found) == ["out", "target", "drafter", "warnings"]
    assert found["out"] == str(tmp_path / "out")
    assert found["drafter"] is None
    assert found["target"]["quantization"] is None
    assert found["target"]["dtype"] == "float32"


@pytest.mark.parametrize(("mode", "bits"), [("affine", 4), ("mxfp8", 8), ("nvfp4", 4)])
def test_a_mode_chooses_its_bits_and_the_drafter_may_stay_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mode: str, bits: int
) -> None:
    arguments = ["--mode", mode, "--drafter-bits", "none", "--json"]
    assert run(["convert", "pocket", "-o", str(tmp_path / "out"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"]["quantization"]["bits"] == bits
    assert found["drafter"]["quantization"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pocket", "--bits", "5", "--mode", "mxfp4"], 2, "mxfp4 has no 5 bits."),
        (["pocket", "--bits", "none", "--group-size", "32"], 2, "A group size is given without"),
        (["nothing-here"], 3, "There is no folder nothing-here"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    assert run(["convert", *arguments, "-o", str(tmp_path / "out")]) == code
    done = capsys.readouterr()
    assert done.out == ""
    assert done.err.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert run(["convert", "pocket", "-o", str(tmp_path)]) == 2
    assert "is not empty." in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
