"""Who is where. Owns: the waiting requests, those in prefill, the one that is ready, the live ones,
their rows of the cache, and who gives way where memory is short. Decides; computes nothing.

A request is waiting, then in prefill, then ready (prefilled, but all rows are taken), then live.
In the cache the live rows come first, then the one that is ready, then those in prefill. Where
memory is short a request gives its row back and waits again; what it has produced it keeps, and as
a token's K/V are the same however it came, it goes on as if nothing had happened.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from time import perf_counter

from mlx_mtp.decode.request import Running
from mlx_mtp.decode.room import Room
from mlx_mtp.decode.round import Rows
from mlx_mtp.errors import ResourceError
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.span import SPARE_SLOTS
from mlx_mtp.types import MAX_ROWS, RunStats

RESERVE_TOKENS = 4096
"""Most tokens of a request's budget that slots are reserved for at its admission; past it the
buffers grow by doubling."""
LOOK_AHEAD = 2 * MAX_ROWS
"""Waiting requests looked at for how much room will be needed and for shared prefixes."""
MAX_PADDING = 1.25
"""Short prompts are prefilled together while padding makes the forward at most this much larger."""

Over = list[tuple[Running, ResourceError | None]]
"""Requests that are over without a last token: cancelled, or an error."""


class Schedule:
    """Requests and their rows.

    Args:
        room: the cache and its limits.
        rows: most requests that decode together.
        prefill_ahead: hold one row more, for the request that is ready.
        stats: counters to add to.
        together: put several short prompts into one prefill.

    Attributes:
        live: requests that decode; their rows are their places in the list.
        state: their device state, None without any.
        prefilling: requests under way, in neighbouring rows; several only where one forward is
            enough for all of them.
        ready: prefilled and waiting for a row among the live ones.
        over: what ended since the engine last looked.
    """

    def __init__(
        self,
        room: Room,
        rows: int,
        prefill_ahead: bool,
        stats: RunStats,
        *,
        together: bool = True,
    ) -> None:
        self.room = room
        self.rows = rows
        self.prefill_ahead = prefill_ahead
        self.stats = stats
        self.together = together
        self.waiting: deque[Running] = deque()
        self.prefilling: list[Running] = []
        self.ready: tuple[Running, Rows] | None = None
        self.live: list[Running] = []
        self.state: Rows | None = None
        self.over: Over = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.live or self.prefilling or self.ready or self.over)

    @property
    def may_be_joined(self) -> bool:
        """Whether live rows may get another one beside them after the next round."""
        return self.rows > 1 and bool(self.waiting or self.prefilling or self.ready)

    @property
    def cache(self) -> SlotCache:
        """The cache; there is one as soon as a request has a row."""
        cache = self.room.cache
        assert cache is not None
        return cache

    @property
    def in_rows(self) -> list[Running]:
        """All requests that have a row."""
        ready = [] if self.ready is None else [self.ready[0]]
        return [*self.live, *ready, *self.prefilling]

    @property
    def occupied(self) -> int:
        """Rows of the cache that are in use, counted up to the last of them."""
        ready = [] if self.ready is None else [self.ready[0]]
        return max([len(self.live), *(one.row + 1 for one in (*ready, *self.prefilling))])

    def held(self, job_id: int) -> int:
        """Tokens of a request whose K/V are in its row."""
        filling = {running.job_id: running.prefilled for running in self.prefilling}
        decoding = {running.job_id: running.committed for running in self.in_rows}
        return {**decoding, **filling}.get(job_id, 0)

    # In.

    def admit(self, budget: int) -> None:
        """Start the prefill of the next waiting request, or of several short ones together.

        Args:
            budget: tokens that the forward may have, padding included.
        """
        held = self.rows + self.prefill_ahead
        while self.waiting and self.occupied < held:
            running, row = self.waiting[0], self.occupied
            start = self.room.prefixes.held(running.context)
            keep_at = self.room.prefixes.worth_keeping(
                running.context, start, self._contexts_behind()
            )
            left = len(running.context) - start
            if self.prefilling and (keep_at or not self._fits_beside(left, budget)):
                return
            if not self._find_row(running, row, held):
                return
            self.waiting.popleft()
            if running.row < 0:
                continue  # it found no memory and is over
            self._start(running, keep_at)
            if keep_at or left > budget:
                return

    def _contexts_behind(self) -> list[tuple[int, ...]]:
        return [running.context for running in islice(self.waiting, 1, LOOK_AHEAD)]

    def _fits_beside(self, left: int, budget: int) -> bool:
        """Whether a prompt with `left` tokens may join those that are about to be prefilled."""
        if not self.together:
            return False
        lengths = [left, *(len(running.context) - running.prefilled for running in self.prefilling)]
        padded = max(lengths) * len(lengths)
        return padded <= min(budget, MAX_PADDING * sum(lengths))

    def _find_row(self, running: Running, row: int, held: int) -> bool:
        """Give a request its row; False: it has to wait for memory. Where there is none for it
        even alone, it ends with an error and gets no row."""
        ahead = list(islice(self.waiting, LOOK_AHEAD))
        slots = max(_reserved(running), *(_needed_slots(one) for one in self.in_rows), 0)
        if self.room.cache is None:
            slots = max(slots, *map(_reserved, ahead))
        wanted = min(held, row + len(ahead))
        if self.room.make(row + 1, wanted, slots):
            running.row = row
        elif row:
            return False
        elif self.room.make(1, 1, len(running.context) + SPARE_SLOTS):
            running.row = 0
        else:
            self.over.append((running, _too_little_memory(running)))
        return True

    def _start(self, running: Running, keep_at: int) -> None:
        if running.admitted_at is None:
            running.admitted_at = perf_counter()
        cache, prefixes = self.cache, self.room.prefixes
        running.prefilled = prefixes.restore(running.context, cache, running.row)
        running.keep_at = keep_at
        prefixes.remember(running.context)
        self.stats.shared_tokens += running.prefilled
        self.prefilling.append(running)

    def join(self) -> None:
        """Make the request that is ready the last live row."""
        assert self.ready is not None
        running, state = self.ready
        self.ready = None
        row = len(self.live)
        if running.row != row:  # rows left while it was in prefill
            self.cache.move(running.row, row)
        self.live.append(running)
        self.state = state if self.state is None else self.state.joined(state)

    # Out.

    def leave(self, gone: list[int]) -> None:
        """Take rows out; a request that is ready, then the last rows, fill their places."""
        if not gone:
            return
        if self.ready is not None:
            self.join()  # it stands right behind the live rows, so the rule below moves it
        left = len(self.live) - len(gone)
        stay = [row for row in range(len(self.live)) if row not in gone]
        order = list(range(left))
        movers = [row for row in stay if row >= left]
        for hole, mover in zip([row for row in gone if row < left], movers, strict=True):
            self.cache.move(mover, hole)
            order[hole] = mover
        self.live = [self.live[row] for row in order]
        self.state = self.state.take(order) if left and self.state is not None else None

    def cancel(self, ids: set[int]) -> None:
        """Take requests out wherever they are; ids that are over already are left alone."""
        gone = [running for running in (*self.waiting, *self.in_rows) if running.job_id in ids]
        self.waiting = deque(running for running in self.waiting if running.job_id not in ids)
        self.prefilling = [running for running in self.prefilling if running.job_id not in ids]
        if self.ready is not None and self.ready[0].job_id in ids:
            self.ready = None
        self.leave([row for row, running in enumerate(self.live) if running.job_id in ids])
        self.over += [(running, None) for running in gone]

    # Memory.

    def count_copies(self) -> None:
        """Bring the cache's copy counters into the run's."""
        cache = self.room.cache
        if cache is not None:
            self.stats.row_copies += cache.row_copies
            self.stats.bytes_copied += cache.bytes_copied
            cache.row_copies = cache.bytes_copied = 0

    def make_room(self) -> None:
        """Have slots for the next verify of all live rows; the youngest give way where there are
        too few, and a single one that fills all memory ends with an error."""
        while self.live:
            used, slots = self.occupied, max(map(_needed_slots, self.in_rows))
            if self.room.make(used, used, slots):
                return
            if self.prefilling:
                self._wait_again(self.prefilling)
                self.prefilling = []
            elif self.ready is not None:
                self._wait_again([self.ready[0]])
                self.ready = None
            else:
                youngest = max(self.live, key=lambda running: running.job_id)
                self.leave([self.live.index(youngest)])
                if self.live:
                    self._wait_again([youngest])
                else:
                    self.over.append((youngest, _too_little_memory(youngest)))

    def halve(self) -> None:
        """After a failed allocation give all rows back and go on with half as many; where there is
        one row only, its request ends with an error."""
        running = self.in_rows
        self.live, self.prefilling, self.ready, self.state = [], [], None, None
        self.room.drop()
        if self.rows == 1:
            victim = running.pop() if running else self.waiting.popleft()
            self.over.append((victim, _too_little_memory(victim)))
        self.rows = max(1, min(self.rows, len(running) or self.rows) // 2)
        self.prefill_ahead = False
        self._wait_again(running)

    def _wait_again(self, running: list[Running]) -> None:
        """Put requests back to where they came from, the oldest first."""
        for one in sorted(running, key=lambda one: -one.job_id):
            one.row, one.prefilled, one.keep_at = -1, 0, 0
            self.waiting.appendleft(one)
            self.stats.preemptions += 1


def _needed_slots(running: Running) -> int:
    """Slots that it needs now."""
    return max(running.committed, len(running.context)) + SPARE_SLOTS


def _reserved(running: Running) -> int:
    """Slots to have at its admission."""
    budget = min(running.job.max_tokens, max(RESERVE_TOKENS, len(running.produced)))
    return len(running.job.token_ids) + budget + SPARE_SLOTS


def _too_little_memory(running: Running) -> ResourceError:
    return ResourceError(
        f"There is not enough memory for {running.committed} tokens of this request.",
        "Shorten the prompt, lower max_tokens, or raise the memory limit.",
    )
