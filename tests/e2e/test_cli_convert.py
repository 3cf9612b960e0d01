"""What `mlx-mtp convert` reports, and that its pair answers. Run in this process, for speed."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from mlx_mtp.cli.app import run
from mlx_mtp.cli.console import Console
from mlx_mtp.cli.convert_report import progress_line, show_conversion
from mlx_mtp.convert import Progress
from mlx_mtp.convert.writer import PartWriter
from mlx_mtp.errors import VerificationError

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
    kept = [line for line in lines[2:-2] if re.fullmatch(r"  \d+ matri.*unquantized: .*", line)]
    assert len(kept) == len(lines) - 4 > 0
    assert re.fullmatch(
        r"  checked  \d+ tensors against their source, relative error up to 0\.\d+, decoded "
        r"\d+ tokens, the same without drafts, drafts \d+ %",
        lines[-2],
    )
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
    assert list(found) == [
        *("out", "recipe", "target", "drafter", "check", "seconds", "bytes_resumed"),
        *("peak_bytes", "was_done", "warnings", "url"),
    ]
    assert found["out"] == str(tmp_path / "out")
    assert found["drafter"] is None
    assert found["target"]["quantization"] is None
    assert found["target"]["dtype"] == "float32"


@pytest.mark.parametrize(("mode", "bits"), [("affine", 4), ("mxfp8", 8), ("nvfp4", 4)])
def test_a_mode_chooses_its_bits_and_the_drafter_may_stay_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mode: str, bits: int
) -> None:
    arguments = ["--mode", mode, "--drafter-bits", "none", "--json", "--no-verify"]
    assert run(["convert", "pocket", "-o", str(tmp_path / "out"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"]["quantization"]["bits"] == bits
    assert found["drafter"]["quantization"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pocket", "--bits", "5", "--mode", "mxfp4"], 2, "mxfp4 has no 5 bits."),
        (
            ["pocket", "--bits", "none", "--group-size", "32"],
            2,
            "A group size is given with the re",
        ),
        (["pocket", "--bits", "none", "--recipe", "uniform"], 2, "--bits none keeps the weights."),
        (["pocket", "--dequantize", "--bits", "4"], 2, "--dequantize quantizes nothing."),
        (["pocket", "--dequantize"], 2, "pocket is not quantized."),
        (["pocket", "--shard-size", "5 apples"], 2, "The shard size is '5 apples'."),
        (["pocket", "--keep", "nothing=8"], 2, "keep 'nothing=8' matches no matrix."),
        (["pocket", "--revision", "main"], 2, "pocket is a folder and has no revision."),
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


def test_a_dry_run_is_a_table_by_part_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(["convert", "pocket-moe", "-o", str(out), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not list(tmp_path.iterdir())
    rows = {line[4:25].strip(): line for line in lines if line.startswith("    ")}
    assert rows.keys() == {
        *("embeddings", "attention", "dense MLP", "experts", "router", "norms"),
        *("drafter body", "drafter head"),
    }
    for line in rows.values():
        assert re.fullmatch(rf"    [\w -]{{21}} +[\d,]+ +{SIZE} → +{SIZE}", line)
    assert re.fullmatch(rf"  disk     {SIZE} of {SIZE} free", lines[-2])
    assert re.fullmatch(
        rf"  memory   {SIZE} while it is written; the check then loads the pair, {SIZE}, "
        "where it fits",
        lines[-1],
    )


def test_a_dry_run_tells_programs_every_tensors_fate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--dry-run", "--json", "--bits", "4", "--keep", "*.v_proj=bf16"]
    assert run(["convert", "pocket", "-o", str(tmp_path / "out"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.iterdir())
    target = found["target"]
    tensors = {tensor["name"]: tensor for tensor in target["tensors"]}
    assert sum(tensor["bytes"] for tensor in tensors.values()) < target["bytes"]
    assert sum(part["bytes"] for part in target["parts"]) == sum(
        tensor["bytes"] for tensor in tensors.values()
    )
    kept = [t for name, t in tensors.items() if name.endswith("v_proj.weight")]
    assert kept
    assert all((t["action"], t["bytes"]) == ("copy", t["source_bytes"]) for t in kept)
    assert (
        run(["convert", "pocket", "-o", str(tmp_path / "out"), *arguments[1:], "--no-verify"]) == 0
    )
    files = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*.safetensors"))
    assert files == found["bytes"] == found["disk_bytes"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_an_interruption_prints_the_command_that_goes_on(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: type[BaseException],
) -> None:
    out = tmp_path / "my pair"
    arguments = ["convert", "pocket", "-o", str(out), "--shard-size", "400KB", "--no-verify"]
    calls: list[int] = []
    original = PartWriter._tell

    def tell(self: PartWriter, step: str, place: int, more: int) -> None:
        calls.append(place)
        if place == 3:
            raise failure
        original(self, step, place, more)

    monkeypatch.setattr(PartWriter, "_tell", tell)
    if failure is KeyboardInterrupt:
        assert run(arguments) == 130
    else:
        with pytest.raises(SystemExit):
            run(arguments)
    command = shlex.join(["mlx-mtp", *arguments])
    said = capsys.readouterr().err
    assert f"the same command goes on: {command}\n" in said
    assert not out.exists()
    monkeypatch.undo()
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_resumed"] > 0
    assert run(arguments) == 0
    assert "is this conversion already; nothing was done." in capsys.readouterr().err


def test_a_failed_check_ends_with_7(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise VerificationError("norm.weight is not what was written.", "Check the disk.")

    monkeypatch.setattr("mlx_mtp.convert.check_tensor", fail)
    assert run(["convert", "pocket", "-o", str(tmp_path / "out")]) == 7
    assert capsys.readouterr().err.startswith("error: norm.weight is not what was written.")
    assert not (tmp_path / "out").exists()
    assert run(["convert", "pocket", "-o", str(tmp_path / "out"), "--no-verify"]) == 0


def test_progress_is_a_line_with_rate_and_time_left() -> None:
    progress = Progress("write", "target", 3, 14, 10 * 10**9, 62 * 10**9, 2 * 10**9)
    assert progress_line(progress, 20.0) == (
        "target 3/14 · 12.0 GB of 62.0 GB · 500.0 MB/s · 2 min left"
    )
    fetching = Progress("fetch", "target", 1, 14, 0, 62 * 10**9, 0, bytes_fetched=3 * 10**9)
    assert progress_line(fetching, 1.0) == "target 1/14 · fetching 3.0 GB · 0.0 kB of 62.0 GB"


def test_progress_is_shown_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RichConsole, "is_terminal", True)
    monkeypatch.setenv("TERM", "xterm")
    with show_conversion(Console()) as observe:
        assert observe is not None
        observe(Progress("write", "drafter", 1, 1, 5, 10))
    assert "drafter 1/1 · 0.0 kB of 0.0 kB" in capsys.readouterr().err
    with show_conversion(Console(quiet=True)) as observe:
        assert observe is None
