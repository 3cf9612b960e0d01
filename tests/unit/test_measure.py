"""What `mlx-mtp bench` computes, without running anything: files, counts, formulas, words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from mlx.utils import tree_flatten

from mlx_mtp import LLM, load
from mlx_mtp.errors import UsageError
from mlx_mtp.measure.bandwidth import Reader, Reads
from mlx_mtp.measure.bench import BenchOptions, depths_to_run
from mlx_mtp.measure.cell import Cell, Depth, Drafts, make_cell
from mlx_mtp.measure.experts import ExpertTiming, best_strategy, time_experts
from mlx_mtp.measure.machine import Machine
from mlx_mtp.measure.prompts import BenchPrompt, PromptSet, built_in, read_prompts
from mlx_mtp.measure.replay import parse_acceptance, write_script
from mlx_mtp.measure.report import Report, Subject
from mlx_mtp.measure.run import Round, RowRound, Run
from mlx_mtp.measure.share import share_block
from mlx_mtp.model.experts import ExpertStrategy
from mlx_mtp.types import MAX_DEPTH, RequestStats, Result, RunStats

# Prompts


def test_lines_are_prompts(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("\ufeffOne?\n\n  Two {?}  \n")
    found = read_prompts(file)
    assert found.prompts == (BenchPrompt("prompts", "One?"), BenchPrompt("prompts", "Two {?}"))
    assert [prompt.text for prompt in found.for_rows(1)] == ["One?", "Two {?}"]
    assert len(found.for_rows(8)) == 16  # again from the first, so that all rows are taken


def test_jsonl_may_name_kinds(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "One?", "kind": "chat"}\n{"prompt": "Two\\nlines?"}\n')
    prompts = read_prompts(file).prompts
    assert prompts == (BenchPrompt("chat", "One?"), BenchPrompt("prompts", "Two\nlines?"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts"),
        (b" \n\n", "has no prompts"),
        (b"\xff\xfe", "is not UTF-8"),
        (b'{"prompt": "a"}\n{"prompt": ', "p, line 2 is not JSON"),
        (b'{"text": "a"}', "p, line 1 has no prompt"),
        (b'{"prompt": " "}', "p, line 1 has an empty prompt"),
        (b'{"prompt": "a", "kind": 3}', "a kind that is no text"),
        (b'{"prompt": "a", "max_tokens": 3}', "has the key 'max_tokens', which is not measured"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "p"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_prompts(file)


def test_the_bundled_pairs_and_their_conversions_have_prompts_of_their_own(tmp_path: Path) -> None:
    general = built_in("google/gemma-4-E4B-it", tmp_path)
    assert {prompt.kind for prompt in general.for_rows(1)} == {
        "code",
        "json",
        "list",
        "prose",
        "chat",
    }
    assert built_in("pocket-moe", tmp_path).source == "pocket"
    (tmp_path / "mlx_mtp.json").write_text(json.dumps({"target": {"source": "pocket"}}))
    assert built_in("pocket-4bit", tmp_path).source == "pocket"
    for found in (general, built_in("pocket", tmp_path)):
        assert len(set(found.for_rows(8))) == 16  # no prompt twice, whose beginning is shared


# Depths


def test_plain_decoding_is_always_measured() -> None:
    assert depths_to_run(None, True, False) == (0, 1, 2, 3, 4, 5, 6, 7, "auto")
    assert depths_to_run(("auto", 3), True, False) == (0, 3, "auto")
    assert depths_to_run((2,), False, True) == (0, 2)
    assert depths_to_run(None, False, False) == (0,)
    assert depths_to_run((0,), False, False) == (0,)


@pytest.mark.parametrize("asked", [(0, 2), ("auto",)])
def test_drafting_without_a_drafter_is_refused(asked: tuple[Depth, ...]) -> None:
    with pytest.raises(UsageError, match="There is no drafter"):
        depths_to_run(asked, False, False)


# Replay


@pytest.mark.parametrize("text", ["", "x", "1.1", "-0.1", "nan", ".9,", ",".join(["1"] * 8)])
def test_an_acceptance_is_up_to_seven_chances(text: str) -> None:
    with pytest.raises(UsageError, match="The acceptance to replay is"):
        parse_acceptance(text)


def test_a_script_is_the_text_spoiled_as_often_as_asked() -> None:
    acceptance, text = parse_acceptance(".9,.5,.7"), [3, 9, 0, 4] * 500
    lines = write_script(text, acceptance, vocabulary=10, seed="1")
    assert lines == write_script(text, acceptance, vocabulary=10, seed="1")
    assert lines != write_script(text, acceptance, vocabulary=10, seed="2")
    whole = lines[: len(text) - MAX_DEPTH]
    right = [text[start + 1 : start + 1 + MAX_DEPTH] for start in range(len(whole))]
    for place in range(MAX_DEPTH):
        kept = [line[place] == own[place] for line, own in zip(whole, right, strict=True)]
        asked = acceptance[min(place, 2)]
        assert abs(fmean(kept) - asked) < 4 * (asked * (1 - asked) / len(kept)) ** 0.5
    assert all(0 <= token < 10 for line in lines for token in line)


def test_chances_of_none_and_one_are_kept_exactly() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert write_script(text, [1.0], 10, "1")[0] == text[1:8]
    assert all(
        a != b for a, b in zip(write_script(text, [0.0], 10, "1")[0], text[1:], strict=False)
    )


# Counts


def round_of(depth: int, *rows: tuple[int, int, int], seconds: float = 0.01) -> Round:
    return Round(depth, seconds, True, 20, tuple(RowRound(*row) for row in rows))


def test_drafts_past_the_end_or_past_a_wrong_one_were_never_judged() -> None:
    rounds = [
        round_of(3, (0, 3, 4)),  # all kept, and the bonus token
        round_of(3, (0, 1, 2)),  # the second was wrong
        round_of(3, (0, 2, 2)),  # the answer ended with the second
        round_of(3, (0, 0, 1)),  # the first was wrong, and the answer ended there
    ]
    drafts = Drafts.of(rounds)
    assert (drafts.tried, drafts.kept) == ((4, 3, 1), (3, 2, 1))
    assert drafts.shares == pytest.approx([3 / 4, 3 / 4 * 2 / 3, 3 / 4 * 2 / 3])


def run_of(ids: list[list[int]], rounds: list[Round], seconds: float = 1.0) -> Run:
    stats = RequestStats(first_token_seconds=0.2)
    results = tuple(Result("", one, "length", 0, stats) for one in ids)
    tokens = sum(map(len, ids))
    return Run(results, tuple(rounds), seconds, RunStats(tokens=tokens, peak_bytes=7), None)


def test_speed_counts_rounds_of_all_rows_without_prefill() -> None:
    rounds = [
        round_of(0, (0, 0, 1), (1, 0, 1), seconds=0.5),
        round_of(0, (0, 0, 1), (1, 0, 1), seconds=1.5),
        round_of(0, (0, 0, 1), seconds=9),
        round_of(0, (0, 0, 1), (1, 0, 1), seconds=9)._replace(is_alone=False),
    ]
    run = run_of([[1, 2, 3, 4], [5, 6, 7]], rounds, seconds=20)
    cell = make_cell(2, 0, [run], ["a", "a"], None, lambda *_: 100)
    assert cell.tokens_per_second == 4 / 2
    assert cell.end_to_end == 7 / 20
    assert cell.round_seconds == 1
    assert (cell.round_bytes, cell.bytes_per_second) == (100, 100)
    assert cell.first_token_seconds is None


# Bandwidth


def test_a_worked_example() -> None:
    # 1,000 bytes of weights, 10 for each token looked up, full layers of 4 and sliding ones of 2
    # bytes per slot; a drafter of 50 bytes that reads 5 for each row and half as much K/V.
    reads = Reads(Reader(1000, 10, 4, 2), Reader(50, 5, 2, 1), ring=512)
    # 20 committed tokens and a verify attend over 128 slots.
    plain = 1000 + 2 * 10 + 2 * 128 * (4 + 2)
    assert reads.round(rows=2, depth=0, longest=20) == plain
    step = 50 + 2 * 5 + 2 * 128 * (2 + 1)
    assert reads.round(rows=2, depth=3, longest=20) == plain + 3 * 2 * 10 + 3 * step
    # 1,000 tokens attend over 1,024 slots, on sliding layers over the ring's 512.
    assert reads.round(rows=1, depth=0, longest=1000) == 1000 + 10 + 1024 * 4 + 512 * 2
    assert replace(reads, drafter=None).round(2, 3, 20) == plain + 3 * 2 * 10


def test_the_bundled_pairs_read_what_their_shapes_say() -> None:
    pocket = load("pocket")
    reads = Reads.of(pocket.target, pocket.drafter)
    row = 128 * 2  # bytes of an embedding in bfloat16
    per_layer = 8 * 64 * 2
    assert reads.target.token == row + per_layer
    assert reads.target.whole == target_bytes(pocket) - 1024 * per_layer  # the head reads the table
    assert (reads.target.full_slot, reads.target.sliding_slot) == (3 * 2 * 64 * 2, 5 * 2 * 32 * 2)
    assert reads.drafter is not None
    assert reads.drafter.token == row + 8 * 16 * row  # eight centroids of sixteen tokens

    experts = load("pocket-moe")
    reads = Reads.of(experts.target, experts.drafter)
    each = (
        6 * 3 * 128 * 64 * experts.target.body.layers[0].experts.switch_glu.up_proj.weight.itemsize
    )
    assert reads.target.token == row + 2 * each
    assert reads.target.whole == target_bytes(experts) - 8 * each
    assert reads.drafter is not None
    assert reads.drafter.token == row
    experts.target.experts.use(ExpertStrategy(stacked=True), experts.target.body.layers)
    assert Reads.of(experts.target, experts.drafter) == reads


# Experts


def timing(pairs: int, apart: float, is_sorted: float, stacked: float, both: float) -> ExpertTiming:
    """Seconds of the four ways; from 64 pairs on only those that are sorted."""
    seconds = {ExpertStrategy(0, False): is_sorted, ExpertStrategy(0, True): both}
    if pairs < 64:
        seconds |= {ExpertStrategy(64, False): apart, ExpertStrategy(64, True): stacked}
    return ExpertTiming(pairs // 8, pairs, pairs / 2, seconds)


@pytest.mark.parametrize(
    ("times", "strategy"),
    [
        ([], (64, False)),
        ([(8, 1, 1, 1, 1), (40, 1, 1, 1, 1)], (64, False)),
        ([(8, 1, 2, 0.9, 2), (40, 1, 2, 0.9, 2)], (64, True)),
        ([(8, 1, 2, 1, 2), (16, 1, 0.9, 1, 0.9), (40, 1, 0.8, 1, 0.8)], (16, False)),
        ([(8, 1, 0.5, 1, 0.5), (40, 1, 1.2, 1, 1.2)], (64, False)),
        ([(8, 1, 0.9, 0.8, 0.7), (40, 1, 0.9, 0.8, 0.7)], (8, True)),
    ],
)  # fmt: skip
def test_the_way_to_run_experts_is_the_fastest_measured(
    times: list[tuple[int, float, float, float, float]], strategy: tuple[int, bool]
) -> None:
    assert best_strategy([timing(*each) for each in times]) == strategy


def test_experts_are_timed_as_they_are_and_stay_so() -> None:
    llm = load("pocket-moe")
    first, *_, last = time_experts(llm.target, tokens=(1, 5, 40), repeat=1)
    assert (first.tokens, first.pairs, first.distinct) == (1, 2, 2)
    assert (last.tokens, last.pairs) == (40, 80)
    assert len(first.seconds) == 4
    assert len(last.seconds) == 2  # mlx-lm sorts there, too
    assert all(took > 0 for took in (*first.seconds.values(), *last.seconds.values()))
    assert "gate_proj" in llm.target.body.layers[0].experts.switch_glu
    assert time_experts(load("pocket").target) == []


def target_bytes(llm: LLM) -> int:
    return sum(array.nbytes for _, array in tree_flatten(llm.target.head.parameters()))


# Words


def report_of(*cells: Cell, replay: tuple[float, ...] | None = None) -> Report:
    return Report(
        Subject("google/gemma-4-E4B-it", "drafter", {"target": {"bits": 4}, "drafter": None}, "x"),
        Machine("Apple M9", "macOS 30.1", 64 * 2**30, "gpu"),
        {"mlx": "0.32.4", "mlx-lm": None, "mlx-mtp": "0.1.0", "python": "3.11"},
        BenchOptions((1,), (0, 2, "auto"), replay=replay),
        PromptSet((BenchPrompt("a", "b"),), 1, "general"),
        cells,
        (),
        ExpertStrategy(),
        False,
    )


def cell_of(depth: Depth, speeds: list[float], differing: int = 0, rows: int = 1) -> Cell:
    runs = [
        run_of([[1, 2]] * 4, [round_of(0, *[(0, 0, 1)] * rows, seconds=rows / speed)])
        for speed in speeds
    ]
    plain = [[1, 2]] * (4 - differing) + [[1, 3]] * differing
    return make_cell(rows, depth, runs, ["a"] * 4, plain, lambda *_: 100)


def test_the_verdict_compares_repeat_by_repeat() -> None:
    plain, draft = cell_of(0, [10, 20, 40]), cell_of(2, [15, 30, 60])
    report = report_of(plain, draft, cell_of("auto", [14.5, 29, 58]))
    assert report.speed_up(draft) == pytest.approx(1.5)
    assert report.verdict() == [
        "1 row: depth 2 is fastest, 30 tok/s and 1.50 times plain decoding, but the runs of the "
        "two overlap; auto came near it (97 %)."
    ]
    assert report_of(plain, cell_of(2, [5, 5, 5])).verdict() == [
        "1 row: no fixed depth beats plain decoding, 20 tok/s."
    ]


def test_a_busy_machine_is_said() -> None:
    rounds = [round_of(0, (0, 0, 1), seconds=seconds) for seconds in (1, 1, 1, 9)]
    cell = make_cell(1, 0, [run_of([[1]], rounds)], ["a"], None, lambda *_: 1)
    (warning,) = report_of(cell).warnings()
    assert "at depth 0 with 1 row the mean round took 3.0 times as long" in warning


def test_other_ids_are_said_loudly() -> None:
    report = report_of(cell_of(0, [10]), cell_of(2, [15], differing=1))
    (warning,) = report.warnings()
    assert warning.startswith("Answers differ from plain decoding's at 1 of 2 places")
    assert "depth 2 with 1 row: 1 of 4" in warning
    assert [cell["differing_prompts"] for cell in report.document()["cells"]] == [0, 1]
    assert warning in share_block(report)


def test_the_share_block_is_one_table_under_what_it_is_of() -> None:
    cells = cell_of(0, [10, 10]), cell_of(2, [15, 15]), cell_of("auto", [12, 12])
    lines = share_block(report_of(*cells)).splitlines()
    assert lines[0] == "**mlx-mtp bench**: google/gemma-4-E4B-it (4 bit) with drafter"
    assert lines[2] == (
        "Apple M9, 64 GB, macOS 30.1, MLX on GPU. mlx 0.32.4, mlx-mtp 0.1.0, python 3.11."
    )
    assert "| 1 | 10.0 | 2 | 15.0 | 1.50 | 12.0 | 1.00 |" in lines
    assert lines[-1] == "All ids equal plain decoding's."
    assert "eplayed" not in "\n".join(lines)


def test_a_replay_is_labelled_everywhere() -> None:
    report = report_of(cell_of(0, [10]), cell_of(2, [15]), replay=(0.9, 0.8))
    assert report.label == "replayed acceptance 0.9, 0.8; the drafter's time is in"
    assert "Replayed acceptance 0.9, 0.8" in share_block(report)
    assert report.document()["replayed"] == {"acceptance": [0.9, 0.8], "drafter_time": True}


def test_repeats_without_a_full_round_are_left_out_of_the_comparison() -> None:
    empty = run_of([[1, 2]] * 4, [])
    good = run_of([[1, 2]] * 4, [round_of(0, (0, 0, 1), seconds=0.1)])
    slow = run_of([[1, 2]] * 4, [round_of(0, (0, 0, 1), seconds=1.0)])
    kinds = ["a"] * 4
    plain = make_cell(1, 0, [good, slow], kinds, None, lambda *_: 1)
    drafts = make_cell(1, 2, [empty, good], kinds, None, lambda *_: 1)
    nothing = make_cell(1, "auto", [empty, empty], kinds, None, lambda *_: 1)
    report = report_of(plain, drafts, nothing)
    assert drafts.by_run == (None, pytest.approx(10))
    assert report.speed_up(drafts) == pytest.approx(10)  # of the second repeat
    assert (report.speed_up(nothing), nothing.tokens_per_second) == (None, None)
    assert "auto" not in report.verdict()[0]
