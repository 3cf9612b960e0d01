"""The slot cache against a naive model that remembers every token's K/V by position."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.config_json import FULL, SLIDING
from mlx_mtp.model.attention import Seen
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.snapshot import Snapshot
from mlx_mtp.model.span import (
    ATTENDED_STEP,
    PREFILL_CHUNK,
    SLOT_STEP,
    SPARE_SLOTS,
    Span,
    ring_slots,
    round_up,
    runs_of,
)
from mlx_mtp.pair import TargetConfig

WINDOW = 20
CONFIG = TargetConfig.from_dict(
    {
        "model_type": "gemma4_text",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "layer_types": [SLIDING, FULL, SLIDING],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "sliding_window": WINDOW,
        "vocab_size": 16,
        "max_position_embeddings": 4096,
    }
)


def stamp(row_id: int, position: int, attempt: int) -> float:
    """A number that says whose token this is, where, and which try wrote it."""
    return row_id * 1e4 + position + attempt / 64


class Rows:
    """The naive model: for each row what is committed, and the cache beside it."""

    def __init__(self, rows: int) -> None:
        self.cache = SlotCache(CONFIG, rows, mx.float32)
        self.committed: list[list[float]] = []
        self.names: list[int] = []
        self.attempt = 0

    def write(
        self, first: int, names: list[int], starts: list[int], length: int
    ) -> list[list[float]]:
        """Put `length` new tokens into rows; what was written."""
        self.attempt += 1
        span = self.cache.span(first, mx.array(starts, mx.int32), length, starts)
        values = [
            [stamp(name, start + i, self.attempt % 64) for i in range(length)]
            for name, start in zip(names, starts, strict=True)
        ]
        for layer in range(CONFIG.num_kv_layers):
            shape = (len(names), CONFIG.kv_heads(layer), length, CONFIG.kv_head_dim(layer))
            kv = mx.broadcast_to(mx.array(values, mx.float32)[:, None, :, None], shape)
            self.cache.write(layer, span, kv, -kv)
        mx.eval(self.cache.keys, self.cache.values)
        self.check_queries(span, first, starts, values)
        return values

    def check_queries(
        self, span: Span, first: int, starts: list[int], values: list[list[float]]
    ) -> None:
        """Every query of the span sees just its own prefix, windowed on sliding layers."""
        for layer in range(CONFIG.num_kv_layers):
            kind = CONFIG.layer_types[layer]
            for row, (seen, mask) in enumerate(by_row(self.cache.seen_by_target(layer, span))):
                start = starts[row]
                known = self.committed[first + row] if first + row < len(self.committed) else []
                known = known[:start] + values[row]
                for query in range(len(values[row])):
                    upto = known[: start + query + 1]
                    expected = upto if kind == FULL else upto[-WINDOW:]
                    assert sorted(seen[mask[query]]) == sorted(np.float32(expected))

    def check_drafter(self) -> None:
        """The drafter sees the committed prefix, on sliding layers its newest W + 1 tokens."""
        lengths = [len(text) for text in self.committed]
        runs = runs_of(lengths, 1, self.cache.ring)
        self.cache.reserve(max(run.slots for run in runs[FULL]))
        for kind, parts in self.cache.seen_by_drafter(mx.array(lengths, mx.int32), runs).items():
            for text, (seen, mask) in zip(self.committed, by_row(parts), strict=True):
                expected = text if kind == FULL else text[-(WINDOW + 1) :]
                assert sorted(seen[mask[0]]) == sorted(np.float32(expected))


def by_row(parts: list[Seen]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each row what its slots hold [S], and who may see them [L, S]."""
    rows = []
    for keys, values, mask in parts:
        assert np.array_equal(np.array(keys), -np.array(values))
        rows += zip(np.array(keys)[:, 0, :, 0], np.array(mask.folded)[:, 0, 0], strict=True)
    return rows


def test_ring_holds_window_and_chunk() -> None:
    assert ring_slots(512) == 768
    assert ring_slots(1024) == 1280
    assert ring_slots(16) == 512
    for window in range(1, 600, 7):
        ring = ring_slots(window)
        assert ring % SLOT_STEP == 0
        assert ring >= window + PREFILL_CHUNK >= window + 1 + SPARE_SLOTS


@pytest.mark.parametrize("committed", [1, 247, 248, 249, 500, 511, 512])
def test_attended_slots_are_the_same_for_every_depth(committed: int) -> None:
    runs = [runs_of([committed], length, ring=512) for length in range(1, SPARE_SLOTS + 1)]
    assert all(each == runs[0] for each in runs)
    (full,), (ring,) = runs[0][FULL], runs[0][SLIDING]
    assert full.slots % ATTENDED_STEP == 0
    assert full.slots >= committed + SPARE_SLOTS
    assert ring.slots == min(full.slots, 512)


@given(committed=st.lists(st.integers(1, 9000), min_size=1, max_size=8))
def test_no_row_streams_a_long_neighbours_slots(committed: list[int]) -> None:
    """On full layers at most twice its own, in steps of ATTENDED_STEP; no row is left out."""
    runs = runs_of(committed, 1, ring_slots(WINDOW))
    row = 0
    for run in runs[FULL]:
        assert run.first == row
        for tokens in committed[row : row + run.rows]:
            own = round_up(tokens + SPARE_SLOTS, ATTENDED_STEP)
            assert own <= run.slots <= 2 * own
        row += run.rows
    assert row == len(committed)
    assert runs[SLIDING][0].rows == len(committed)


def test_growth_keeps_what_is_there() -> None:
    rows = Rows(2)
    rows.committed = [[], []]
    for row in range(2):
        (written,) = rows.write(row, [row + 1], [0], 200)
        rows.committed[row] = written
    assert rows.cache.capacity == 256
    rows.cache.reserve(2000)
    assert rows.cache.capacity == 2048
    assert rows.cache.row_copies == 2
    rows.check_drafter()


def filled(rows: int) -> SlotCache:
    cache = SlotCache(CONFIG, rows, mx.float32, 40_000)
    mx.synchronize()
    return cache


@pytest.mark.parametrize("live", [1, 3, 4])
def test_writes_and_moves_are_in_place(live: int) -> None:
    """Neither copies a buffer: the peak grows by less than the smallest full-layer buffer."""
    cache = filled(4)
    largest = max(buffer.nbytes for buffer in cache.keys)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for step in range(20):
        span = cache.span(0, mx.full((live,), step, mx.int32), 1, [step] * live)
        for layer in range(CONFIG.num_kv_layers):
            shape = (live, CONFIG.kv_heads(layer), 1, CONFIG.kv_head_dim(layer))
            cache.write(layer, span, mx.ones(shape), mx.ones(shape))
            ((keys, values, _),) = cache.seen_by_target(layer, span)
            total = (keys * 2).sum() + values.sum()
            mx.eval(total)
            del keys, values, total
        mx.eval(cache.keys, cache.values)
    assert mx.get_peak_memory() - before < largest / 4
    mx.reset_peak_memory()
    cache.move(3, 1)
    row = sum(buffer.nbytes for buffer in cache.keys + cache.values) // 4
    assert mx.get_peak_memory() - before <= row + largest / 4 + 4096  # one row, apart from views
    assert cache.row_copies == 1
    assert cache.bytes_copied == row


def test_a_snapshot_holds_whole_rings_and_the_committed_slots() -> None:
    rows = Rows(2)
    rows.committed = [[]]
    for start in (0, 200, 400):
        (written,) = rows.write(0, [1], [start], 200)
        rows.committed[0] += written
    cache = rows.cache
    Snapshot.take(cache, 0, 600).restore(cache, 1)
    for layer, buffer in enumerate(cache.keys):
        held = 600 if CONFIG.layer_types[layer] == FULL else cache.ring
        assert mx.array_equal(buffer[1, :, :held], buffer[0, :, :held])
        assert mx.array_equal(cache.values[layer][1], -buffer[1])
        assert not buffer[1, :, held:].any()
