"""A row that is kept between jobs. Owns: which ids its K/V belong to, and how far back it can go.

On full layers a token's slot is its position, so any beginning of what the row holds can be taken
up again. A ring has overwritten what a rollback past its slack needs. So the rings are copied
before a step would put the start of a turn out of reach, and a rollback goes to the nearest place
that the rings as they are, or a copy of them, still reach. Knows one row, row 0, and no text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mlx_mtp.decode.prefix import Ids, common
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.memory import MemoryBudget
from mlx_mtp.model.snapshot import Snapshot
from mlx_mtp.model.span import PREFILL_CHUNK, SPARE_SLOTS

MAX_COPIES = 8
"""Copies of the rings kept at once, if there is memory for them; the oldest goes first."""


class Reach(NamedTuple):
    """What rings hold.

    Attributes:
        committed: tokens of the row that were committed when they were like this.
        top: no position from here on was ever written into them.
        copy: of the rings; None: the row's own.
    """

    committed: int
    top: int
    copy: Snapshot | None = None

    def back_to(self, length: int, slack: int) -> int:
        """The longest beginning of at most `length` tokens that these rings can go on from."""
        reached = min(length, self.committed)
        return reached if self.top - reached <= slack else 0


class KeptRow:
    """What row 0 of an engine's cache holds from one job to the next.

    It takes the place of the engine's `PrefixStore`: a job begins with what it has in common with
    the row, and only the rest is prefilled.

    Args:
        budget: what the copies must fit into beside the cache; None sets no limit.

    Attributes:
        restored: tokens that the last job found in the row.
    """

    def __init__(self, budget: MemoryBudget | None) -> None:
        self.restored = 0
        self._budget = budget
        self._cache: SlotCache | None = None
        self._ids: Ids = ()
        self._top = self._next_top = 0  # as it is, and after the step under way
        self._marks: list[int] = []
        self._copies: list[Reach] = []

    def __len__(self) -> int:
        """Tokens whose K/V are in the row."""
        return len(self._ids)

    # For the room and the schedule, in the place of a PrefixStore.

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(one.copy.nbytes for one in self._copies if one.copy is not None)

    def clear(self) -> None:
        """Give the copies' memory back; the row stays."""
        self._copies = []

    def held(self, ids: Ids) -> int:
        """How many first tokens of `ids` need no prefill."""
        return max(
            (one.back_to(self._shared(ids), self._slack) for one in self._reaches), default=0
        )

    def restore(self, ids: Ids, cache: SlotCache, row: int) -> int:
        """Take the row back to the longest beginning of `ids` within reach; its length."""
        assert row == 0
        if cache is not self._cache:  # a new one is empty
            self._cache, self._ids, self._copies = cache, (), []
        shared, slack = self._shared(ids), self._slack
        best = max(self._reaches, key=lambda one: one.back_to(shared, slack))
        length = best.back_to(shared, slack)
        if length and best.copy is not None:
            best.copy.restore(cache, row)
        self._top = best.top if length else 0
        self.rewind(length)
        self.restored = length
        return length

    def worth_keeping(self, ids: Ids, held: int, others: Iterable[Ids]) -> int:
        """Nothing: the row is kept as it is."""
        return 0

    def remember(self, ids: Ids) -> None:
        """Nothing: there are no other prompts."""

    def keep(self, ids: Ids, cache: SlotCache, row: int) -> None:
        """Nothing, as above."""

    # For who runs the jobs.

    def mark(self, ids: Ids, lengths: Iterable[int]) -> None:
        """Before a job: note beginnings of its ids that later ones will probably go on from."""
        shared = self._shared(ids)
        self._marks = [*(mark for mark in self._marks if mark <= shared), *lengths]

    def protect(self, committed: int, prompt: int) -> None:
        """Before a step: copy the rings if it would put a mark out of their reach.

        Args:
            committed: tokens of the job whose K/V are in the row by now.
            prompt: tokens of its prompt.
        """
        self._top = top = max(self._top, self._next_top)
        after = min(max(prompt, committed), committed + PREFILL_CHUNK) + SPARE_SLOTS
        self._next_top = after
        if self._cache is None:
            return
        slack = self._slack
        leaving = [mark for mark in self._marks if mark <= committed and after - mark > slack]
        self._marks = [mark for mark in self._marks if mark not in leaving]
        reachable = [mark for mark in leaving if top - mark <= slack]
        if any(all(one.back_to(mark, slack) < mark for one in self._copies) for mark in reachable):
            self._copy(committed, top)

    def hold(self, ids: Ids) -> None:
        """Say that the row's committed tokens are exactly `ids`, and nothing was written past them
        but what `protect` was told of."""
        self._ids = ids
        self._top = max(self._top, self._next_top)

    def rewind(self, length: int) -> None:
        """Forget what the row holds past its first `length` tokens."""
        self._ids = self._ids[:length]
        cut = [one._replace(committed=min(one.committed, length)) for one in self._copies]
        self._copies = [one for one in cut if one.back_to(length, self._slack)]

    def forget(self) -> None:
        """Forget everything: the row is empty, or nobody knows what is in it."""
        self._cache = None
        self._ids = ()
        self._top = self._next_top = 0
        self._marks = []
        self._copies = []

    # Within.

    @property
    def _slack(self) -> int:
        """Positions past a committed length that may be written before what is needed there is
        lost: the drafter reads the newest window + 1 keys, the target fewer."""
        return 0 if self._cache is None else self._cache.ring - self._cache.window - 1

    @property
    def _reaches(self) -> list[Reach]:
        return [Reach(len(self._ids), self._top), *self._copies]

    def _shared(self, ids: Ids) -> int:
        # The last token's hidden state is always computed.
        return min(common(ids, self._ids), len(ids) - 1)

    def _copy(self, committed: int, top: int) -> None:
        cache = self._cache
        assert cache is not None
        self._copies = self._copies[-(MAX_COPIES - 1) :]
        if self._budget is not None:
            room = self._budget.limit - self._budget.needed(cache.rows, cache.capacity)
            while self._copies and self.nbytes + self._budget.kv.ring > room:
                del self._copies[0]
            if self._budget.kv.ring > room:
                return
        self._copies.append(Reach(committed, top, Snapshot.take(cache, row=0, length=0)))
