"""Drafting never changes a token: every depth, row count, chunking, neighbour and seed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from pairs import Loader, load_golden

from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.policy import FixedDepth
from mlx_mtp.decode.request import Job
from mlx_mtp.decode.sampling import RowSampling
from mlx_mtp.llm import LLM
from mlx_mtp.types import MAX_DEPTH, RunStats, SamplingParams

GREEDY = RowSampling()
MIXED = [
    RowSampling(1.0, 64, 0.95, seed=1),
    RowSampling(),
    RowSampling(1.0, 64, 0.95, seed=2),
    RowSampling(0.7, 20, 1.0, 0.05, seed=3),
    RowSampling(1.3, 0, 0.9, seed=4),
    RowSampling(1.0, 0, 1.0, seed=5),
    RowSampling(0.4, 5, 0.5, seed=2**32 - 1),
    RowSampling(1.0, 0, 0.8, 0.1, seed=7),
]


FULL_SIZE = [False, pytest.param(True, marks=pytest.mark.slow)]
"""Each property holds in the default run on a small scale, in the slow one at full size."""


def jobs_of(pair: Path, tokens: int, sampling: list[RowSampling] | None = None) -> list[Job]:
    """Eight jobs of unequal prompts, shorter and longer than the window."""
    golden = load_golden(pair)
    rows = sampling or [GREEDY] * len(golden.prompts)
    return [
        Job(tuple(prompt), tokens, row) for prompt, row in zip(golden.prompts, rows, strict=True)
    ]


def run(llm: LLM, jobs: list[Job], depth: int, rows: int = 8, chunk: int = 256) -> list[list[int]]:
    """The ids of each job."""
    return [
        [token for block in text for token in block]
        for text in blocks(llm, jobs, depth, rows, chunk)
    ]


def blocks(
    llm: LLM, jobs: list[Job], depth: int, rows: int = 8, chunk: int = 256
) -> list[list[tuple[int, ...]]]:
    """What each step brought each job: the first token, then one block per round."""
    drafter = llm.drafter if depth else None
    engine = Engine(llm.target, drafter, FixedDepth(depth), rows=rows, prefill_chunk=chunk)
    ids = [engine.add(job) for job in jobs]
    texts: dict[int, list[tuple[int, ...]]] = {job_id: [] for job_id in ids}
    while engine.has_work:
        for progress in engine.step():
            texts[progress.job_id].append(progress.token_ids)
    return [texts[job_id] for job_id in ids]


@pytest.mark.parametrize("full", FULL_SIZE)
def test_every_depth_gives_the_plain_ids(pair: Path, load_pair: Loader, full: bool) -> None:
    llm, jobs = load_pair(pair), jobs_of(pair, 200 if full else 24)
    jobs = jobs if full else jobs[2:7:2]
    plain = run(llm, jobs, 0)
    for depth in range(1, MAX_DEPTH + 1):
        assert run(llm, jobs, depth) == plain, depth


@pytest.mark.parametrize("full", FULL_SIZE)
def test_two_hundred_tokens_alone_and_together(pair: Path, load_pair: Loader, full: bool) -> None:
    llm, jobs = load_pair(pair), jobs_of(pair, 200)
    jobs = jobs if full else jobs[5:7]
    plain = run(llm, jobs, 0)
    assert run(llm, jobs, 4) == plain
    if full:
        assert [run(llm, [job], 7, rows=1)[0] for job in jobs] == plain


@pytest.mark.parametrize("full", FULL_SIZE)
def test_every_row_count_gives_the_plain_ids(pair: Path, load_pair: Loader, full: bool) -> None:
    llm, jobs = load_pair(pair), jobs_of(pair, 200 if full else 8)
    plain = run(llm, jobs, 0)
    for rows in range(1, 9) if full else (1, 2, 3, 5, 8):
        assert run(llm, jobs, 4, rows=rows) == plain, rows


@pytest.mark.parametrize("full", FULL_SIZE)
def test_every_prefill_chunk_gives_the_plain_ids(pair: Path, load_pair: Loader, full: bool) -> None:
    llm, jobs = load_pair(pair), jobs_of(pair, 200 if full else 6)
    jobs = jobs if full else jobs[1:6]
    plain = run(llm, jobs, 0)
    for chunk in (1, 7, 512):
        assert run(llm, jobs, 4, chunk=chunk) == plain, chunk


@pytest.mark.parametrize("full", FULL_SIZE)
def test_draft_position_changes_drafts_only(pair: Path, load_pair: Loader, full: bool) -> None:
    llm, jobs = load_pair(pair, draft_position="previous"), jobs_of(pair, 200 if full else 24)
    plain = run(llm, jobs, 0)
    for depth in (1, 4, 7) if full else (4,):
        assert run(llm, jobs, depth) == plain, depth


def test_bfloat16_too(pair: Path, load_pair: Loader) -> None:
    llm, jobs = load_pair(pair, "bfloat16"), jobs_of(pair, 16, MIXED)
    plain = run(llm, jobs, 0)
    assert run(llm, jobs, 5) == plain
    assert run(llm, jobs[3:4], 2, rows=1)[0] == plain[3]


@pytest.mark.parametrize("full", FULL_SIZE)
def test_sampled_ids_depend_on_logits_and_seed_alone(
    pair: Path, load_pair: Loader, full: bool
) -> None:
    llm, jobs = load_pair(pair), jobs_of(pair, 200 if full else 10, MIXED)
    alone = [run(llm, [job], 0, rows=1)[0] for job in jobs]
    for depth in (0, 1, 4, 7) if full else (0, 4):
        assert run(llm, jobs, depth) == alone, depth
    shuffled = random.Random(0).sample(range(8), 8)
    assert run(llm, [jobs[i] for i in shuffled], 3, rows=3) == [alone[i] for i in shuffled]


def test_a_seed_matters(pair: Path, load_pair: Loader) -> None:
    llm = load_pair(pair)
    job = jobs_of(pair, 32, MIXED)[0]
    other = replace(job, sampling=replace(job.sampling, seed=99))
    first, second = run(llm, [job, other], 2)
    assert first != second


def test_no_row_pays_for_its_neighbours(pair: Path, load_pair: Loader) -> None:
    """Each row accepts in every round of a batch just what it accepts alone."""
    llm, jobs = load_pair(pair), jobs_of(pair, 20, [GREEDY] * 4 + MIXED[:4])
    together = blocks(llm, jobs, 4)
    alone = [blocks(llm, [job], 4, rows=1)[0] for job in jobs]
    assert together == alone
    assert len({len(text) for text in together}) > 1  # or else this shows nothing


def test_a_stop_inside_a_block_ends_the_text_there(pair: Path, load_pair: Loader) -> None:
    llm, jobs = load_pair(pair), jobs_of(pair, 12)[:4]
    plain = run(llm, jobs, 0)
    for place in (0, 1, 2, 5, 9):
        stops = [frozenset({text[place]}) for text in plain]
        stopping = [replace(job, stop_ids=ids) for job, ids in zip(jobs, stops, strict=True)]
        expected = [
            text[: min(text.index(token) for token in ids) + 1]
            for text, ids in zip(plain, stops, strict=True)
        ]
        assert run(llm, stopping, 4) == expected
    for tokens in (1, 2, 6):
        short = [replace(job, max_tokens=tokens) for job in jobs]
        assert run(llm, short, 7) == [text[:tokens] for text in plain]


def test_a_row_is_taken_over_as_soon_as_it_is_free(pair: Path, load_pair: Loader) -> None:
    """While requests wait, all rows decode: the next prompt is ready before a row leaves."""
    llm = load_pair(pair)
    jobs = [replace(job, max_tokens=6 + i % 5) for i, job in enumerate(jobs_of(pair, 1) * 2)]
    jobs = [job for job in jobs if len(job.token_ids) < 64]
    stats = RunStats()
    engine = Engine(llm.target, llm.drafter, FixedDepth(1), rows=3, prefill_ahead=True, stats=stats)
    for job in jobs:
        engine.add(job)
    begun = False
    while engine.has_work:
        waiting, rounds, rows = len(engine._schedule.waiting), stats.rounds, stats.row_rounds
        begun = begun or len(engine._schedule.live) == 3
        engine.step()
        assert stats.rounds - rounds <= 1
        if begun and waiting > 1 and stats.rounds > rounds:
            assert stats.row_rounds - rows == 3


def test_generate_keeps_input_order_and_parameters(pair: Path, load_pair: Loader) -> None:
    llm, golden = load_pair(pair), load_golden(pair)
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    prompts = golden.prompts[:5]
    results = llm.generate_ids(prompts, params, batch_size=3, draft_depth=2)
    for prompt, result in zip(prompts, results, strict=True):
        (alone,) = llm.generate_ids([prompt], params, draft_depth=0)
        assert result.token_ids == alone.token_ids
        assert result.seed == 5
