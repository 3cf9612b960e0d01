"""Any schedule of requests: each gets the ids that it gets alone, plainly decoded.

Prompts that begin alike and that do not, stops, budgets, seeds, joins, cancels, numbers of rows,
chunks, memory limits, and depths that jump from round to round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import Loader
from test_lossless import MIXED

from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.policy import FixedDepth, Plan
from mlx_mtp.decode.request import Job
from mlx_mtp.llm import LLM
from mlx_mtp.model.memory import MemoryBudget
from mlx_mtp.types import MAX_DEPTH, MAX_ROWS, FinishReason

LONGEST = 16
"""Tokens that a request produces at most."""
LENGTHS = (1, 5, 14, 17, 29, 45, 46, 70, 300, 560)
"""Of the prompts: the windows of these pairs are shorter than most, their rings than the last."""
HEAD = 41
"""Tokens that every other prompt begins with, if it is longer: enough to be shared."""

FAMILIES_BY_DEFAULT = ("e2b", "moe")


class Jumping(FixedDepth):
    """Goes through a list of plans again and again; nothing may depend on what it chooses."""

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__(0)
        object.__setattr__(self, "depths", cycle(depths))

    def choose(self, rows: int) -> Plan:
        depth = next(self.depths)
        return Plan(max(depth, 0), int(depth < 0))  # -1: a plain round with a shadow


@dataclass(frozen=True)
class Arrival:
    """A request of a schedule.

    Attributes:
        number: of the job.
        max_tokens: its budget.
        stop: the token that its text has at this place ends it.
        after: steps between the one before and this.
        cancel: steps after which it is cancelled.
    """

    number: int
    max_tokens: int
    stop: int | None
    after: int
    cancel: int | None


@dataclass(frozen=True)
class Schedule:
    """What an engine is made of, and what comes to it. `held`: rows that memory is there for."""

    arrivals: list[Arrival]
    depths: list[int]
    rows: int
    ahead: bool
    chunk: int
    held: int | None


arrivals = st.builds(
    Arrival,
    number=st.integers(0, len(LENGTHS) - 1),
    max_tokens=st.integers(1, LONGEST),
    stop=st.none() | st.integers(0, LONGEST - 1),
    after=st.sampled_from([0, 0, 0, 1, 2, 5]),
    cancel=st.none() | st.none() | st.none() | st.integers(0, 12),
)
schedules = st.builds(
    Schedule,
    arrivals=st.lists(arrivals, min_size=6, max_size=14),
    depths=st.lists(st.integers(-1, MAX_DEPTH), min_size=1, max_size=6),
    rows=st.integers(1, MAX_ROWS),
    ahead=st.booleans(),
    chunk=st.sampled_from([1, 7, 32, 100, 256, 256]),
    held=st.none() | st.integers(1, 3),
)


@dataclass
class Bank:
    """Jobs for a pair, and what each of them gets alone."""

    llm: LLM
    jobs: list[Job] = field(default_factory=list)
    alone: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = Random(3)
        head = self._ids(rng, HEAD)
        for number, length in enumerate(LENGTHS):
            ids = self._ids(rng, length)
            if number % 2 and length > HEAD:
                ids = head + ids[HEAD:]
            job = Job(tuple(ids), LONGEST, MIXED[number % len(MIXED)])
            self.jobs.append(job)
            engine = Engine(self.llm.target, None, FixedDepth(0), rows=1)
            engine.add(job)
            self.alone.append([])
            while engine.has_work:
                self.alone[-1] += [t for progress in engine.step() for t in progress.token_ids]

    def _ids(self, rng: Random, length: int) -> list[int]:
        return [rng.randrange(self.llm.target.config.vocab_size) for _ in range(length)]

    def job(self, arrival: Arrival) -> tuple[Job, list[int], FinishReason]:
        """A request, the ids it must get and why it ends."""
        text = self.alone[arrival.number]
        stops = frozenset[int]() if arrival.stop is None else frozenset({text[arrival.stop]})
        job = replace(self.jobs[arrival.number], max_tokens=arrival.max_tokens, stop_ids=stops)
        text = text[: arrival.max_tokens]
        if stop := next((place for place, token in enumerate(text, 1) if token in stops), 0):
            return job, text[:stop], "stop"
        return job, text, "length"


def run(bank: Bank, schedule: Schedule) -> None:
    """Take an engine through a schedule, and check what everybody got."""
    target, budget = bank.llm.target, None
    if schedule.held is not None:
        budget = MemoryBudget(target.config, target.dtype.size, 0, 0)
        budget.limit = budget.needed(schedule.held, 768)
    engine = Engine(
        target,
        bank.llm.drafter,
        Jumping(schedule.depths),
        rows=schedule.rows,
        prefill_ahead=schedule.ahead,
        prefill_chunk=schedule.chunk,
        budget=budget,
    )
    waiting, pause = list(schedule.arrivals), schedule.arrivals[0].after
    asked: dict[int, Arrival] = {}
    age: dict[int, int] = {}
    texts: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}
    while waiting or engine.has_work:
        while waiting and not pause:
            arrival = waiting.pop(0)
            job_id = engine.add(bank.job(arrival)[0])
            asked[job_id], age[job_id], texts[job_id] = arrival, 0, []
            pause = waiting[0].after if waiting else 0
        pause = max(pause - 1, 0)
        for job_id, arrival in asked.items():
            if age[job_id] == arrival.cancel:
                engine.cancel(job_id)
            age[job_id] += 1
        for progress in engine.step():
            assert progress.job_id not in reasons
            assert progress.error is None
            texts[progress.job_id] += progress.token_ids
            if progress.finish_reason is not None:
                reasons[progress.job_id] = progress.finish_reason
                assert progress.stats is not None
                assert progress.stats.tokens == len(texts[progress.job_id])
    assert set(reasons) == set(asked)
    for job_id, arrival in asked.items():
        _, expected, reason = bank.job(arrival)
        if reasons[job_id] == "cancelled":
            assert arrival.cancel is not None
            assert texts[job_id] == expected[: len(texts[job_id])]
        else:
            assert (texts[job_id], reasons[job_id]) == (expected, reason)


@pytest.mark.parametrize("examples", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_any_schedule_gives_the_ids_of_plain_decoding(
    pair: Path, load_pair: Loader, examples: int
) -> None:
    bank = Bank(load_pair(pair))

    @settings(deadline=None, max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(schedules)
    def holds(schedule: Schedule) -> None:
        run(bank, schedule)

    holds()
