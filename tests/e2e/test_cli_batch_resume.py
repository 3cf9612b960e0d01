"""A batch that does not run to its end, and what is done again after it: no more than needed."""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from batches import (
    B_A_N_A_N_A,
    BANANA,
    TABLE,
    answers,
    begun,
    finish,
    finished,
    journal,
    read_jsonl,
    start,
    wait_for,
    write_jsonl,
)

if TYPE_CHECKING:
    from conftest import BatchCommand

GREEDY = ("--temperature", "0")


def many_rows(count: int) -> list[dict[str, Any]]:
    """Rows of different lengths, greedy and sampled, with and without a seed of their own."""
    prompts = ("Count from {} to 400.", "Multiplication table of {}.", BANANA)
    rows: list[dict[str, Any]] = []
    for n in range(count):
        row: dict[str, Any] = {"id": f"row {n}", "prompt": prompts[n % 3].format(n)}
        row["max_tokens"] = 5 + 7 * n % 20
        row["temperature"] = n % 2 * 1.5
        rows.append(row | ({"seed": n} if n % 5 == 0 else {}))
    return rows


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


# Killed


@pytest.mark.parametrize(
    ("count", "kills"), [(30, 3), pytest.param(300, 50, marks=pytest.mark.slow)]
)
def test_a_batch_killed_again_and_again_ends_as_if_it_had_not_been(
    tmp_path: Path, output: Path, batch: BatchCommand, count: int, kills: int
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", many_rows(count))
    chance = random.Random(count)
    for _ in range(kills):
        before, runs = finished(output), begun(output)
        wanted = before + chance.randrange(2 * count // (3 * kills) + 1)
        process = start(source, "-o", output, "--seed", "7")

        def is_time(runs: int = runs, wanted: int = wanted) -> bool:
            return begun(output) > runs and finished(output) >= wanted

        wait_for(process, is_time)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.001, 0.05))
        process.kill()
        assert finish(process).code == -signal.SIGKILL
        assert finished(output) >= before
        assert not output.exists()
    left = count - finished(output)
    done = batch(source, "-o", output, "--seed", "7", "--json")
    assert done.code == 0
    undisturbed = tmp_path / "undisturbed.jsonl"
    assert batch(source, "-o", undisturbed, "--seed", "7").code == 0
    assert answers(output) == answers(undisturbed)
    assert len(answers(output)) == count
    summary = json.loads(done.out)
    assert (summary["rows"], summary["reused"]) == (count, count - left)
    # each time it was killed, it takes half as many rows at a time, and says so
    sizes = [line["begin"]["rows"] for line in journal(output) if "begin" in line]
    assert sizes == [max(1, 8 >> n) for n in range(kills + 1)]
    assert f"killed, perhaps for lack of memory; this one takes {sizes[-1]} rows at" in done.err


# Interrupted


def test_interrupts(tmp_path: Path, output: Path) -> None:
    rows = [{"prompt": BANANA}] * 3 + [{"prompt": f"Count from {n} to 999."} for n in range(400)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    output.write_text("of before")
    arguments = [source, "-o", output, "--batch-size", "2", *GREEDY, "--max-tokens", "60"]

    # the first Ctrl-C: rows in flight are finished, no other is begun
    process = start(*arguments)
    assert wait_for(process, lambda: finished(output) >= 3)
    other = finish(start(*arguments))
    assert (other.code, other.out) == (2, "")
    assert other.err == (
        f"error: Another process is writing {output}.\n  Wait for it, or choose another output.\n"
    )
    before = finished(output)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130
    assert before < finished(output) <= before + 5
    assert journal(output)[-1] == {"end": "interrupted"}
    assert done.err.startswith("finishing the rows in flight; Ctrl-C again stops now\n")
    said = done.err.splitlines()[-1]
    assert shlex.split(said.removeprefix("  go on with: ")) == [
        "mlx-mtp", "batch", *map(str, arguments),
    ]  # fmt: skip
    assert f"  {finished(output)} of {len(rows)} rows · " in done.err

    # the second one: nothing more is finished
    arguments[-1] = "2000"
    before = finished(output) + 3
    process = start(*arguments)
    assert wait_for(process, lambda: finished(output) >= before)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("finishing the rows in flight")
    time.sleep(0.1)  # no one is so fast as to press it while that is still being said
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130
    assert finished(output) == before
    assert journal(output)[-1] == {"end": "interrupted"}
    assert done.err.startswith("  go on with: mlx-mtp batch ")
    assert done.err.count("\n") == 1

    # being terminated, or losing its terminal: as a second Ctrl-C
    for number in (signal.SIGTERM, signal.SIGHUP):
        process = start(*arguments)
        assert wait_for(process, lambda: journal(output)[-1].keys() == {"begin"})
        process.send_signal(number)
        assert finish(process).code == 128 + number
        assert journal(output)[-1] == {"end": "interrupted"}
    assert output.read_text() == "of before"


# Changed


def test_only_what_was_changed_is_done_again(
    tmp_path: Path, output: Path, batch: BatchCommand
) -> None:
    rows = [{"id": "a", "prompt": TABLE}, {"id": "b", "prompt": BANANA}, {"id": "c", "prompt": "x"}]
    source = tmp_path / "in.jsonl"

    def reused(*more: str, model: str = "pocket") -> int:
        write_jsonl(source, rows)
        done = batch(source, "-o", output, "--json", *GREEDY, *more, model=model)
        assert done.code == 0
        found = json.loads(done.out)
        assert (found["rows"], found["done"], found["failed"]) == (3, 3, 0)
        assert len(answers(output)) == 3
        is_idle = found["run"]["target_forwards"] == found["run"]["prefill_forwards"] == 0
        assert is_idle == (found["reused"] == 3)
        assert (found["drafter"] is None) == is_idle  # no model is loaded for nothing
        assert found["tokens"] == found["run"]["tokens"]
        count: int = found["reused"]
        return count

    assert reused() == 0
    assert reused() == 3
    rows[1]["prompt"] = "Spell apple."
    assert reused() == 2
    assert read_jsonl(output)[-1]["text"] == "a-p-p-l-e"  # it was finished last
    rows[1]["prompt"] = BANANA
    assert reused() == 3  # both answers are kept
    rows[2]["max_tokens"] = 3
    assert reused() == 2
    rows[2]["stop"] = ["zzz"]
    assert reused() == 2
    assert reused("--top-k", "5") == 0
    assert reused(model="pocket-moe") == 0
    assert reused() == 3
    rows.reverse()
    assert reused("--ordered") == 3
    assert [row["id"] for row in read_jsonl(output)] == ["c", "b", "a"]


def test_rows_that_failed_are_done_again_when_that_is_asked_for(
    tmp_path: Path, output: Path, batch: BatchCommand
) -> None:
    rows = [{"prompt": BANANA}, {"prompt": "word " * 5000}, {"promt": BANANA}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    arguments = [source, "-o", output, "--skip-invalid", "--json", *GREEDY]
    broken = "warning: line 3: Unknown key 'promt'. Did you mean prompt?\n"
    too_long = "warning: line 2: The prompt has 5013 tokens and the model's context holds 4096. "
    for more, reused, warnings in (
        ([], 0, broken + too_long),
        ([], 3, broken),
        (["--retry-errors"], 1, broken + too_long),
    ):
        done = batch(*arguments, *more)
        assert done.code == 6
        assert done.err.startswith(warnings)
        assert "  3 of 3 rows · " in done.err
        assert " · 2 failed" in done.err
        found = json.loads(done.out)
        assert (found["done"], found["failed"], found["reused"]) == (1, 2, reused)
    by_index = {row["index"]: row for row in read_jsonl(output)}
    assert [by_index[n]["finish_reason"] for n in range(3)] == ["stop", "error", "error"]
    assert by_index[1]["error"]["message"].startswith("The prompt has 5013 tokens")
    assert [by_index[n]["seed"] for n in (1, 2)] == [None, None]  # they were never begun
    rows[1:] = [{"prompt": "Spell apple."}, {"prompt": "Spell pear."}]
    write_jsonl(source, rows)
    done = batch(*arguments)
    assert (done.code, json.loads(done.out)["reused"]) == (0, 1)


def test_an_input_that_changes_while_it_is_read_is_told(
    tmp_path: Path, output: Path, batch: BatchCommand
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for n in range(12):
        (folder / f"{n:02}.txt").write_text(BANANA)
    arguments = [folder, "-o", output, "--batch-size", "1", *GREEDY]

    def change() -> None:
        while not finished(output):
            time.sleep(0.001)
        (folder / "10.txt").write_text("Spell apple.")
        (folder / "11.txt").unlink()

    changing = threading.Thread(target=change, daemon=True)
    changing.start()
    done = batch(*arguments)
    changing.join(1)
    assert (done.code, done.err) == (
        2,
        "error: notes was changed while it was read, so 2 rows could not be done.\n"
        "  When it is as you want it, run the same command again; finished rows are kept.\n",
    )
    assert finished(output) == 10
    assert not output.exists()
    done = batch(*arguments, "--json")
    assert (done.code, json.loads(done.out)["reused"]) == (0, 10)
    assert [row["text"] for row in read_jsonl(output)] == [B_A_N_A_N_A] * 10 + ["a-p-p-l-e"]
