"""`mlx-mtp bench` on the bundled pair: what it counts, prints and refuses.

No test looks at how long anything took.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

import pytest
from batches import PROGRAM, Done

from mlx_mtp.cli.app import run

PROMPTS = {
    "count": "Count from 19 to 26.",
    "note": "Write a short note to Ada about Thursday.",
}
TOKENS = 10
INTERRUPTED = ["--rows", "1", "--depths", "0,1", "--repeat", "500", "--max-tokens", "5"]


class BenchCommand(Protocol):
    def __call__(self, *arguments: object) -> Done:
        """Run `mlx-mtp bench` in this process."""


@pytest.fixture(scope="module")
def bench() -> Iterator[BenchCommand]:
    log = logging.getLogger("mlx_mtp")
    level, handlers = log.level, list(log.handlers)
    patch = pytest.MonkeyPatch()
    for name in ("MLX_MTP_MODEL", "MLX_MTP_DRAFTER"):
        patch.delenv(name, raising=False)
    patch.setenv("COLUMNS", "80")

    def call(*arguments: object) -> Done:
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run(["bench", *map(str, arguments)])
        return Done(code, out.getvalue(), err.getvalue())

    yield call
    patch.undo()
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    rows = [{"prompt": text, "kind": kind} for kind, text in PROMPTS.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def measured(
    bench: BenchCommand, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Done, Path]:
    """A whole run, and the picture it drew."""
    picture = tmp_path_factory.mktemp("plot") / "speed.png"
    small = ("--rows", "2,1", "--depths", "auto,3", "--repeat", 2, "--max-tokens", TOKENS)
    return bench("pocket", "--prompts", prompts, *small, "--share", "--plot", picture), picture


def document(done: Done) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return loaded


def test_the_last_line_is_one_document(measured: tuple[Done, Path]) -> None:
    done, _ = measured
    assert done.code == 0
    found = document(done)
    assert found["schema"] == 1
    assert found["model"] == "pocket"
    assert found["drafter"] == "pocket/assistant"
    assert found["quantization"] == {"target": None, "drafter": None}
    assert {"mlx", "mlx-lm", "mlx-mtp"} <= found["versions"].keys()
    assert {"chip", "os", "memory_bytes", "device"} == found["machine"].keys()
    assert (found["interrupted"], found["replayed"]) == (False, None)
    places = [(cell["rows"], cell["depth"]) for cell in found["cells"]]
    assert places == [(1, 0), (1, 3), (1, "auto"), (2, 0), (2, 3), (2, "auto")]
    assert len(found["verdict"]) == 2


def test_counts_add_up(measured: tuple[Done, Path]) -> None:
    for cell in document(measured[0])["cells"]:
        asked = max(len(PROMPTS), 2 * cell["rows"])
        assert cell["prompts"] == sum(kind["prompts"] for kind in cell["kinds"].values()) == asked
        assert cell["prompts"] < cell["tokens"] <= TOKENS * cell["prompts"]
        assert cell["rounds"] == cell["target_forwards"] <= cell["row_rounds"]
        assert cell["most_rows"] == cell["rows"]
        assert cell["runs"] == len(cell["tokens_per_second_by_run"]) == 2
        decoded = cell["tokens"] - cell["prompts"]  # the first of each comes from its prefill
        if cell["depth"] != "auto":  # auto may do otherwise in its second run
            depth = cell["depth"]
            assert cell["rounds_by_depth"] == {str(depth): 2 * cell["rounds"]}
            assert cell["drafted"] == depth * cell["row_rounds"]
            # a block may have been drafted ahead for an answer that then ended
            ahead = cell["drafter_forwards"] - depth * cell["rounds"]
            assert 0 <= ahead <= depth * cell["prompts"]
            assert 2 * cell["accepted"] == sum(cell["kept_by_position"])
            per_forward = decoded / cell["row_rounds"]
            assert cell["tokens_per_forward"] == pytest.approx(per_forward, rel=1e-5)
        tried, kept = cell["tried_by_position"], cell["kept_by_position"]
        assert all(one <= other for one, other in zip(kept, tried, strict=True))
        assert all(one <= other for one, other in zip(tried[1:], kept, strict=False))
        assert cell["peak_bytes"] > 1e6
        assert (cell["first_token_seconds"] is None) == (cell["rows"] > 1)


def test_figures_of_what_was_timed_are_there(measured: tuple[Done, Path]) -> None:
    cells = document(measured[0])["cells"]
    for cell in cells:
        for name in ("tokens_per_second", "round_seconds", "round_bytes", "speed_up"):
            assert cell[name] > 0
        assert cell["gigabytes_per_second"] > 0
    bytes_of = {(cell["rows"], cell["depth"]): cell["round_bytes"] for cell in cells}
    assert bytes_of[1, 0] < bytes_of[2, 0] < bytes_of[2, 3]
    assert [cell["speed_up"] for cell in cells if cell["depth"] == 0] == [1, 1]


def test_all_ids_are_those_of_plain_decoding(measured: tuple[Done, Path]) -> None:
    cells = document(measured[0])["cells"]
    assert [cell["differing_prompts"] for cell in cells] == [0] * 6


def test_a_pipe_gets_plain_tables_that_fit(measured: tuple[Done, Path]) -> None:
    done, _ = measured
    assert "\x1b" not in done.out
    *shown, _ = done.out.splitlines()
    tables = "\n".join(shown).split("**mlx-mtp bench**")[0].splitlines()
    assert max(map(len, tables)) <= 80
    assert [line for line in tables if line.startswith(("1 row", "2 rows"))][:2] == [
        "1 row",
        "2 rows together",
    ]
    assert f"| 1 | {document(done)['cells'][0]['tokens_per_second']:.1f} |" in done.out
    assert document(done)["share"] in done.out


def test_the_picture_is_one(measured: tuple[Done, Path]) -> None:
    done, picture = measured
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"wrote {picture}" in done.err


# Replay


def test_a_replay_keeps_as_many_drafts_as_asked(
    bench: BenchCommand, prompts: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "replay.svg"
    common = ("--prompts", prompts, "--rows", 2, "--repeat", 1, "--max-tokens", 24)
    asked = (0.8, 0.5)
    replay = ("--replay-acceptance", ".8,.5", "--depths", 2, "--share", "--plot", picture)
    done = bench("pocket", *common, *replay)
    found = document(done)
    plain, cell = found["cells"]
    assert (plain["differing_prompts"], cell["differing_prompts"]) == (0, 0)
    assert cell["tokens"] == 24 * cell["prompts"]
    assert cell["drafter_forwards"] >= 2 * cell["rounds"]  # its time is in
    for tried, kept, share in zip(
        cell["tried_by_position"], cell["kept_by_position"], asked, strict=True
    ):
        assert abs(kept - share * tried) < 4 * (tried * share * (1 - share)) ** 0.5
    assert found["replayed"] == {"acceptance": list(asked), "drafter_time": True}
    assert "2 rows together (replayed)" in done.out
    assert "**Replayed acceptance 0.8, 0.5" in found["share"]
    assert "<svg" in picture.read_text()


def test_a_replay_needs_no_drafter(bench: BenchCommand, prompts: Path) -> None:
    replay = ("--drafter", "none", "--replay-acceptance", "1,1,0", "--depths", "5,auto")
    small = ("--rows", 1, "--repeat", 1, "--max-tokens", 13, "--json")
    done = bench("pocket", "--prompts", prompts, *replay, *small)
    assert done.out.count("\n") == 1
    found = document(done)
    _, cell, auto = found["cells"]
    assert cell["tokens_per_forward"] == 3
    assert auto["drafted"] > 0
    assert (cell["accepted"], cell["row_rounds"]) == (16, 8)  # 12 tokens each, three in each round
    assert cell["drafter_forwards"] == cell["differing_prompts"] == auto["differing_prompts"] == 0
    assert found["replayed"]["drafter_time"] is False


def test_without_a_drafter_plain_decoding_is_measured(bench: BenchCommand, prompts: Path) -> None:
    small = ("--prompts", prompts, "--rows", 1, "--repeat", 1, "--max-tokens", 3, "--json")
    done = bench("pocket", "--drafter", "none", *small)
    assert [cell["depth"] for cell in document(done)["cells"]] == [0]
    assert "nothing drafted" in document(done)["verdict"][0]


# Refusals: before the model is loaded, so that of a folder that is not there nothing is said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "9"], "error: The rows are '9'.\n  Give whole numbers from 1 to 8 "),
        (["--rows", "1,,2"], "error: The rows are '1,,2'."),
        (["--depths", "2,8"], "error: The draft depth is '8'."),
        (["--depths", ""], "error: The draft depth is ''."),
        (["--repeat", "0"], "error: 0 runs give no median."),
        (["--max-tokens", "0"], "error: max_tokens is 0."),
        (["--memory-limit", "0"], "error: The memory limit is 0 GB."),
        (["--prompts", "/nowhere"], "error: /nowhere cannot be read: No such file"),
        (["--prompts", os.devnull], f"error: {os.devnull} has no prompts."),
        (["--plot", "speed.pdf"], "error: speed.pdf is no name of a picture."),
        (["--plot", "/nowhere/speed.png"], "error: /nowhere/speed.png cannot be written."),
        (["--replay-acceptance", "2"], "error: The acceptance to replay is '2'."),
        (
            ["--replay-acceptance", ".9", "--temperature", "1"],
            "error: Acceptance is replayed from the model's greedy text",
        ),
        (
            ["--drafter", "none", "--depths", "0,2"],
            "error: There is no drafter for depth 2.\n  Name one with --drafter, ",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    bench: BenchCommand, arguments: list[str], message: str
) -> None:
    done = bench("./no-such-folder", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(message)


def test_a_missing_library_is_named_before_anything_is_measured(
    bench: BenchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_mtp.measure.plot.find_spec", lambda name: None)
    done = bench("./no-such-folder", "--plot", "speed.png")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: --plot needs matplotlib, which is not installed.\n"
        "  Install it with: pip install matplotlib\n"
    )


def test_a_prompt_that_does_not_fit_is_an_error(bench: BenchCommand, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 40_000)
    done = bench("pocket", "--prompts", tmp_path / "long.txt", "--quick")
    assert (done.code, done.out) == (2, "")
    assert "the model's context holds" in done.err


# Ctrl-C


def test_an_interrupt_shows_what_was_measured(prompts: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLX_MTP_MODEL")}
    process = subprocess.Popen(
        [PROGRAM, "bench", "pocket", "-v", "--prompts", str(prompts), *INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "run 2" in line:  # so the first runs of both depths are over
            process.send_signal(signal.SIGINT)
            break
    out, _ = process.communicate(timeout=60)
    found = json.loads(out.splitlines()[-1])
    assert process.returncode == 130
    assert found["interrupted"] is True
    assert [cell["depth"] for cell in found["cells"]] == [0, 1]
    assert all(1 <= cell["runs"] < 500 for cell in found["cells"])
    assert "Interrupted: these are the figures so far." in out


def test_experts_are_timed_and_the_choice_is_kept(
    bench: BenchCommand, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path / "cache"))
    small = ("--prompts", prompts, "--rows", 1, "--depths", 1, "--repeat", 1, "--max-tokens", 4)
    done = bench("pocket-moe", *small)
    experts = document(done)["experts"]
    assert [one["tokens"] for one in experts["timings"]] == [1, 2, 3, 5, 8, 16, 24, 40]
    assert [one["pairs"] for one in experts["timings"]] == [2, 4, 6, 10, 16, 32, 48, 80]
    assert all(2 <= one["distinct"] <= min(8, one["pairs"]) for one in experts["timings"])
    assert "Experts of one layer, microseconds; used: " in done.out
    (file,) = (tmp_path / "cache").rglob("*.json")
    assert json.loads(file.read_text())["experts"] == list(experts["strategy"].values())
    assert document(bench("pocket", *small))["experts"] is None
