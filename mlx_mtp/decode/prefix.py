"""Shared prefixes. Owns: K/V of beginnings that several prompts have in common, and finding them.

A beginning is prefilled once, kept as a copy and put into the rows of the prompts that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.snapshot import Snapshot

MIN_SHARED = 32
"""Fewer common tokens than this are not worth a copy of a row."""
KEPT = 4
"""Prefixes kept at once; the one that was not used for longest goes first."""
RECENT = 8
"""Prompts remembered, so that a prefix is found although its prompts come one by one."""

Ids = tuple[int, ...]


class Prefixes(Protocol):
    """Where a prompt may find its beginning; `PrefixStore` says what each of these does."""

    @property
    def nbytes(self) -> int: ...
    def clear(self) -> None: ...
    def held(self, ids: Ids) -> int: ...
    def restore(self, ids: Ids, cache: SlotCache, row: int) -> int: ...
    def worth_keeping(self, ids: Ids, held: int, others: Iterable[Ids]) -> int: ...
    def remember(self, ids: Ids) -> None: ...
    def keep(self, ids: Ids, cache: SlotCache, row: int) -> None: ...


class PrefixStore:
    """Snapshots of prefixes by their ids, the last used one at the end."""

    def __init__(self) -> None:
        self._kept: dict[Ids, Snapshot] = {}
        self._recent: deque[Ids] = deque(maxlen=RECENT)

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        return sum(snapshot.nbytes for snapshot in self._kept.values())

    def clear(self) -> None:
        """Give the memory back."""
        self._kept.clear()

    def held(self, ids: Ids) -> int:
        """How many first tokens of `ids` are kept."""
        return max(map(len, self._prefixes(ids)), default=0)

    def restore(self, ids: Ids, cache: SlotCache, row: int) -> int:
        """Put the longest kept prefix of `ids` into a row; how many tokens that were."""
        prefix = max(self._prefixes(ids), key=len, default=())
        if prefix:
            snapshot = self._kept.pop(prefix)
            self._kept[prefix] = snapshot  # the last used one at the end
            snapshot.restore(cache, row)
        return len(prefix)

    def _prefixes(self, ids: Ids) -> list[Ids]:
        return [prefix for prefix in self._kept if ids[: len(prefix)] == prefix != ids]

    def worth_keeping(self, ids: Ids, held: int, others: Iterable[Ids]) -> int:
        """How many of its first tokens should be kept once they are prefilled; 0: none.

        A kept prefix serves those prompts only that begin with all of it, so the length is the
        one that saves most tokens over the other prompts.

        Args:
            ids: of a prompt about to be prefilled.
            held: its tokens that are kept already.
            others: prompts that come after it.
        """
        most = len(ids) - 1  # the last token's hidden state is always computed
        shared = [min(most, common(ids, other)) for other in (*others, *self._recent)]
        lengths = {length for length in shared if length - held >= MIN_SHARED}
        return max(
            lengths,
            key=lambda length: (length - held) * sum(other >= length for other in shared),
            default=0,
        )

    def remember(self, ids: Ids) -> None:
        """Note a prompt that is being prefilled."""
        self._recent.append(ids)

    def keep(self, ids: Ids, cache: SlotCache, row: int) -> None:
        """Copy a row whose committed tokens are exactly `ids`."""
        self._kept[ids] = Snapshot.take(cache, row, len(ids))
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]


class Unshared(PrefixStore):
    """Keeps nothing: each prompt is prefilled whole."""

    def worth_keeping(self, ids: Ids, held: int, others: Iterable[Ids]) -> int:
        return 0


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix: bisection over slices, which compare at C speed."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
