"""The command line as a user meets it: the real program in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_mtp

PROGRAM = str(Path(sys.executable).with_name("mlx-mtp"))
TABLE = "Multiplication table of 7."
SEVENS = "".join(f"7 x {n} = {7 * n}\n" for n in range(1, 11))
COUNT = "1, 2, 3, 4, 5"
NOTE = (
    "note: no model was named, so the bundled demonstration model answers; name a real one: "
    "mlx-mtp chat google/gemma-4-E4B-it\n"
)
GREEDY = ("--temperature", "0", "--draft-depth", "4")
STATS = r"  \d+ tok · [\d.]+ tok/s · first [\d.]+ s"
DRAFTS = r" · drafts \d+ % \([\d.]+/round\)\n"


def environment(**extra: str) -> dict[str, str]:
    """A user's environment without what could change the outcome."""
    changing = ("MLX_MTP_MODEL", "MLX_MTP_DRAFTER")
    kept = {key: value for key, value in os.environ.items() if key not in changing}
    return kept | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "LC_ALL": "C.UTF-8"} | extra


def mlx_mtp_command(
    *arguments: str, stdin: str = "", **extra: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment(**extra),
        timeout=60,
    )


def flat(text: str) -> str:
    """Without line breaks, which depend on the width of the terminal."""
    return " ".join(text.split())


# Help and version


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        *([command, "--help"] for command in ("chat", "convert", "bench", "verify", "info")),
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from mlx_mtp.cli.app import run\n"
        f"assert run({arguments!r}) == 0\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'huggingface_hub', 'numpy', 'tokenizers'}\n"
        "sys.exit(f'imported: {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: mlx-mtp ")


def test_help_comes_at_once() -> None:
    # CPU seconds, best of five: other work on the machine must not fail this.
    times = []
    for _ in range(5):
        before = os.times()
        assert mlx_mtp_command("--help").returncode == 0
        after = os.times()
        used = (after.children_user, after.children_system)
        times.append(sum(used) - before.children_user - before.children_system)
    assert 0 < min(times) < 0.5


@pytest.mark.parametrize("command", ["chat", "convert", "bench", "verify", "info"])
def test_every_option_says_its_default_and_the_help_has_examples(command: str) -> None:
    text = mlx_mtp_command(command, "--help").stdout
    options, examples = text.split("Options:")[1].split("Examples:")
    assert f"mlx-mtp {command} " in examples
    entries = re.split(r"\n  (?=-)", options)[1:]
    assert len(entries) > 6
    for entry in entries:
        is_flag = re.match(r"(-\w, )?--[\w-]+(?:, -\w)?(\s{2,}|$)", entry)
        assert is_flag or "default:" in flat(entry) or "[required]" in entry, entry


def test_version() -> None:
    done = mlx_mtp_command("--version")
    assert (done.returncode, done.stdout) == (0, f"mlx-mtp {mlx_mtp.__version__}\n")


# Errors: one sentence and what to do, on stderr, with a code


def test_a_usage_error_is_a_sentence_and_a_hint() -> None:
    """As the process says it; tests/bad_commands.py has the others."""
    done = mlx_mtp_command("chat", "-p", "x", "--draft-depth", "8")
    said = "error: The draft depth is '8'.\n  Give auto or a whole number from 0 to 7.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_the_traceback_comes_with_debug(tmp_path: Path) -> None:
    done = mlx_mtp_command("chat", str(tmp_path / "none"), "-p", "x", "--debug")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "\nerror: There is no folder " in done.stderr


def test_an_unexpected_error_says_how_to_see_more() -> None:
    code = (
        "import sys, mlx_mtp.cli.chat\n"
        "from mlx_mtp.cli.app import main\n"
        "def fail(option): raise ZeroDivisionError('division by zero')\n"
        "mlx_mtp.cli.chat.read_prompt = fail\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "chat"], capture_output=True, text=True, env=environment()
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: Unexpected ZeroDivisionError: division by zero.\n"
        "  Run it again with --debug to see where.\n"
    )


# Chat


def test_the_answer_goes_to_stdout_and_the_rest_to_stderr() -> None:
    done = mlx_mtp_command("chat", "-p", TABLE, "--temperature", "0")
    assert (done.returncode, done.stdout) == (0, SEVENS)
    assert re.fullmatch(re.escape(NOTE) + STATS + DRAFTS, done.stderr)


def test_the_prompt_may_be_piped_in() -> None:
    arguments = ["chat", "pocket", "--temperature", "0", "--max-tokens", "7", "-q"]
    done = mlx_mtp_command(*arguments, stdin=TABLE + "\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, SEVENS[:10], "")


def test_text_that_nobody_reads_is_said() -> None:
    command = [PROGRAM, "chat", "pocket", "-p", "Spell cat.", *GREEDY]
    done = subprocess.run(command, input="a", capture_output=True, text=True, env=environment())
    assert done.stdout == "c-a-t\n"
    assert done.stderr.startswith("note: stdin is not read, as -p gives the prompt; -p - reads it")


def test_an_interrupt_keeps_what_came() -> None:
    process = subprocess.Popen(
        [PROGRAM, "chat", "pocket", "-p", "Count from 1 to 500.", *GREEDY, "--debug"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(12) == COUNT[:12]
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert rest.endswith("\n")
    assert re.fullmatch(STATS + DRAFTS, errors)


def test_a_reader_that_leaves_and_a_closed_stdin_are_no_reason_to_complain() -> None:
    done = subprocess.run(
        f"'{PROGRAM}' chat pocket -p 'Count from 1 to 500.' --temperature 0 -q <&- | head -c 5;"
        f"'{PROGRAM}' --help | true",
        shell=True,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    assert done.stdout == COUNT[:5]
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_a_matter_of_resources() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [PROGRAM, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    said = "error: There is not enough space on the disk.\n  Free some and try again.\n"
    assert (done.returncode, done.stderr) == (5, said)
