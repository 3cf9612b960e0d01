"""Room for rows. Owns: the cache's size within the memory budget, and the shared prefixes in it."""

from __future__ import annotations

from mlx_mtp.decode.prefix import Prefixes, PrefixStore
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.memory import MemoryBudget
from mlx_mtp.model.span import round_up
from mlx_mtp.model.target import Target

OUT_OF_MEMORY = ("allocate", "out of memory", "insufficient memory")
"""What MLX's messages say on Metal ("[metal::malloc] Unable to allocate ...", "Command buffer
execution failed: Insufficient Memory") and CUDA; it has no exception class for it."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that an allocation failed."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


class Room:
    """The cache, made when it is first needed and resized as the work changes.

    Args:
        target: whose K/V it holds.
        budget: None sets no limit.
        prefixes: None keeps beginnings that several prompts share.

    Attributes:
        cache: None until `make` has made it.
        prefixes: beginnings kept for other prompts; they go first when memory is short.
    """

    def __init__(
        self, target: Target, budget: MemoryBudget | None, prefixes: Prefixes | None = None
    ) -> None:
        self.target = target
        self.budget = budget
        self.cache: SlotCache | None = None
        self.prefixes = PrefixStore() if prefixes is None else prefixes

    def make(self, used: int, wanted: int, slots: int) -> bool:
        """See that `used` rows with `slots` slots each have room; False where they cannot.

        The buffers grow by doubling as long as that fits, and shrink to what is used before they
        refuse. Rows below `used` keep their K/V.

        Args:
            used: rows there must be.
            wanted: rows worth having at once if the buffers are made anew.
            slots: of the full layers.
        """
        cache, slots = self.cache, round_up(slots)
        if cache is None:
            sizes, wanted = [slots], max(used, wanted)
        elif cache.rows >= used and cache.capacity >= slots:
            return True
        else:
            grown = cache.capacity if slots <= cache.capacity else max(slots, 2 * cache.capacity)
            sizes = [grown, slots]
            wanted = max(used, min(wanted, 2 * cache.rows)) if used > cache.rows else cache.rows
        for size in sizes:
            rows = self._fitting(size, wanted)
            if rows < used and self.prefixes.nbytes:
                self.prefixes.clear()
                rows = self._fitting(size, wanted)
            if rows >= used:
                self._set(rows, size)
                return True
        return False

    def keep_prefix(self, ids: tuple[int, ...], row: int) -> None:
        """Keep a copy of a row whose committed tokens are exactly `ids`, if there is memory."""
        assert self.cache is not None
        if self.budget is not None:
            kv, cache = self.budget.kv, self.cache
            copy = kv.ring + len(ids) * kv.slot + self.prefixes.nbytes
            if self.budget.needed(cache.rows, cache.capacity) + copy > self.budget.limit:
                return
        self.prefixes.keep(ids, self.cache, row)

    def drop(self) -> None:
        """Give all memory back."""
        self.cache = None
        self.prefixes.clear()

    def _fitting(self, slots: int, most: int) -> int:
        if self.budget is None:
            return most
        return self.budget.rows_at(slots, most, taken=self.prefixes.nbytes)

    def _set(self, rows: int, slots: int) -> None:
        if self.cache is None:
            self.cache = SlotCache(self.target.config, rows, self.target.dtype, slots)
        else:
            self.cache.resize(rows, slots)
