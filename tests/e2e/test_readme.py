"""What the README shows is what the program does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from mlx_mtp.chat.commands import COMMANDS
from mlx_mtp.cli.app import run

README = (Path(__file__).parents[2] / "README.md").read_text()
HELP = re.findall(r"```\n\$ mlx-mtp (\w+) --help\n(.*?)```", README, re.DOTALL)
INFO = re.findall(r"```\n\$ mlx-mtp (info .*)\n((?:.*\n)*?)```", README)
COMMANDS_SHOWN = [
    command
    for command in re.findall(r"^(?:    |\$ |    pip .*&& )mlx-mtp (.*)$", README, re.MULTILINE)
    if not command.endswith("--help")
]
FEW = ["--prompts", "mine.txt", "--rows", "1", "--depths", "2", "--max-tokens", "4"]
SHORTER = {
    "chat": ["-p", "Hi.", "--max-tokens", "3"],
    "batch": ["--model", "pocket", "--max-tokens", "3"],
    "bench": [*FEW, "--repeat", "1"],
    "verify": FEW,
}
"""Options that come last and win."""
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def flat(text: str) -> str:
    """Without line breaks, which depend on the width of the terminal."""
    return " ".join(text.split())


def test_there_is_something_to_check() -> None:
    assert [command for command, _ in HELP] == ["chat", "batch", "bench", "verify", "convert"]
    assert len(INFO) == 1
    assert len(PYTHON) == 1
    names = {command.split()[0] for command in COMMANDS_SHOWN}
    assert names >= {"chat", "batch", "bench", "convert", "info", "verify"}


@pytest.mark.parametrize(("command", "shown"), HELP)
def test_help_is_real(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    shown: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([command, "--help"]) == 0
    real = flat(capsys.readouterr().out)
    for excerpt in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE):
        assert flat(excerpt) in real


@pytest.mark.parametrize(("command", "shown"), INFO)
def test_the_screen_of_info_is_real(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    shown: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path))
    assert run(shlex.split(command)) == 0
    real = capsys.readouterr().out
    for excerpt in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        assert excerpt in real


def test_the_commands_shown_are_those_of_a_conversation() -> None:
    for command in COMMANDS:
        assert f"  {command.usage:<24} {command.help}\n" in README


@pytest.mark.parametrize("code", PYTHON)
def test_the_python_example_runs(capsys: pytest.CaptureFixture[str], code: str) -> None:
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "7 x 1 = 7" in capsys.readouterr().out
    ids = names["ids"]
    assert isinstance(ids, list)
    assert len(ids) == 2


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bundled pair in the place of a real model, and few tokens."""
    monkeypatch.chdir(tmp_path)
    Path("reviews.csv").write_text("product,review\nlamp,Bright.\nchair,It broke.\n")
    Path("notes").mkdir()
    Path("notes/monday.md").write_text("Bought apples.")
    (request,) = re.findall(r'`(\{"custom_id.*?\})`', README)
    Path("requests.jsonl").write_text(request + "\n")
    Path("mine.txt").write_text("Count to 9.\n")
    for command in COMMANDS_SHOWN:
        name, *words = shlex.split(re.sub(r"google/[\w.-]+", "pocket", command))
        assert run([name, *words, *SHORTER.get(name, [])]) == 0, command
    assert len(Path("labels.csv").read_text().splitlines()) == 3
    assert json.loads(Path("summaries.jsonl").read_text())["id"] == "monday.md"
    assert json.loads(Path("responses.jsonl").read_text())["custom_id"] == "a"
    assert Path("speed.png").stat().st_size > 10_000
    assert Path("gemma-4-E4B-it-4bit/drafter/config.json").is_file()
    assert not Path("out").exists()
