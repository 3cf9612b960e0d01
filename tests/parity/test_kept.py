"""A row kept between jobs: whatever it held before, a job's ids are those of a row of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pairs import Loader
from test_lossless import MIXED, jobs_of

from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.kept import KeptRow
from mlx_mtp.decode.policy import FixedDepth
from mlx_mtp.decode.request import Job
from mlx_mtp.llm import LLM
from mlx_mtp.model.span import ring_slots

PRODUCED = 6

FAMILIES_BY_DEFAULT = ("e2b", "moe")


class Row:
    """Runs jobs through one kept row and, for comparison, each through a row of its own."""

    def __init__(self, llm: LLM, depth: int = 4) -> None:
        self.llm = llm
        self.kept = KeptRow(None)
        self.engine = Engine(llm.target, llm.drafter, FixedDepth(depth), rows=1, prefixes=self.kept)

    def run(self, job: Job, *marks: int) -> tuple[int, ...]:
        """The ids of its prompt and output; checks the output."""
        job_id, produced, held = self.engine.add(job), list[int](), self.kept.held(job.token_ids)
        self.kept.mark(job.token_ids, marks or [len(job.token_ids) - 1])
        while self.engine.has_work:
            self.kept.protect(held, len(job.token_ids))
            for progress in self.engine.step():
                produced += progress.token_ids
            held = self.engine.held(job_id)
        ids = (*job.token_ids, *produced)
        self.kept.hold(ids[:-1])
        fresh = Engine(self.llm.target, None, FixedDepth(0), rows=1)
        fresh.add(job)
        expected: list[int] = []
        while fresh.has_work:
            for progress in fresh.step():
                expected += progress.token_ids
        assert produced == expected
        return ids


def test_a_job_goes_on_from_wherever_its_ids_part_from_the_rows(
    pair: Path, load_pair: Loader
) -> None:
    llm = load_pair(pair)
    row, jobs = Row(llm), jobs_of(pair, PRODUCED, MIXED)
    filler = tuple((jobs[7].token_ids * 150)[:600])  # more than any ring of these pairs holds
    ring = ring_slots(llm.target.config.sliding_window)
    assert len(filler) > ring

    def job(n: int, ids: tuple[int, ...]) -> Job:
        return replace(jobs[n], token_ids=ids)

    head = row.run(job(0, filler[:90]))
    assert row.kept.restored == 0
    row.run(job(1, (*head, *filler[:20])))  # goes on
    assert row.kept.restored == len(head) - 1
    row.run(job(2, (*head, *filler[5:40])))  # a little back, within the slack
    assert row.kept.restored == len(head)
    row.run(job(3, (*head, *filler)), len(head))  # far past the ring
    assert row.kept.nbytes > 0
    row.run(job(4, (*head, *filler[10:33])))  # all the way back: a copy reaches it
    assert row.kept.restored == len(head)
    long = row.run(job(5, (*head, *filler)))
    row.kept.clear()  # no memory for copies: the row as it is
    row.run(job(6, (*long, 7, 8)))
    assert row.kept.restored == len(long) - 1
    row.kept.clear()
    row.run(job(7, (*head, *filler[3:9])))  # nothing reaches that far
    assert row.kept.restored == 0


def test_a_job_that_is_cancelled_leaves_a_row_to_go_on_from(pair: Path, load_pair: Loader) -> None:
    """In prefill and while it decodes."""
    llm = load_pair(pair)
    jobs = jobs_of(pair, 40, MIXED)
    prompt = tuple((jobs[7].token_ids * 150)[:700])
    for steps in (2, 5):
        row = Row(llm)
        job_id, produced, held = row.engine.add(replace(jobs[0], token_ids=prompt)), list[int](), 0
        for _ in range(steps):
            row.kept.protect(held, len(prompt))
            for progress in row.engine.step():
                produced += progress.token_ids
            held = row.engine.held(job_id)
        row.engine.cancel(job_id)
        row.engine.step()
        assert not row.engine.has_work
        row.kept.hold((*prompt, *produced)[:held])
        assert held == (len(prompt) + len(produced) - 1 if produced else 256 * steps)
        row.run(replace(jobs[1], token_ids=(*prompt, *produced, 5, 6), max_tokens=PRODUCED))
        assert row.kept.restored == held
