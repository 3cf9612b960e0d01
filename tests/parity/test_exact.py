"""Exact decoding: the text is the same with and without drafts even where kernels are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairs import OWN_PAIRS, Loader
from shape_dependent import Call, shape_dependent
from test_lossless import MIXED, jobs_of
from test_schedules import Jumping

from mlx_mtp import SamplingParams, load
from mlx_mtp.config_json import FULL, SLIDING
from mlx_mtp.convert import Options, convert
from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.policy import DepthPolicy, FixedDepth
from mlx_mtp.decode.request import Job
from mlx_mtp.errors import UsageError
from mlx_mtp.llm import LLM
from mlx_mtp.model.span import ATTENDED_STEP, Run, round_up, runs_apart
from mlx_mtp.types import EXACT_DEPTH, EXACT_TOKENS, RunStats

FAMILIES_BY_DEFAULT = ("e2b", "moe")


def run(
    llm: LLM,
    jobs: Sequence[Job],
    policy: DepthPolicy,
    *,
    rows: int = 8,
    exact: bool = True,
    give_way_at: int = 0,
) -> tuple[list[list[int]], RunStats]:
    """The ids of each job, and counts; the first three join together, the others one by one. All
    lose their rows after `give_way_at` steps, if any."""
    ahead = len(jobs) > rows
    engine = Engine(llm.target, llm.drafter, policy, rows=rows, prefill_ahead=ahead, exact=exact)
    waiting, texts = list(jobs), dict[int, list[int]]()
    for _ in range(3):
        if waiting:
            texts[engine.add(waiting.pop(0))] = []
    steps = 0
    while engine.has_work or waiting:
        steps += 1
        if steps == give_way_at:
            engine._schedule.halve()
        if waiting:
            texts[engine.add(waiting.pop(0))] = []
        for progress in engine.step():
            assert progress.error is None
            texts[progress.job_id] += progress.token_ids
    return list(texts.values()), engine.stats


def alone(llm: LLM, jobs: Sequence[Job], *, exact: bool = True) -> list[list[int]]:
    """Each job by itself and plainly."""
    return [run(llm, [job], FixedDepth(0), rows=1, exact=exact)[0][0] for job in jobs]


@pytest.fixture
def jobs(pair: Path) -> list[Job]:
    return jobs_of_all_kinds(pair)


def jobs_of_all_kinds(pair: Path) -> list[Job]:
    """Unequal prompts and budgets, greedy and sampled. Some have more tokens together than a chunk
    of prefill, and a text crosses a step of the slots."""
    return [
        replace(job, token_ids=(job.token_ids * 50)[:prompt], max_tokens=8 + 4 * place)
        for place, (job, prompt) in enumerate(
            zip(jobs_of(pair, 1, MIXED)[2:6], (9, 150, 118, 40), strict=True)
        )
    ]


def test_drafts_and_neighbours_change_nothing_where_bits_depend_on_shapes(
    pair: Path, load_pair: Loader, jobs: list[Job]
) -> None:
    llm = load_pair(pair)
    with shape_dependent():
        plain = alone(llm, jobs)
        for depth in (0, EXACT_DEPTH):
            assert run(llm, jobs, FixedDepth(depth), rows=4)[0] == plain, depth
        jumping, stats = run(llm, jobs, Jumping((3, -1, 0, 4, 1, 2)), rows=3)
        assert jumping == plain
        assert stats.drafted
        assert stats.target_tokens == EXACT_TOKENS * stats.row_rounds


def test_without_it_such_bits_do_change_the_text(
    pair: Path, load_pair: Loader, jobs: list[Job]
) -> None:
    """Or the test above would show nothing."""
    llm = load_pair(pair)
    with shape_dependent():
        plain = alone(llm, jobs, exact=False)
        assert run(llm, jobs, FixedDepth(4), rows=4, exact=False)[0] != plain


def test_rows_that_gave_way_go_on_with_the_same_bits(load_pair: Loader) -> None:
    """What they had produced goes into the cache again as it came, across a step of the slots."""
    llm, jobs = load_pair(OWN_PAIRS / "e2b"), jobs_of_all_kinds(OWN_PAIRS / "e2b")
    long = [replace(job, max_tokens=24) for job in jobs]
    with shape_dependent():
        plain = alone(llm, long)
        again, stats = run(llm, long, FixedDepth(1), give_way_at=13)
    assert stats.preemptions > 1
    assert again == plain


def test_quantized_too(tmp_path: Path) -> None:
    pair = OWN_PAIRS / "moe"
    convert(pair / "target", tmp_path / "out", Options(bits=4, group_size=32), verify=False)
    llm, jobs = load(tmp_path / "out", dtype="float32"), jobs_of(pair, 24, MIXED)[1:5]
    with shape_dependent():
        plain = alone(llm, jobs)
        assert run(llm, jobs, FixedDepth(3))[0] == plain


def test_every_product_of_a_round_sees_the_same_shapes(
    pair: Path, load_pair: Loader, jobs: list[Job]
) -> None:
    """Plain or drafted, alone or among others; the drafter's own and the prefill's left out."""
    llm = load_pair(pair)

    def products(jobs: Sequence[Job], depth: int) -> set[Call]:
        found: set[Call] = set()
        with shape_dependent(strength=0) as calls, pytest.MonkeyPatch.context() as patch:
            forward, logits = llm.target.forward, llm.target.logits

            def watched_forward(tokens, cache, span, want="all"):  # type: ignore[no-untyped-def]
                calls.clear()
                out = forward(tokens, cache, span, want)
                if span.apart:
                    assert tokens.shape[1] == EXACT_TOKENS
                    found.update(calls)
                return out

            def watched_logits(hidden, *, apart=False):  # type: ignore[no-untyped-def]
                calls.clear()
                out = logits(hidden, apart=apart)
                if apart:
                    found.update(calls)
                return out

            patch.setattr(llm.target, "forward", watched_forward)
            patch.setattr(llm.target, "logits", watched_logits)
            run(llm, jobs, FixedDepth(depth))
        return found

    one = [jobs[2]]
    plain = products(one, 0)
    assert plain
    assert products(one, 3) == plain
    assert products([*one, *one, *one], 2) == plain


@given(
    committed=st.lists(st.integers(0, 3000), min_size=1, max_size=8),
    ring=st.sampled_from([512, 768, 1536]),
    length=st.integers(1, 8),
)
def test_the_slots_of_a_query_depend_on_its_position_only(
    committed: list[int], ring: int, length: int
) -> None:
    runs = runs_apart(committed, length, ring)
    for kind, most in ((FULL, 10**6), (SLIDING, ring)):
        assert [(run.first, run.rows) for run in runs[kind]] == [
            (row, 1) for row in range(len(committed))
        ]
        for run, tokens in zip(runs[kind], committed, strict=True):
            for position in range(tokens, tokens + length):
                assert slots_of(run, position) == min(round_up(position + 1, ATTENDED_STEP), most)


def slots_of(run: Run, position: int) -> int:
    """What a query attends: it sees no slot past its own."""
    return run.near if run.near and position < run.near else run.slots


def test_the_api_refuses_what_exact_cannot_do() -> None:
    llm = load("pocket", exact=True)
    with pytest.raises(UsageError, match="draft_depth is 5, and exact decoding verifies 5 tokens"):
        llm.generate(["Spell cat."], draft_depth=5)
    params = SamplingParams(temperature=0, max_tokens=20)
    exact = llm.generate(["Spell cat.", "Count to 9."], params)
    assert all(0 < result.stats.drafted <= 4 * result.stats.rounds for result in exact)
    session = llm.session()
    llm.exact = False
    messages = [{"role": "user", "content": "Spell cat."}]
    with pytest.raises(UsageError, match="exact decoding verifies 5 tokens"):
        session.send(messages, params, draft_depth=7)
    for depth in (4, "auto"):
        ids = [
            token
            for chunk in session.send(messages, params, draft_depth=depth)
            for token in chunk.token_ids
        ]
        assert ids == exact[0].token_ids
    assert [one.token_ids for one in llm.generate(["Spell cat.", "Count to 9."], params)] == [
        one.token_ids for one in exact
    ]
