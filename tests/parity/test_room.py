"""Too little memory costs time, never a token: rows give way, halve, and go on where they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from pairs import Loader
from test_lossless import MIXED, jobs_of

from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.policy import FixedDepth
from mlx_mtp.decode.request import Job
from mlx_mtp.errors import ResourceError
from mlx_mtp.llm import LLM
from mlx_mtp.model.memory import MemoryBudget
from mlx_mtp.model.target import Target
from mlx_mtp.types import RunStats

FAMILIES_BY_DEFAULT = ("e2b", "moe")
REFUSED = "[metal::malloc] Unable to allocate 123 bytes."


def engine_of(llm: LLM, rows: int = 8, limit: int | None = None) -> Engine:
    target = llm.target
    budget = None if limit is None else MemoryBudget(target.config, target.dtype.size, 0, limit)
    return Engine(
        target, llm.drafter, FixedDepth(3), rows=rows, prefill_ahead=True, budget=budget,
        stats=RunStats(),
    )  # fmt: skip


def run(engine: Engine, jobs: list[Job]) -> tuple[list[list[int]], list[Any]]:
    """Ids and errors of each job."""
    ids = [engine.add(job) for job in jobs]
    texts: dict[int, list[int]] = {job_id: [] for job_id in ids}
    errors: dict[int, Any] = dict.fromkeys(ids)
    while engine.has_work:
        for progress in engine.step():
            texts[progress.job_id] += progress.token_ids
            errors[progress.job_id] = progress.error or errors[progress.job_id]
        check_budget(engine)
    return [texts[job_id] for job_id in ids], [errors[job_id] for job_id in ids]


def check_budget(engine: Engine) -> None:
    room = engine._schedule.room
    if room.budget is not None and room.cache is not None:
        needed = room.budget.needed(room.cache.rows, room.cache.capacity)
        assert needed + room.prefixes.nbytes <= room.budget.limit


@pytest.fixture
def jobs(pair: Path) -> list[Job]:
    """Unequal budgets, half of them beyond the slots that prompt and budget are rounded up to."""
    return [replace(job, max_tokens=12 + 5 * i) for i, job in enumerate(jobs_of(pair, 1, MIXED))]


def test_rows_are_admitted_within_the_budget(
    pair: Path, load_pair: Loader, jobs: list[Job]
) -> None:
    llm = load_pair(pair)
    free, _ = run(engine_of(llm), jobs)
    budget = MemoryBudget(llm.target.config, llm.target.dtype.size, 0, 1)
    for rows, slots in ((1, 512), (4, 256)):
        engine = engine_of(llm, limit=budget.needed(rows, slots))
        texts, errors = run(engine, jobs)
        assert not any(errors)
        assert texts == free


def test_the_youngest_rows_give_way(
    pair: Path, load_pair: Loader, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reserving little makes rows outgrow the budget while they decode."""
    monkeypatch.setattr("mlx_mtp.decode.schedule.RESERVE_TOKENS", 1)
    llm = load_pair(pair)
    long = [replace(job, token_ids=(job.token_ids * 100)[:240]) for job in jobs[:5]]
    free, _ = run(engine_of(llm), long)
    budget = MemoryBudget(llm.target.config, llm.target.dtype.size, 0, 1)
    engine = engine_of(llm, limit=budget.needed(2, 512))
    texts, errors = run(engine, long)
    assert engine.stats.preemptions
    assert not any(errors)
    assert texts == free


def test_what_does_not_fit_alone_ends_and_the_others_go_on(
    pair: Path, load_pair: Loader, jobs: list[Job]
) -> None:
    llm = load_pair(pair)
    budget = MemoryBudget(llm.target.config, llm.target.dtype.size, 0, 1)
    huge = replace(jobs[0], token_ids=(jobs[1].token_ids * 200)[:1000])
    mixed = [jobs[0], huge, *jobs[1:3]]
    free, _ = run(engine_of(llm), [jobs[0], *jobs[1:3]])
    texts, errors = run(engine_of(llm, limit=budget.needed(2, 512)), mixed)
    assert isinstance(errors[1], ResourceError)
    assert [texts[0], *texts[2:]] == free
    assert [errors[0], *errors[2:]] == [None] * 3


class Failing:
    """A target's forward that fails to allocate where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        self.calls = 0
        self.at: set[int] = set()
        self.most_rows = 8
        forward = Target.forward

        def failing(target: Target, tokens: mx.array, *rest: Any) -> Any:
            self.calls += 1
            if self.calls in self.at or tokens.shape[0] > self.most_rows:
                raise RuntimeError(REFUSED)
            return forward(target, tokens, *rest)

        monkeypatch.setattr(Target, "forward", failing)


def test_a_failed_allocation_halves_the_rows(
    load_pair: Loader, pair: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load_pair(pair)
    free, _ = run(engine_of(llm), jobs)
    failing = Failing(monkeypatch, llm)
    failing.most_rows = 2
    engine = engine_of(llm)
    texts, errors = run(engine, jobs)
    assert texts == free
    assert not any(errors)
    assert 1 <= engine.rows <= 2


def test_any_forward_may_fail_once(
    load_pair: Loader, pair: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, few = load_pair(pair), [replace(job, max_tokens=9) for job in jobs[:5]]
    free, _ = run(engine_of(llm), few)
    failing = Failing(monkeypatch, llm)
    run(engine_of(llm), few)
    for at in range(1, failing.calls + 1, 4):
        failing.calls, failing.at = 0, {at}
        texts, errors = run(engine_of(llm), few)
        assert texts == free, at
        assert not any(errors)


def test_one_row_that_finds_no_memory_ends_with_an_error(
    load_pair: Loader, pair: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load_pair(pair)
    Failing(monkeypatch, llm).most_rows = 0
    texts, errors = run(engine_of(llm), jobs[:3])
    assert texts == [[], [], []]
    assert all(isinstance(error, ResourceError) for error in errors)


def test_other_errors_are_not_taken_for_memory(
    load_pair: Loader, pair: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load_pair(pair)

    def broken(*_: Any) -> Any:
        raise RuntimeError("[matmul] Last dimension of first input must match.")

    monkeypatch.setattr(Target, "forward", broken)
    with pytest.raises(RuntimeError, match="matmul"):
        run(engine_of(llm), jobs[:1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_covers_what_is_used(load_pair: Loader, pair: Path, dtype: str) -> None:
    if pair.name == "moe" and dtype == "bfloat16":
        pytest.skip("bf16 experts do not run on MLX's CPU backend")
    llm = load_pair(pair, dtype)
    engine = engine_of(llm)
    long = [replace(job, token_ids=(job.token_ids * 200)[:600]) for job in jobs_of(pair, 30, MIXED)]
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run(engine, long)
    cache = engine._schedule.cache
    budget = MemoryBudget(llm.target.config, llm.target.dtype.size, 0, 1)
    used, needed = mx.get_peak_memory() - before, budget.needed(cache.rows, cache.capacity)
    assert used <= needed <= 12 * used
