"""A shared beginning is prefilled once, and nobody can tell from the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st
from pairs import Loader
from test_lossless import MIXED, blocks, jobs_of

from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.policy import FixedDepth
from mlx_mtp.decode.prefix import MIN_SHARED, common
from mlx_mtp.decode.request import Job
from mlx_mtp.llm import LLM
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.snapshot import Snapshot
from mlx_mtp.types import RunStats

FAMILIES_BY_DEFAULT = ("e2b", "dense")


def run(llm: LLM, jobs: list[Job], rows: int) -> tuple[list[list[int]], RunStats]:
    stats = RunStats()
    engine = Engine(
        llm.target, llm.drafter, FixedDepth(4), rows=rows, prefill_ahead=True, stats=stats
    )
    ids = [engine.add(job) for job in jobs]
    texts: dict[int, list[int]] = {job_id: [] for job_id in ids}
    while engine.has_work:
        for progress in engine.step():
            texts[progress.job_id] += progress.token_ids
    return [texts[job_id] for job_id in ids], stats


def with_prefix(pair: Path, length: int) -> list[Job]:
    """Eight jobs whose prompts begin alike and go on differently."""
    jobs = jobs_of(pair, 6, MIXED)
    head = (jobs[7].token_ids * 50)[:length]
    return [replace(job, token_ids=(*head, *job.token_ids[:40])) for job in jobs]


def test_a_shared_prefix_is_prefilled_once(pair: Path, load_pair: Loader) -> None:
    llm = load_pair(pair)
    for length in (MIN_SHARED + 8, 300):  # below and above a chunk, a ring that wraps
        jobs = with_prefix(pair, length)[:5]
        alone = [run(llm, [job], 1)[0][0] for job in jobs]
        for rows in (1, 8):
            texts, stats = run(llm, jobs, rows)
            assert texts == alone
            prompts = sum(len(job.token_ids) for job in jobs)
            assert stats.prefill_tokens + stats.shared_tokens == prompts
            assert stats.shared_tokens >= 4 * length


def test_two_prefixes_in_turn(pair: Path, load_pair: Loader) -> None:
    llm = load_pair(pair)
    first, second = with_prefix(pair, 90), with_prefix(pair, 60)
    second = [replace(job, token_ids=(job.token_ids[0], *job.token_ids[2:])) for job in second]
    jobs = [job for both in zip(first, second, strict=True) for job in both]
    alone = [run(llm, [job], 1)[0][0] for job in jobs]
    texts, stats = run(llm, jobs, 4)
    assert texts == alone
    assert stats.shared_tokens >= 7 * 90 + 7 * 50


def test_a_prefix_serves_those_only_that_have_all_of_it(pair: Path, load_pair: Loader) -> None:
    llm = load_pair(pair)
    first, second, third = with_prefix(pair, 59)[:3]  # and one token more
    ids = third.token_ids
    third = replace(third, token_ids=(*ids[:59], ids[59] ^ 1, *ids[60:]))  # all but its last
    alone = [run(llm, [job], 1)[0][0] for job in (first, second, third)]
    stats = RunStats()
    engine = Engine(llm.target, llm.drafter, FixedDepth(4), rows=1, stats=stats)
    texts: dict[int, list[int]] = {}
    for together in ((first, second), (third,)):  # so that the third is not looked ahead to
        texts |= {engine.add(job): [] for job in together}
        while engine.has_work:
            for progress in engine.step():
                texts[progress.job_id] += progress.token_ids
    assert [*texts.values()] == alone
    assert stats.shared_tokens == 60


def test_short_prefixes_are_not_copied(pair: Path, load_pair: Loader) -> None:
    llm = load_pair(pair)
    jobs = [replace(job, token_ids=(2, 7, 9, *job.token_ids[1:])) for job in jobs_of(pair, 4)]
    _, stats = run(llm, jobs, 8)
    assert stats.shared_tokens == 0


def test_short_prompts_are_prefilled_together(pair: Path, load_pair: Loader) -> None:
    """One forward for several prompts of similar length: weights are read once for all of them."""
    llm = load_pair(pair)
    jobs = [
        replace(job, token_ids=(job.token_ids * 20)[i : i + 20 + i % 4])
        for i, job in enumerate(jobs_of(pair, 10, MIXED))
    ]
    alone = [blocks(llm, [job], 4, rows=1)[0] for job in jobs]
    assert blocks(llm, jobs, 4) == alone  # and as many drafts are kept in each round
    _, stats = run(llm, jobs, 8)
    assert stats.prefill_forwards == stats.prefill_reads == 1
    assert stats.prefill_tokens == sum(len(job.token_ids) for job in jobs)


def test_a_snapshot_is_written_in_place(pair: Path, load_pair: Loader) -> None:
    """Taking one costs its own bytes, putting it back costs none: the cache is not copied."""
    target = load_pair(pair).target
    cache = SlotCache(target.config, 32, target.dtype, 4096)
    whole = sum(buffer.nbytes for buffer in cache.keys + cache.values)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    snapshot = Snapshot.take(cache, 3, 100)
    assert mx.get_active_memory() - before <= 1.5 * snapshot.nbytes
    snapshot.restore(cache, 31)
    assert mx.get_peak_memory() - before < 4 * snapshot.nbytes < whole


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_common_prefix(first: list[int], second: list[int]) -> None:
    length = common(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]
