"""One request on its way through the engine. Owns: its stop rules, its counters and its clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import mlx.core as mx

from mlx_mtp.decode.sampling import RowSampling
from mlx_mtp.errors import MlxMtpError
from mlx_mtp.types import EXACT_TOKENS, MAX_DEPTH, FinishReason, RequestStats


@dataclass(frozen=True)
class Job:
    """What the engine is asked to do; all defaults resolved.

    Attributes:
        token_ids: the prompt.
        max_tokens: most tokens to produce, at least 1.
        sampling: its own parameters and seed.
        stop_ids: ids that end it.
        watch: called with every produced id in order; True ends it (stop strings live there).
        script: int32 [T, MAX_DEPTH], drafts to verify in the drafter's place, as
            decode.replay.Replay has them; all jobs of an engine have one, or none has.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: RowSampling = field(default_factory=RowSampling)
    stop_ids: frozenset[int] = frozenset()
    watch: Callable[[int], bool] | None = None
    script: mx.array | None = None


@dataclass(frozen=True)
class Progress:
    """What a step brought to one request.

    Attributes:
        job_id: as `Engine.add` returned it.
        token_ids: new ids; the last one completed the stop where finish_reason is "stop".
        finish_reason, stats: set when the request is over.
        error: why, where finish_reason is "error".
    """

    job_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: MlxMtpError | None = None


@dataclass
class Running:
    """A request's way through the engine; the engine's own mutable record of it.

    Attributes:
        row: its row in the cache while it is in prefill.
        prefilled: tokens of `context` whose K/V are in that row.
        keep_at: how many of them will be kept for other requests once they are there; 0: none.
        produced: tokens produced.
    """

    job_id: int
    job: Job
    row: int = -1
    prefilled: int = 0
    keep_at: int = 0
    produced: list[int] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    admitted_at: float | None = None
    prefill_seconds: float = 0.0
    first_token_at: float | None = None
    deepest: int = 0

    @property
    def context(self) -> tuple[int, ...]:
        """What is prefilled: the prompt and, where it had to give its row back, all but the last
        of what it has produced."""
        return (*self.job.token_ids, *self.produced[:-1]) if self.produced else self.job.token_ids

    @property
    def committed(self) -> int:
        """Tokens whose K/V are in the cache while it decodes: all but the last produced."""
        return len(self.job.token_ids) + max(len(self.produced) - 1, 0)

    def prompt_left(self, most: int, *, exact: bool = False) -> int:
        """Tokens of its next prefill forward: up to `most`, and no further than what is kept.

        Args:
            most: tokens.
            exact: what it has produced goes in pieces apart from the prompt, as a verify had it.
        """
        goal = self.keep_at if self.prefilled < self.keep_at else len(self.context)
        if exact and self.prompt_is_in:
            most = EXACT_TOKENS
        elif exact:
            goal = min(goal, len(self.job.token_ids))
        return min(most, goal - self.prefilled)

    @property
    def prompt_is_in(self) -> bool:
        """Whether all of its prompt is prefilled: what is left is what it had produced before."""
        return self.prefilled >= len(self.job.token_ids)

    @property
    def ends_next(self) -> bool:
        """Whether one more token is all that it may produce."""
        return len(self.produced) + 1 >= self.job.max_tokens

    def accept(self, tokens: list[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Walk a block's tokens in order up to the first stop.

        Returns:
            The tokens that are part of the output, and why it is over if it is.
        """
        if self.first_token_at is None:
            self.first_token_at = perf_counter()
        for used, token in enumerate(tokens, start=1):
            self.produced.append(token)
            watched = self.job.watch is not None and self.job.watch(token)
            if watched or token in self.job.stop_ids:
                return tuple(tokens[:used]), "stop"
            if len(self.produced) >= self.job.max_tokens:
                return tuple(tokens[:used]), "length"
        return tuple(tokens), None

    def count_round(self, depth: int, accepted: int) -> None:
        """Count a round of which `accepted` drafts are part of the output."""
        self.rounds += 1
        self.drafted += depth
        self.accepted += accepted
        self.deepest = max(self.deepest, depth)
        for position in range(accepted):
            self.by_position[position] += 1

    def stats(self) -> RequestStats:
        """Its counters so far."""
        now = perf_counter()
        first = now if self.first_token_at is None else self.first_token_at
        admitted = now if self.admitted_at is None else self.admitted_at
        return RequestStats(
            prompt_tokens=len(self.job.token_ids),
            tokens=len(self.produced),
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            accepted_by_position=tuple(self.by_position[: self.deepest]),
            first_token_seconds=first - admitted,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=now - first,
        )
