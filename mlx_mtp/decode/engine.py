"""The engine. Owns the step: at most one chunk of prefill, then one round of all live rows.

Rows join and leave between rounds; each decodes with its own parameters and accepts its own number
of drafts. Who is in which row is the schedule's. Knows ids only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import cast

import mlx.core as mx

from mlx_mtp.decode.policy import DepthPolicy, Plan
from mlx_mtp.decode.prefix import Prefixes, Unshared
from mlx_mtp.decode.proposer import Proposer
from mlx_mtp.decode.request import Job, Progress, Running
from mlx_mtp.decode.room import Room, is_out_of_memory
from mlx_mtp.decode.round import Rows, launch, read, run_round, tokens_verified
from mlx_mtp.decode.sampling import Sampler
from mlx_mtp.decode.schedule import Schedule
from mlx_mtp.errors import MlxMtpError, UsageError, VerificationError
from mlx_mtp.model.drafter import Drafter
from mlx_mtp.model.memory import MemoryBudget
from mlx_mtp.model.span import PREFILL_CHUNK
from mlx_mtp.model.target import Target
from mlx_mtp.types import EXACT_TOKENS, MAX_ROWS, FinishReason, RunStats


class Engine:
    """Runs jobs through one target and its drafter.

    Args:
        target: the target.
        drafter: None decodes plainly, or with the drafts of the jobs' scripts.
        depth: chooses how many tokens to draft and learns from what came of it; not asked where
            nothing can draft.
        rows: most requests that decode together, 1..MAX_ROWS.
        suppress: ids that are never produced.
        stats: counters to add to.
        prefill_ahead: hold one more row of K/V, so that the next request is prefilled while all
            rows decode and takes over a row as soon as one leaves.
        prefill_chunk: most prompt tokens per forward, PREFILL_CHUNK at most; any value gives the
            same bits.
        budget: what rows and contexts are admitted within; None sets no limit.
        prefixes: where prompts find their beginning; None keeps those that several share.
        exact: exact rounds (decode/round.py), and each prompt is prefilled alone and whole.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        depth: DepthPolicy,
        *,
        rows: int = MAX_ROWS,
        suppress: Sequence[int] = (),
        stats: RunStats | None = None,
        prefill_ahead: bool = False,
        prefill_chunk: int = PREFILL_CHUNK,
        budget: MemoryBudget | None = None,
        prefixes: Prefixes | None = None,
        exact: bool = False,
    ) -> None:
        if not 1 <= rows <= MAX_ROWS:
            raise UsageError(f"A batch of {rows} rows.", f"Give 1 to {MAX_ROWS} rows.")
        if prefill_chunk < 1:
            raise UsageError(f"A chunk of {prefill_chunk}.", "Give at least one token.")
        self.target = target
        self.suppress = suppress
        self.stats = RunStats() if stats is None else stats
        self.prefill_chunk = min(prefill_chunk, PREFILL_CHUNK)
        self.exact = exact
        room = Room(target, budget, Unshared() if exact and prefixes is None else prefixes)
        self._schedule = Schedule(room, rows, prefill_ahead, self.stats, together=not exact)
        self._proposer = Proposer(target, drafter, depth, self.stats, exact)
        self._sampler: Sampler | None = None
        self._sampled: list[Running] = []
        self._cancelled: set[int] = set()
        self._progress: list[Progress] = []
        self._next_id = 0

    # The outside.

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._schedule.has_work or bool(self._cancelled)

    @property
    def rows(self) -> int:
        """Most requests that decode together; halved when an allocation fails."""
        return self._schedule.rows

    @property
    def depth(self) -> DepthPolicy:
        """What chooses the draft depth; may be another one for the next job."""
        return self._proposer.depth

    @depth.setter
    def depth(self, depth: DepthPolicy) -> None:
        self._proposer.depth = depth

    @property
    def waiting(self) -> list[int]:
        """Ids of the jobs that have not begun, in their order."""
        return [running.job_id for running in self._schedule.waiting]

    def held(self, job_id: int) -> int:
        """Tokens of a job whose K/V are in its row; 0 without a row."""
        return self._schedule.held(job_id)

    def add(self, job: Job) -> int:
        """Queue a job and return its id.

        Raises:
            UsageError: the prompt is empty, has ids outside the vocabulary or leaves no room in
                the context.
        """
        config = self.target.config
        prompt, context = len(job.token_ids), config.max_position_embeddings
        if not prompt:
            raise UsageError("The prompt is empty.", "Give at least one token.")
        if prompt >= context:
            raise UsageError(
                f"The prompt has {prompt} tokens and the model's context holds {context}.",
                "Shorten the prompt.",
            )
        if not 0 <= min(job.token_ids) <= max(job.token_ids) < config.vocab_size:
            raise UsageError(
                "The prompt has token ids outside the vocabulary.",
                f"Give ids from 0 to {config.vocab_size - 1}.",
            )
        self._next_id += 1
        self._schedule.waiting.append(Running(self._next_id, job))
        return self._next_id

    def cancel(self, job_id: int) -> None:
        """End a job at the next step; one that is already over is left alone."""
        self._cancelled.add(job_id)

    def withdraw(self, job_id: int) -> None:
        """Forget a job that has not begun."""
        waiting = self._schedule.waiting
        self._schedule.waiting = deque(one for one in waiting if one.job_id != job_id)

    def rest(self) -> None:
        """Give the K/V buffers back where there is nothing to do; the next job makes new ones."""
        if not self.has_work:
            self._schedule.room.drop()

    def step(self) -> list[Progress]:
        """Prefill at most one chunk, then run one round; what it brought, per request.

        Where an allocation fails, all rows are given back and half as many go on from where they
        were; a single one that still finds no memory ends with an error.
        """
        with self.target.lock:
            return self._step()

    def _step(self) -> list[Progress]:
        try:
            if self._cancelled:
                self._schedule.cancel(self._cancelled)
                self._cancelled = set()
            self._prefill()
            self._schedule.make_room()
            if self._schedule.live:
                self._round()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._schedule.halve()
            mx.clear_cache()
        self._report_over()
        self._schedule.count_copies()
        self.stats.peak_bytes = max(self.stats.peak_bytes, mx.get_peak_memory())
        progress, self._progress = self._progress, []
        return progress

    def _report_over(self) -> None:
        for running, error in self._schedule.over:
            self._report(running, (), "cancelled" if error is None else "error", error)
        self._schedule.over = []

    def _report(
        self,
        running: Running,
        tokens: tuple[int, ...],
        reason: FinishReason | None,
        error: MlxMtpError | None = None,
    ) -> None:
        stats = None if reason is None else running.stats()
        self.stats.tokens += len(tokens)
        self._progress.append(Progress(running.job_id, tokens, reason, stats, error))

    def _sampler_of(self, rows: list[Running]) -> Sampler:
        sampling = [running.job.sampling for running in rows]
        return Sampler(sampling, self.target.config.vocab_size, self.suppress)

    # Prefill.

    def _prefill(self) -> None:
        """Put up to one chunk of tokens of waiting prompts through the target."""
        budget = self.prefill_chunk
        while budget > 0:
            if not self._schedule.prefilling:
                self._schedule.admit(budget)
            group = self._schedule.prefilling
            if not group:
                return
            most = self.prefill_chunk if self.exact else budget
            counts = [running.prompt_left(most, exact=self.exact) for running in group]
            self._prefill_forward(group, counts)
            budget -= max(counts) * len(counts)

    def _prefill_forward(self, group: list[Running], counts: list[int]) -> None:
        """One forward over the next tokens of each prompt of the group, padded to the longest."""
        began, cache = perf_counter(), self._schedule.cache
        again = self.exact and group[0].prompt_is_in
        length = EXACT_TOKENS if again else max(counts)
        starts = [running.prefilled for running in group]
        tokens = [
            [*running.context[start : start + count], *[0] * (length - count)]
            for running, start, count in zip(group, starts, counts, strict=True)
        ]
        ends = counts if min(counts) < length else None
        at = mx.array(starts, mx.int32)
        span = cache.span(group[0].row, at, length, starts, ends, apart=again)
        done = group[0].prefilled + counts[0] == len(group[0].context)
        hidden = self.target.forward(mx.array(tokens), cache, span, "last" if done else "none")
        for running, count in zip(group, counts, strict=True):
            running.prefilled += count
        self.stats.prefill_forwards += 1
        self.stats.prefill_tokens += sum(counts)
        if hidden is None:
            (running,) = group
            mx.eval(cache.keys, cache.values)
            if running.prefilled == running.keep_at:
                kept = running.context[: running.keep_at]
                self._schedule.room.keep_prefix(kept, running.row)
            running.prefill_seconds += perf_counter() - began
        else:
            self._finish_prefill(group, hidden, began)

    def _finish_prefill(self, group: list[Running], hidden: mx.array, began: float) -> None:
        """Read the first tokens of a group and make its requests ready."""
        sampler, schedule = self._sampler_of(group), self._schedule
        lengths = mx.array([running.prefilled for running in group], mx.int32)
        first = sampler.choose(self.target.logits(hidden), sampler.noise(lengths[:, None]))[:, 0]
        # One read brings the tokens and whether the model computes numbers at all.
        finite = mx.isfinite(hidden.astype(mx.float32).sum((1, 2))).astype(mx.int32)
        tokens, are_finite = cast("list[list[int]]", mx.stack([first, finite]).tolist())
        self.stats.prefill_reads += 1
        schedule.prefilling = []
        spent = (perf_counter() - began) / len(group)
        for place, running in enumerate(group):
            running.prefill_seconds += spent
            if not are_finite[place]:
                self._report(running, (), "error", _not_finite())
                continue
            if running.produced:  # it comes back and knows its token
                first[place] = running.produced[-1]
            else:
                used, reason = running.accept([tokens[place]])
                self._report(running, used, reason)
                if reason is not None:
                    continue
            at = slice(place, place + 1)
            schedule.ready = (running, Rows(first[at], lengths[at], hidden[at]))
            if len(schedule.live) < schedule.rows:
                schedule.join()

    # Rounds.

    def _round(self) -> None:
        schedule = self._schedule
        live, state = schedule.live, schedule.state
        assert state is not None
        if self._sampler is None or self._sampled != live:
            self._sampler, self._sampled = self._sampler_of(live), list(live)
            self._proposer.use(live)
        sampler, cache = self._sampler, schedule.cache
        committed = [running.committed for running in live]
        self.target.experts.begin()
        began = perf_counter()
        drafts = self._proposer.make(state, sampler, cache, committed)
        plan = drafts.plan
        outcome = run_round(self.target, cache, state, sampler, drafts, committed, exact=self.exact)
        launch(outcome)
        schedule.state = outcome.rows
        if not schedule.may_be_joined and not all(running.ends_next for running in live):
            most = [tokens + plan.depth + 1 for tokens in committed]
            schedule.state = self._proposer.make_ahead(outcome.rows, sampler, cache, most)
        blocks = read(outcome)
        seconds = perf_counter() - began
        kept = [block[plan.depth + 1] for block in blocks]
        self._count_round(plan, len(live))
        gone = []
        for row, (running, block, accepted) in enumerate(zip(live, blocks, kept, strict=True)):
            used, reason = running.accept(block[: accepted + 1])
            running.count_round(plan.depth, min(accepted, len(used)))
            self.stats.accepted += min(accepted, len(used))
            self._report(running, used, reason)
            if reason is not None:
                gone.append(row)
        schedule.leave(gone)
        self._proposer.learn(plan, seconds, blocks)

    def _count_round(self, plan: Plan, rows: int) -> None:
        self.stats.expert_pairs += self.target.experts.pairs
        self.stats.distinct_experts += self.target.experts.distinct()
        self.stats.host_reads += 1
        self.stats.rounds += 1
        self.stats.row_rounds += rows
        self.stats.target_forwards += 1
        self.stats.target_tokens += rows * tokens_verified(plan, self.exact)
        self.stats.drafted += rows * plan.depth


def _not_finite() -> VerificationError:
    return VerificationError(
        "The model computes values that are not numbers.",
        "Its weights are damaged, its config is wrong, or float16 is too narrow for it.",
    )
