"""`mlx-mtp batch` for tests: the program in a process of its own, its journal and its OUTPUT."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = str(Path(sys.executable).with_name("mlx-mtp"))
TABLE = "Multiplication table of 7."
SEVENS = "\n".join(f"7 x {n} = {7 * n}" for n in range(1, 11))
BANANA = "Spell banana."
B_A_N_A_N_A = "b-a-n-a-n-a"


class Done(NamedTuple):
    code: int
    out: str
    err: str


def start(*arguments: object) -> subprocess.Popen[str]:
    """The program at work on a batch; its streams are pipes."""
    kept = {key: value for key, value in os.environ.items() if key != "MLX_MTP_DRAFTER"}
    return subprocess.Popen(
        [PROGRAM, "batch", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=kept | {"HF_HUB_OFFLINE": "1", "MLX_MTP_MODEL": "pocket", "LC_ALL": "C.UTF-8"},
        preexec_fn=_heed_signals,
    )


def _heed_signals() -> None:
    """A test run in the background ignores SIGINT, one under nohup SIGHUP, and would hand that
    down."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def finish(process: subprocess.Popen[str], stdin: str | None = None) -> Done:
    """What it says until its end."""
    try:
        out, err = process.communicate(stdin, timeout=120)
    finally:
        process.kill()  # where it did not end in time; else nothing
    return Done(process.returncode, out, err)


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> bool:
    """Wait until something holds; False where the program ended without it."""
    end = time.monotonic() + 120
    while not condition():
        if process.poll() is not None:
            return condition()
        assert time.monotonic() < end
        time.sleep(0.005)
    return True


def journal(output: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal, while it is written, too."""
    *lines, _ = _journal_bytes(output).split(b"\n")
    return [json.loads(line) for line in lines]


def finished(output: Path) -> int:
    """How many rows the journal has."""
    return _journal_bytes(output).count(b'\n{"row": ')


def begun(output: Path) -> int:
    """How many runs the journal tells of."""
    return _journal_bytes(output).count(b'\n{"begin": ')


def _journal_bytes(output: Path) -> bytes:
    with suppress(FileNotFoundError):
        return output.with_name(output.name + ".journal").read_bytes()
    return b""


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(output: Path) -> list[tuple[str, ...]]:
    """What must not depend on how the rows were done, by id: a row that is there twice shows."""
    names = ("id", "text", "finish_reason", "usage", "seed", "error")
    return sorted(tuple(str(row[name]) for name in names) for row in read_jsonl(output))
