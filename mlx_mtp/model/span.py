"""What one forward covers. Owns: the sizes that slots come in, how many of them each row attends
over, and the span: where its tokens go and what they see. Holds no K/V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.config_json import FULL, SLIDING
from mlx_mtp.model.attention import SlotMask, last_of
from mlx_mtp.types import MAX_DEPTH

PREFILL_CHUNK = 256
"""Most prompt tokens put through the target in one forward."""
SLOT_STEP = 256
"""Buffers hold a multiple of this many slots."""
ATTENDED_STEP = 128
"""Attention covers a multiple of this many slots."""
SPARE_SLOTS = MAX_DEPTH + 1
"""Slots past a row's committed prefix that a verify may write."""


def round_up(slots: int, step: int = SLOT_STEP) -> int:
    """The next multiple of a step."""
    return -(-slots // step) * step


def ring_slots(window: int) -> int:
    """Slots of a sliding layer.

    A prompt chunk's first token still sees its whole window after the chunk's last token was
    written. The slack is also what a rollback and the drafter's window + 1 keys need. It depends
    on nothing but the model, so that K/V are bit-equal however a token came.
    """
    return round_up(window + PREFILL_CHUNK)


class Run(NamedTuple):
    """Neighbouring rows that attend over the same number of slots.

    Attributes:
        first: the first row, counted from the span's first.
        rows: how many.
        slots: slots attended.
        near: slots that queries attend which need no more of them; 0: all attend `slots`.
    """

    first: int
    rows: int
    slots: int
    near: int = 0


@dataclass(frozen=True)
class Span:
    """Where the L tokens of one forward go and what they see, for a contiguous range of rows.

    Attributes:
        first_row: index of the first row in the buffers.
        starts: int32 [rows], the position of each row's first token, which is its committed length.
        length: L, tokens per row.
        runs: runs of rows by layer type.
        masks: which slots each query may see, for each run, by layer type.
        targets: int32 [rows, L], slots written, by layer type.
        ends: int32 [rows], tokens of each row that count, where they differ; what stands behind
            them is padding, whose K/V nobody will see. None: all L.
        apart: each row goes through kernels of its own, so that no other row can change which
            ones they are.
    """

    first_row: int
    starts: mx.array
    length: int
    runs: dict[str, tuple[Run, ...]]
    masks: dict[str, tuple[SlotMask, ...]]
    targets: dict[str, mx.array]
    ends: mx.array | None = None
    apart: bool = False

    @property
    def rows(self) -> int:
        return self.starts.shape[0]

    def last(self) -> Span:
        """The same rows, the last token of each only; nothing of it may be written."""
        masks = {
            kind: tuple(
                mask.last(None if self.ends is None else self.ends[run.first :][: run.rows])
                for run, mask in zip(self.runs[kind], self.masks[kind], strict=True)
            )
            for kind in self.masks
        }
        starts = self.starts + (self.length if self.ends is None else self.ends) - 1
        return replace(self, starts=starts, length=1, masks=masks, targets={}, ends=None)

    def take_last(self, x: mx.array) -> mx.array:
        """[rows, L, ...] -> [rows, 1, ...]: each row's last token."""
        return last_of(x, self.ends)


Runs = dict[str, tuple[Run, ...]]
"""Runs of rows by layer type; together they are all rows."""


def runs_of(committed: Sequence[int], length: int, ring: int) -> Runs:
    """Runs of rows, and how many slots each attends over.

    A row needs its committed tokens and room for a verify, in steps of ATTENDED_STEP: one rule for
    plain and speculative decoding, whatever the depth.

    Args:
        committed: committed length of each row, known to the host.
        length: tokens per row of the forward.
        ring: slots of the sliding layers.
    """
    spare = max(length, SPARE_SLOTS)
    return grouped([round_up(tokens + spare, ATTENDED_STEP) for tokens in committed], ring)


def grouped(needs: Sequence[int], ring: int) -> Runs:
    """Runs of rows that need so many slots: on full layers no row streams more than twice what it
    needs; on sliding layers the ring bounds them."""
    runs = [Run(0, 1, needs[0])]
    for row, need in enumerate(needs[1:], start=1):
        first, rows, *_ = runs[-1]
        together = needs[first : row + 1]
        if max(together) <= 2 * min(together):
            runs[-1] = Run(first, rows + 1, max(together))
        else:
            runs.append(Run(row, 1, need))
    return {FULL: tuple(runs), SLIDING: (Run(0, len(needs), min(max(needs), ring)),)}


def runs_apart(committed: Sequence[int], length: int, ring: int) -> Runs:
    """As `runs_of`, but each row for itself, and the slots that a query attends over are a function
    of its position alone, wherever in a verify it stands; `length` is at most ATTENDED_STEP."""
    most = {FULL: max(committed) + length + ATTENDED_STEP, SLIDING: ring}
    runs: dict[str, list[Run]] = {kind: [] for kind in most}
    for row, tokens in enumerate(committed):
        first = round_up(tokens + 1, ATTENDED_STEP)
        last = round_up(tokens + length, ATTENDED_STEP)
        for kind, limit in most.items():
            slots = min(last, limit)
            runs[kind].append(Run(row, 1, slots, near=first if first < slots else 0))
    return {kind: tuple(of_kind) for kind, of_kind in runs.items()}
