"""The engine. Owns: who is waiting, in prefill and live, and which row each has. Ids only.

A step is at most one chunk of prefill, then one round of all live rows. Rows join and leave
between rounds; each decodes with its own parameters and accepts its own number of drafts.

A request is waiting, then in prefill, then ready (prefilled, but all rows are taken), then live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import cast

import mlx.core as mx

from mlx_mtp.decode.request import Job, Progress, Running
from mlx_mtp.decode.round import Rows, read, run_round
from mlx_mtp.decode.sampling import Sampler
from mlx_mtp.errors import UsageError, VerificationError
from mlx_mtp.model.cache import PREFILL_CHUNK, SPARE_SLOTS, SlotCache
from mlx_mtp.model.drafter import Drafter
from mlx_mtp.model.target import Target
from mlx_mtp.types import MAX_ROWS, RunStats

RESERVE_TOKENS = 4096
"""Most tokens of a request's budget that slots are reserved for at its admission; past it the
buffers grow by doubling."""

DepthPolicy = Callable[[int], int]
"""Live rows -> tokens to draft in the next round, 0..MAX_DEPTH."""


class Engine:
    """Runs jobs through one target and its drafter.

    Args:
        target: the target.
        drafter: None decodes plainly.
        depth: how many tokens to draft; not asked without a drafter.
        rows: most requests that decode together, 1..MAX_ROWS.
        suppress: ids that are never produced.
        stats: counters to add to.
        prefill_ahead: hold one more row of K/V, so that the next request is prefilled while all
            rows decode and takes over a row as soon as one leaves.
        prefill_chunk: most prompt tokens per forward, PREFILL_CHUNK at most; any value gives the
            same bits.
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
    ) -> None:
        if not 1 <= rows <= MAX_ROWS:
            raise UsageError(f"A batch of {rows} rows.", f"Give 1 to {MAX_ROWS} rows.")
        if prefill_chunk < 1:
            raise UsageError(f"A chunk of {prefill_chunk}.", "Give at least one token.")
        self.target = target
        self.drafter = drafter
        self.depth = depth
        self.rows = rows
        self.suppress = suppress
        self.stats = RunStats() if stats is None else stats
        self.prefill_ahead = prefill_ahead
        self.prefill_chunk = min(prefill_chunk, PREFILL_CHUNK)
        self._waiting: deque[tuple[int, Job]] = deque()
        self._prefilling: Running | None = None
        self._ready: tuple[Running, Rows] | None = None
        self._live: list[Running] = []
        self._cancelled: list[int] = []
        self._next_id = 0
        self._cache: SlotCache | None = None
        self._state: Rows | None = None
        self._sampler: Sampler | None = None

    # The outside.

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(
            self._waiting or self._live or self._prefilling or self._ready or self._cancelled
        )

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
        self._waiting.append((self._next_id, job))
        return self._next_id

    def cancel(self, job_id: int) -> None:
        """End a job at the next step; one that is already over is left alone."""
        self._cancelled.append(job_id)

    def step(self) -> list[Progress]:
        """Prefill at most one chunk, then run one round; what it brought, per request."""
        before = self.target.experts.pairs
        progress = self._drop_cancelled()
        progress += self._prefill()
        if self._live:
            progress += self._round()
        self.stats.expert_pairs += self.target.experts.pairs - before
        self.stats.peak_bytes = max(self.stats.peak_bytes, mx.get_peak_memory())
        return progress

    # Prefill.

    def _prefill(self) -> list[Progress]:
        """Put up to one chunk of tokens of waiting prompts through the target."""
        progress: list[Progress] = []
        budget = self.prefill_chunk
        while budget > 0:
            if self._prefilling is None and not self._admit():
                break
            running = self._prefilling
            assert running is not None
            count = min(budget, len(running.job.token_ids) - running.prefilled)
            budget -= count
            progress += self._prefill_chunk(running, count)
        return progress

    def _admit(self) -> bool:
        """Start the next waiting request's prefill if there is a row of K/V for it."""
        held = self.rows + self.prefill_ahead
        if not self._waiting or self._ready is not None or len(self._live) >= held:
            return False
        if self._cache is None:
            slots = max(_slots_to_reserve(job) for _, job in self._waiting)
            self._cache = SlotCache(self.target.config, held, self.target.dtype, slots)
        job_id, job = self._waiting.popleft()
        self._cache.reserve(_slots_to_reserve(job))
        self._prefilling = Running(job_id, job, row=len(self._live))
        return True

    def _prefill_chunk(self, running: Running, count: int) -> list[Progress]:
        began = perf_counter()
        cache, start = self._cache, running.prefilled
        assert cache is not None
        tokens = running.job.token_ids[start : start + count]
        last = start + count == len(running.job.token_ids)
        span = cache.span(running.row, mx.array([start], mx.int32), count, [start])
        hidden = self.target.forward(mx.array([tokens]), cache, span, "last" if last else "none")
        running.prefilled += count
        self.stats.prefill_tokens += count
        if hidden is None:
            mx.eval(cache.keys, cache.values)
            running.prefill_seconds += perf_counter() - began
            return []
        sampler = Sampler([running.job.sampling], self.target.config.vocab_size, self.suppress)
        lengths = mx.array([running.prefilled], mx.int32)
        first = sampler.choose(self.target.logits(hidden), sampler.noise(lengths[:, None]))[:, 0]
        # One read brings the token and whether the model computes numbers at all.
        finite = mx.isfinite(hidden.astype(mx.float32).sum()).astype(mx.int32)
        token, is_finite = cast("list[int]", mx.concatenate([first, finite[None]]).tolist())
        self.stats.prefill_reads += 1
        running.prefill_seconds += perf_counter() - began
        self._prefilling = None
        if not is_finite:
            error = VerificationError(
                "The model computes values that are not numbers.",
                "Its weights are damaged, its config is wrong, or float16 is too narrow for it.",
            )
            return [Progress(running.job_id, (), "error", running.stats(), error)]
        used, reason = running.accept([token])
        if reason is None:
            self._ready = (running, Rows(first, lengths, hidden))
            if len(self._live) < self.rows:
                self._join()
            return [Progress(running.job_id, used)]
        return [Progress(running.job_id, used, reason, running.stats())]

    def _join(self) -> None:
        """Make the request that is ready the last live row."""
        assert self._ready is not None
        running, state = self._ready
        self._ready = None
        row = len(self._live)
        if running.row != row:  # rows left while it was in prefill
            self._move(running.row, row)
        self._live.append(running)
        self._state = state if self._state is None else self._state.joined(state)
        self._sampler = None

    # Rounds.

    def _round(self) -> list[Progress]:
        assert self._cache is not None
        assert self._state is not None
        if self._sampler is None:
            sampling = [running.job.sampling for running in self._live]
            self._sampler = Sampler(sampling, self.target.config.vocab_size, self.suppress)
        depth = 0 if self.drafter is None else self.depth(len(self._live))
        committed = [running.committed for running in self._live]
        outcome = run_round(
            self.target, self.drafter, self._cache, self._state, self._sampler, depth, committed
        )
        blocks = read(outcome)
        self._state = outcome.rows
        self.stats.host_reads += 1
        self.stats.rounds += 1
        self.stats.row_rounds += len(self._live)
        self.stats.target_forwards += 1
        self.stats.drafter_forwards += depth
        self._count_copies()
        progress, gone = [], []
        for row, (running, block) in enumerate(zip(self._live, blocks, strict=True)):
            accepted = block[-1]
            used, reason = running.accept(block[: accepted + 1])
            running.count_round(depth, min(accepted, len(used)))
            stats = None if reason is None else running.stats()
            progress.append(Progress(running.job_id, used, reason, stats))
            if reason is not None:
                gone.append(row)
        self._leave(gone)
        return progress

    def _leave(self, gone: list[int]) -> None:
        """Take rows out; a request that is ready, then the last rows, fill their places."""
        if not gone:
            return
        if self._ready is not None:
            self._join()  # it stands right behind the live rows, so the rule below moves it
        left = len(self._live) - len(gone)
        stay = [row for row in range(len(self._live)) if row not in gone]
        order = list(range(left))
        movers = [row for row in stay if row >= left]
        for hole, mover in zip([row for row in gone if row < left], movers, strict=True):
            self._move(mover, hole)
            order[hole] = mover
        self._live = [self._live[row] for row in order]
        self._state = self._state.take(order) if left and self._state is not None else None
        self._sampler = None

    def _move(self, source: int, destination: int) -> None:
        assert self._cache is not None
        self._cache.move(source, destination)
        self._count_copies()

    def _count_copies(self) -> None:
        """Bring the cache's copy counters into the run's."""
        cache = self._cache
        assert cache is not None
        self.stats.row_copies += cache.row_copies
        self.stats.bytes_copied += cache.bytes_copied
        cache.row_copies = cache.bytes_copied = 0

    # Cancelling.

    def _drop_cancelled(self) -> list[Progress]:
        ids, self._cancelled = set(self._cancelled), []
        if not ids:
            return []
        over = [Running(job_id, job, row=-1) for job_id, job in self._waiting if job_id in ids]
        self._waiting = deque(item for item in self._waiting if item[0] not in ids)
        if self._prefilling is not None and self._prefilling.job_id in ids:
            over.append(self._prefilling)
            self._prefilling = None
        if self._ready is not None and self._ready[0].job_id in ids:
            over.append(self._ready[0])
            self._ready = None
        gone = [row for row, running in enumerate(self._live) if running.job_id in ids]
        over += [self._live[row] for row in gone]
        self._leave(gone)
        return [Progress(running.job_id, (), "cancelled", running.stats()) for running in over]


def _slots_to_reserve(job: Job) -> int:
    return len(job.token_ids) + min(job.max_tokens, RESERVE_TOKENS) + SPARE_SLOTS
