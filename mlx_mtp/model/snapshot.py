"""One row's K/V, kept apart from the cache. Owns: copying a row, or only its rings, out and in."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.config_json import FULL
from mlx_mtp.model.cache import SlotCache


@dataclass(frozen=True)
class Snapshot:
    """K/V of a row as they were.

    A ring holds the newest tokens only, so a snapshot serves the length at which it was taken and
    no shorter one.

    Attributes:
        keys, values: by layer, [1, kv_heads, slots, head_dim]: the first slots of full layers,
            whole rings; a layer of which nothing is kept is left out.
    """

    keys: dict[int, mx.array]
    values: dict[int, mx.array]

    @classmethod
    def take(cls, cache: SlotCache, row: int, length: int) -> Snapshot:
        """Copy a row.

        Args:
            length: slots of the full layers: all that are committed, or 0 where the row itself
                keeps them.
        """
        slots = [
            length if kind == FULL else cache.ring
            for kind in cache.config.layer_types[: cache.config.num_kv_layers]
        ]
        index = mx.array([row])
        keys, values = (
            {
                layer: mx.take(buffers[layer][:, :, :count], index, axis=0)
                for layer, count in enumerate(slots)
                if count
            }
            for buffers in (cache.keys, cache.values)
        )
        mx.eval(keys, values)
        snapshot = cls(keys, values)
        cache.count_copy(snapshot.nbytes)
        return snapshot

    def restore(self, cache: SlotCache, row: int) -> None:
        """Write it over a row, in place."""
        for buffers, held in ((cache.keys, self.keys), (cache.values, self.values)):
            for layer, kept in held.items():
                buffers[layer][row : row + 1, :, : kept.shape[2]] = kept
            mx.eval(buffers)
        cache.count_copy(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in (*self.keys.values(), *self.values.values()))
