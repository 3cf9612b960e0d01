"""One row's K/V, kept apart from the cache. Owns: copying a row, or only its rings, out and in."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.config_json import FULL, SLIDING
from mlx_mtp.model.cache import SlotCache


@dataclass(frozen=True)
class Snapshot:
    """K/V of a row's first `length` tokens.

    A ring holds the newest tokens only, so a snapshot serves this very length and no shorter one.

    Attributes:
        length: committed tokens.
        keys, values: by layer, [1, kv_heads, slots, head_dim]: `length` slots of full layers,
            whole rings.
    """

    length: int
    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]

    @classmethod
    def take(cls, cache: SlotCache, row: int, length: int) -> Snapshot:
        """Copy a row of which `length` tokens are committed and none beyond were written."""
        index, held = mx.array([row]), []
        for buffers in (cache.keys, cache.values):
            copies = []
            for kind, buffer in zip(cache.config.layer_types, buffers, strict=False):
                slots = length if kind == FULL else cache.ring
                copies.append(mx.take(buffer[:, :, :slots], index, axis=0))
            mx.eval(copies)
            held.append(tuple(copies))
        snapshot = cls(length, *held)
        cache.count_copy(snapshot.nbytes)
        return snapshot

    def restore(self, cache: SlotCache, row: int) -> None:
        """Write it over a row, in place."""
        for buffers, held in ((cache.keys, self.keys), (cache.values, self.values)):
            for layer, kept in enumerate(held):
                buffers[layer][row : row + 1, :, : kept.shape[2]] = kept
            mx.eval(buffers)
        cache.count_copy(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in (*self.keys, *self.values))


@dataclass(frozen=True)
class RingCopy:
    """A row's sliding layers as they were; its full layers stay where they are.

    Attributes:
        keys, values: by layer, [1, kv_heads, ring, head_dim], of the sliding layers.
    """

    keys: dict[int, mx.array]
    values: dict[int, mx.array]

    @classmethod
    def take(cls, cache: SlotCache, row: int) -> RingCopy:
        """Copy a row's rings."""
        index, layers = mx.array([row]), range(cache.config.num_kv_layers)
        rings = [layer for layer in layers if cache.config.layer_types[layer] == SLIDING]
        keys = {layer: mx.take(cache.keys[layer], index, axis=0) for layer in rings}
        values = {layer: mx.take(cache.values[layer], index, axis=0) for layer in rings}
        mx.eval(keys, values)
        copy = cls(keys, values)
        cache.count_copy(copy.nbytes)
        return copy

    def restore(self, cache: SlotCache, row: int) -> None:
        """Write them over a row's rings, in place."""
        for buffers, held in ((cache.keys, self.keys), (cache.values, self.values)):
            for layer, kept in held.items():
                buffers[layer][row : row + 1] = kept
            mx.eval(buffers)
        cache.count_copy(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in (*self.keys.values(), *self.values.values()))
