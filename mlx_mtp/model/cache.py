"""Slot caches. Owns: the K/V buffers of all rows, where a token's K/V goes and who may see it.

One preallocated buffer per layer that owns K/V, ``[rows, kv_heads, slots, head_dim]``. A token at
absolute position p lives in slot p on full layers and in slot ``p % ring`` on sliding layers.
What is committed is said by each row's length alone, so rolling back is not advancing it: nothing
is trimmed, zeroed or copied, and every row keeps its own number of tokens. Slots past a row's
length hold stale K/V; masks never show them.

Live rows are the prefix [0, live) of the buffers; a prefilling row uses an index >= live.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.config_json import FULL, SLIDING
from mlx_mtp.model.attention import SlotMask
from mlx_mtp.pair import TargetConfig
from mlx_mtp.types import MAX_DEPTH

PREFILL_CHUNK = 256
"""Most prompt tokens put through the target in one forward."""
SLOT_STEP = 256
"""Attention covers a multiple of this many slots."""
SPARE_SLOTS = MAX_DEPTH + 1
"""Slots past a row's committed prefix that a verify may write."""


def round_up(slots: int) -> int:
    """The next multiple of SLOT_STEP."""
    return -(-slots // SLOT_STEP) * SLOT_STEP


def ring_slots(window: int) -> int:
    """Slots of a sliding layer.

    A prompt chunk's first token still sees its whole window after the chunk's last token was
    written. The slack is also what a rollback and the drafter's window + 1 keys need. It depends
    on nothing but the model, so that K/V are bit-equal however a token came.
    """
    return round_up(window + PREFILL_CHUNK)


@dataclass(frozen=True)
class Span:
    """Where the L tokens of one forward go and what they see, for a contiguous range of rows.

    Attributes:
        first_row: index of the first row in the buffers.
        starts: int32 [rows], the position of each row's first token, which is its committed length.
        length: L, tokens per row.
        slots: slots attended, by layer type.
        masks: which slots each query may see, by layer type.
        targets: int32 [rows, L], slots written, by layer type.
    """

    first_row: int
    starts: mx.array
    length: int
    slots: dict[str, int]
    masks: dict[str, SlotMask]
    targets: dict[str, mx.array]

    @property
    def rows(self) -> int:
        return self.starts.shape[0]


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

    def attended_slots(self, committed: int, length: int = 1) -> dict[str, int]:
        """Slots to attend, by layer type, for rows of at most `committed` tokens.

        One rule for plain and speculative decoding, whatever the depth.
        """
        full = round_up(committed + max(length, SPARE_SLOTS))
        return {FULL: full, SLIDING: min(full, self.ring)}

    def span(self, first_row: int, starts: mx.array, length: int, committed: int) -> Span:
        """The span of a forward of `length` tokens per row; grows the full layers if it must.

        Args:
            first_row: the buffers' row of starts[0].
            starts: int32 [rows], committed lengths.
            length: tokens per row.
            committed: the largest of starts, known to the host.
        """
        slots = self.attended_slots(committed, length)
        self.reserve(slots[FULL])
        positions = starts[:, None] + mx.arange(length, dtype=mx.int32)
        last = starts + (length - 1)
        query = positions[:, :, None]
        held = self._held_positions(last, slots[SLIDING])[:, None, :]
        masks = {
            FULL: mx.arange(slots[FULL], dtype=mx.int32) <= query,
            SLIDING: (held >= 0) & (held <= query) & (held > query - self.window),
        }
        targets = {FULL: positions, SLIDING: positions % self.ring}
        ready = {kind: SlotMask(mask) for kind, mask in masks.items()}
        return Span(first_row, starts, length, slots, ready, targets)

    def drafter_masks(self, lengths: mx.array, slots: dict[str, int]) -> dict[str, SlotMask]:
        """What a drafter query may see: the committed prefix, on sliding layers its newest W + 1.

        (transformers' flipped bidirectional window; the target's own queries see W with theirs.)

        Args:
            lengths: int32 [rows], committed lengths.
            slots: slots attended, by layer type.

        Returns:
            Masks of one query per row, by layer type.
        """
        last = lengths[:, None] - 1
        held = self._held_positions(lengths - 1, slots[SLIDING])
        masks = {
            FULL: mx.arange(slots[FULL], dtype=mx.int32) <= last,
            SLIDING: (held >= 0) & (held >= last - self.window),
        }
        return {kind: SlotMask(mask[:, None]) for kind, mask in masks.items()}

    def _held_positions(self, last: mx.array, slots: int) -> mx.array:
        """[rows, slots]: the newest position <= last of each ring slot; negative where none."""
        slot = mx.arange(slots, dtype=mx.int32)
        return last[:, None] - (last[:, None] - slot) % self.ring

    # K/V in and out.

    def write(self, layer: int, span: Span, keys: mx.array, values: mx.array) -> None:
        """Put K/V of span's tokens into layer's slots, in place.

        MLX writes in place only while nobody else holds the buffer or a view of it; see `read`.

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

    def read(
        self, layer: int, first_row: int, rows: int, slots: dict[str, int]
    ) -> tuple[mx.array, mx.array]:
        """Views of layer's attended slots; let go of them before the next evaluation.

        Returns:
            keys, values: [rows, kv_heads, S, head_dim]
        """
        held = slots[self.config.layer_types[layer]]
        end = first_row + rows
        return (
            self.keys[layer][first_row:end, :, :held],
            self.values[layer][first_row:end, :, :held],
        )

    # Rows and growth.

    def reserve(self, slots: int) -> None:
        """Make the full layers hold at least `slots` slots; copies all rows if they must grow."""
        if slots <= self.capacity:
            return
        grown = max(round_up(slots), 2 * self.capacity)
        for layer, kind in enumerate(self.config.layer_types[: self.config.num_kv_layers]):
            if kind != FULL:
                continue
            for buffers in (self.keys, self.values):
                old = buffers[layer]
                extra = mx.zeros((*old.shape[:2], grown - self.capacity, old.shape[3]), old.dtype)
                buffers[layer] = mx.concatenate([old, extra], axis=2)
                self.bytes_copied += old.nbytes
                mx.eval(
                    buffers[layer]
                )  # one buffer at a time: the old one is freed before the next
        self.row_copies += self.rows
        self.capacity = grown

    def move(self, source: int, destination: int) -> None:
        """Copy row source over row destination, in place."""
        index = mx.array([source])
        for buffers in (self.keys, self.values):
            for layer in range(len(buffers)):
                row = mx.take(buffers[layer], index, axis=0)
                mx.eval(row)  # a pending reader of the buffer would make the write copy it whole
                buffers[layer][destination : destination + 1] = row
                mx.eval(buffers[layer])
                self.bytes_copied += row.nbytes
        self.row_copies += 1
