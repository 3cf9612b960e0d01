"""One run: a set of prompts through an engine of its own. Owns: what is noted of each round.

A round is timed as a whole step of the engine, with all that the host does in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.answer import Answer
from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.policy import DepthPolicy, Plan
from mlx_mtp.decode.request import Progress
from mlx_mtp.llm import LLM
from mlx_mtp.types import Request, Result, RunStats, SamplingParams

PEAK = "peak_bytes"
"""The one count of RunStats that is a maximum."""


class RowRound(NamedTuple):
    """What a round brought one row.

    Attributes:
        prompt: which of the run's prompts.
        kept: drafts that equalled the target's choices, up to the first that did not.
        tokens: of the answer; fewer than kept + 1 where the answer ended.
    """

    prompt: int
    kept: int
    tokens: int


class Round(NamedTuple):
    """A round as it was.

    Attributes:
        depth: tokens drafted for each row.
        seconds: of the engine's step that it was part of.
        is_alone: nothing was prefilled in that step.
        longest: committed tokens of the longest row before it.
        rows: of the live rows.
    """

    depth: int
    seconds: float
    is_alone: bool
    longest: int
    rows: tuple[RowRound, ...]

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


@dataclass(frozen=True)
class Run:
    """What a run brought.

    Attributes:
        results: in the order of the prompts; their texts are left out.
        seconds: from the first prompt's admission to the last token.
        stats: counts of this run alone.
        parked: why the depth policy decoded plainly at the end.
    """

    results: tuple[Result, ...]
    rounds: tuple[Round, ...]
    seconds: float
    stats: RunStats
    parked: str | None


def joined(runs: Sequence[Run]) -> Run:
    """Runs one after the other as one; their prompts are numbered through."""
    rounds: list[Round] = []
    stats, before = RunStats(), 0
    for run in runs:
        for one in run.rounds:
            rows = tuple(row._replace(prompt=row.prompt + before) for row in one.rows)
            rounds.append(one._replace(rows=rows))
        before += len(run.results)
        for item in fields(RunStats):
            mine, other = getattr(stats, item.name), getattr(run.stats, item.name)
            setattr(stats, item.name, max(mine, other) if item.name == PEAK else mine + other)
    results = tuple(result for run in runs for result in run.results)
    return Run(results, tuple(rounds), sum(run.seconds for run in runs), stats, runs[-1].parked)


@dataclass
class Recorder:
    """A depth policy that passes everything on to another one and remembers the last round."""

    policy: DepthPolicy
    depth: int = 0
    kept: Sequence[int] = field(default_factory=tuple)

    @property
    def parked(self) -> str | None:
        return self.policy.parked

    def choose(self, rows: int) -> Plan:
        return self.policy.choose(rows)

    def observe(self, rows: int, plan: Plan, seconds: float, accepted: Sequence[int]) -> None:
        self.depth, self.kept = plan.depth, tuple(accepted)
        self.policy.observe(rows, plan, seconds, accepted)

    def observe_shadow(self, agreed: Sequence[int], drafted: int) -> None:
        self.policy.observe_shadow(agreed, drafted)


@dataclass
class _Track:
    """One prompt under way."""

    prompt: int
    answer: Answer
    length: int
    produced: int = 0


def run_prompts(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    rows: int,
    policy: DepthPolicy,
    scripts: Sequence[mx.array] | None = None,
) -> Run:
    """Answer all prompts, up to `rows` of them together, as `LLM.generate` does.

    With one row they are answered one after the other, as in a conversation; with several, the
    next one is prefilled while the others decode.

    Args:
        prompts: token ids.
        params: of all of them.
        policy: chooses the depths.
        scripts: drafts to verify instead of the drafter's, one for each prompt.

    Raises:
        MlxMtpError: a prompt cannot be served.
    """
    recorder, stats = Recorder(policy), RunStats()
    mx.reset_peak_memory()
    engine = Engine(
        llm.target,
        llm.drafter,
        recorder,
        rows=rows,
        prefill_ahead=rows > 1,
        suppress=llm.defaults.suppress_tokens,
        stats=stats,
        budget=llm.memory,
    )
    tracks: dict[int, _Track] = {}
    context = llm.target.config.max_position_embeddings
    for number, ids in enumerate(prompts):
        request = Request(token_ids=list(ids))
        answer = Answer(request, params, llm.defaults, context, lambda: llm.tokenizer)
        script = None if scripts is None else scripts[number]
        job_id = engine.add(replace(answer.job, script=script))
        tracks[job_id] = _Track(number, answer, len(ids))
    rounds: list[Round] = []
    began = last = perf_counter()
    while engine.has_work:
        prefills, done = stats.prefill_forwards, stats.rounds
        recorder.depth, recorder.kept = 0, ()
        progress = engine.step()
        now = perf_counter()
        noted = _take_in(progress, tracks, recorder.kept)
        if stats.rounds > done:
            longest = max((longest for _, longest in noted), default=0)
            rows_noted = tuple(row for row, _ in noted)
            alone = stats.prefill_forwards == prefills
            rounds.append(Round(recorder.depth, now - last, alone, longest, rows_noted))
        last = now
    results = tuple(replace(track.answer.result(), text="") for track in tracks.values())
    return Run(results, tuple(rounds), last - began, stats, recorder.parked)


def _take_in(
    progress: Sequence[Progress], tracks: dict[int, _Track], kept: Sequence[int]
) -> list[tuple[RowRound, int]]:
    """What a step's round brought each row, and the row's committed tokens before it.

    A prompt's first token comes from its prefill, not from a round; rows come in their order.
    """
    noted: list[tuple[RowRound, int]] = []
    for one in progress:
        if one.error is not None:
            raise one.error
        track = tracks[one.job_id]
        track.answer.advance(one)
        if track.produced:
            drafts = kept[len(noted)] if kept else 0
            row = RowRound(track.prompt, drafts, len(one.token_ids))
            noted.append((row, track.length + track.produced - 1))
        track.produced += len(one.token_ids)
    return noted
