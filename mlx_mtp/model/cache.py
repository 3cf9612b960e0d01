"""Slot caches. Owns: the K/V buffers of all rows, where a token's K/V goes and who may see it.

One preallocated buffer per layer that owns K/V, ``[rows, kv_heads, slots, head_dim]``. A token at
absolute position p lives in slot p on full layers and in slot ``p % ring`` on sliding layers.
What is committed is said by each row's length alone, so rolling back is not advancing it: nothing
is trimmed, zeroed or copied, and every row keeps its own number of tokens. Slots past a row's
length hold stale K/V; masks never show them.

Live rows are the prefix [0, live) of the buffers; a prefilling row uses an index >= live.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_mtp.config_json import FULL, SLIDING
from mlx_mtp.model.attention import Seen, SlotMask
from mlx_mtp.model.span import (
    ATTENDED_STEP,
    SPARE_SLOTS,
    Run,
    Runs,
    Span,
    grouped,
    ring_slots,
    round_up,
    runs_apart,
    runs_of,
)
from mlx_mtp.pair import TargetConfig


class SlotCache:
    """K/V of up to `rows` requests for one target.

    Args:
        config: the target's.
        rows: rows of the buffers.
        dtype: of K/V: the target's activations'.
        slots: slots of the full layers to begin with (rounded up; they grow by doubling).

    Attributes:
        row_copies, bytes_copied: rows moved or carried over by growth, and their bytes.
    """

    def __init__(self, config: TargetConfig, rows: int, dtype: mx.Dtype, slots: int = 0) -> None:
        self.config = config
        self.rows = rows
        self.window = config.sliding_window
        self.ring = ring_slots(config.sliding_window)
        self.capacity = round_up(max(slots, SPARE_SLOTS))
        self.row_copies = 0
        self.bytes_copied = 0
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        for layer in range(config.num_kv_layers):
            held = self.capacity if config.layer_types[layer] == FULL else self.ring
            shape = (rows, config.kv_heads(layer), held, config.kv_head_dim(layer))
            self.keys.append(mx.zeros(shape, dtype))
            self.values.append(mx.zeros(shape, dtype))
        mx.eval(self.keys, self.values)

    # Spans: positions, slots and masks of one forward.

    def span(
        self,
        first_row: int,
        starts: mx.array,
        length: int,
        committed: Sequence[int],
        ends: Sequence[int] | None = None,
        *,
        apart: bool = False,
    ) -> Span:
        """The span of a forward of `length` tokens per row; grows the full layers if it must.

        Args:
            first_row: the buffers' row of starts[0].
            starts: int32 [rows], committed lengths.
            length: tokens per row.
            committed: the same, as the host knows them.
            ends: tokens per row that count, where the rows are padded to `length`.
            apart: as in `Span`.
        """
        runs = (runs_apart if apart else runs_of)(committed, length, self.ring)
        self.reserve(max(run.slots for run in runs[FULL]))
        positions = starts[:, None] + mx.arange(length, dtype=mx.int32)
        query = positions[:, :, None]
        most = max(run.slots for run in runs[SLIDING])
        held = self._held_positions(starts + (length - 1), most)[:, None, :]
        sliding = (held >= 0) & (held <= query) & (held > query - self.window)
        masks = {
            FULL: tuple(
                SlotMask(_slots(run) <= query[run.first : run.first + run.rows], run.near)
                for run in runs[FULL]
            ),
            SLIDING: tuple(
                SlotMask(sliding[run.first : run.first + run.rows, :, : run.slots], run.near)
                for run in runs[SLIDING]
            ),
        }
        targets = {FULL: positions, SLIDING: positions % self.ring}
        counted = None if ends is None else mx.array(list(ends), mx.int32)
        return Span(first_row, starts, length, runs, masks, targets, counted, apart)

    def seen_by_target(self, layer: int, span: Span) -> list[Seen]:
        """What a layer's queries of a span attend to; `layer` is one that owns K/V."""
        kind = self.config.layer_types[layer]
        return [
            self._seen(layer, span.first_row, run, mask)
            for run, mask in zip(span.runs[kind], span.masks[kind], strict=True)
        ]

    def runs_committed(self, committed: Sequence[int]) -> Runs:
        """Runs for those who write nothing: the slots there are, up to the committed ones.

        Args:
            committed: committed length of each row, or more.
        """
        needs = (round_up(tokens, ATTENDED_STEP) for tokens in committed)
        return grouped([min(need, self.capacity) for need in needs], self.ring)

    def seen_by_drafter(self, lengths: mx.array, runs: Runs) -> dict[str, list[Seen]]:
        """What one drafter query per live row attends to, by layer type.

        The committed prefix in the donor layers, on sliding layers its newest W + 1 tokens
        (transformers' flipped bidirectional window; the target's own queries see W with theirs).

        Args:
            lengths: int32 [rows], committed lengths.
            runs: of the same rows.
        """
        last = lengths[:, None, None] - 1
        (ring,) = runs[SLIDING]
        held = self._held_positions(lengths - 1, ring.slots)[:, None]
        sliding = (held >= 0) & (held >= last - self.window)
        donors = self.config.donors
        return {
            FULL: [
                self._seen(
                    donors[FULL],
                    0,
                    run,
                    SlotMask(_slots(run) <= last[run.first : run.first + run.rows]),
                )
                for run in runs[FULL]
            ],
            SLIDING: [self._seen(donors[SLIDING], 0, ring, SlotMask(sliding))],
        }

    def _held_positions(self, last: mx.array, slots: int) -> mx.array:
        """[rows, slots]: the newest position <= last of each ring slot; negative where none."""
        slot = mx.arange(slots, dtype=mx.int32)
        return last[:, None] - (last[:, None] - slot) % self.ring

    # K/V in and out.

    def write(self, layer: int, span: Span, keys: mx.array, values: mx.array) -> None:
        """Put K/V of span's tokens into layer's slots, in place.

        MLX writes in place only while nobody else holds the buffer or a view of it (`Seen`).

        Args:
            layer: a layer that owns K/V.
            keys, values: [rows, kv_heads, L, head_dim]
        """
        target = span.targets[self.config.layer_types[layer]]
        if span.rows == self.rows:
            index = target[:, None, :, None]
            self.keys[layer] = mx.put_along_axis(self.keys[layer], index, keys, axis=2)
            self.values[layer] = mx.put_along_axis(self.values[layer], index, values, axis=2)
            return
        # Three explicit index arrays: a slice among them would copy the buffer.
        row = (span.first_row + mx.arange(span.rows, dtype=mx.int32))[:, None, None]
        head = mx.arange(keys.shape[1], dtype=mx.int32)[None, :, None]
        self.keys[layer][row, head, target[:, None]] = keys
        self.values[layer][row, head, target[:, None]] = values

    def _seen(self, layer: int, first_row: int, run: Run, mask: SlotMask) -> Seen:
        rows = slice(first_row + run.first, first_row + run.first + run.rows)
        return Seen(
            self.keys[layer][rows, :, : run.slots], self.values[layer][rows, :, : run.slots], mask
        )

    # Rows and growth.

    def reserve(self, slots: int) -> None:
        """Make the full layers hold at least `slots` slots; copies all rows if they must grow."""
        if slots > self.capacity:
            self.resize(self.rows, max(round_up(slots), 2 * self.capacity))

    def resize(self, rows: int, slots: int) -> None:
        """Give the buffers `rows` rows and the full layers `slots` slots; keeps what fits.

        One buffer at a time, so that only one is there twice.
        """
        slots, kept = round_up(slots), min(rows, self.rows)
        for layer, kind in enumerate(self.config.layer_types[: self.config.num_kv_layers]):
            for buffers in (self.keys, self.values):
                old = buffers[layer]
                shape = (rows, old.shape[1], slots if kind == FULL else self.ring, old.shape[3])
                if shape == old.shape:
                    continue
                held = min(shape[2], old.shape[2])
                new = mx.zeros(shape, old.dtype)
                new[:kept, :, :held] = old[:kept, :, :held]
                mx.eval(new)
                buffers[layer] = new
                self.bytes_copied += kept * old[0, :, :held].nbytes
        self.row_copies += kept
        self.rows, self.capacity = rows, slots

    def count_copy(self, nbytes: int) -> None:
        """Count a row that somebody else copied out of or into the buffers."""
        self.row_copies += 1
        self.bytes_copied += nbytes

    def move(self, source: int, destination: int) -> None:
        """Copy row source over row destination, in place."""
        index = mx.array([source])
        taken = [
            [mx.take(b, index, axis=0) for b in buffers] for buffers in (self.keys, self.values)
        ]
        mx.eval(taken)  # a pending reader of a buffer would make the write copy it whole
        for buffers, rows in zip((self.keys, self.values), taken, strict=True):
            for layer, row in enumerate(rows):
                buffers[layer][destination : destination + 1] = row
                self.bytes_copied += row.nbytes
        mx.eval(self.keys, self.values)
        self.row_copies += 1


def _slots(run: Run) -> mx.array:
    return mx.arange(run.slots, dtype=mx.int32)
