"""The memory budget: exact for K/V, an upper bound for the rest, and monotone."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import SIZES

from mlx_mtp.files import read_json
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.memory import KVSize, MemoryBudget, activation_bytes, device_limit
from mlx_mtp.model.span import round_up
from mlx_mtp.pair import TargetConfig

GB = 10**9

# bytes in bf16: rings of one row; one slot of one row of all full layers
WORKED = {
    "E2B": (12 * 2 * 1 * 256 * 768 * 2, 3 * 2 * 1 * 512 * 2),
    "E4B": (20 * 2 * 2 * 256 * 768 * 2, 4 * 2 * 2 * 512 * 2),
    "12B": (40 * 2 * 8 * 256 * 1280 * 2, 8 * 2 * 1 * 512 * 2),
    "26B-A4B": (25 * 2 * 8 * 256 * 1280 * 2, 5 * 2 * 2 * 512 * 2),
    "31B": (50 * 2 * 16 * 256 * 1280 * 2, 10 * 2 * 4 * 512 * 2),
}


def config_of(size: str) -> TargetConfig:
    return TargetConfig.from_dict(SIZES[size][0])


@pytest.mark.parametrize("size", SIZES)
def test_worked_table(size: str) -> None:
    kv = KVSize.of(config_of(size), 2)
    assert (kv.ring, kv.slot) == WORKED[size]
    assert kv.total(8, 8192) == 8 * (WORKED[size][0] + 8192 * WORKED[size][1])


def test_a_row_of_31b_holds_a_gigabyte_of_rings() -> None:
    assert round(KVSize.of(config_of("31B"), 2).ring / GB, 2) == 1.05


@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (3, 700), (9, 256)])
def test_kv_size_is_what_a_cache_takes(pair: Path, rows: int, slots: int) -> None:
    config = TargetConfig.from_dict(read_json(pair / "target" / "config.json"))
    for dtype in (mx.float32, mx.bfloat16):
        cache = SlotCache(config, rows, dtype, slots)
        held = sum(buffer.nbytes for buffer in cache.keys + cache.values)
        assert held == KVSize.of(config, dtype.size).total(rows, cache.capacity)


def test_the_peak_has_room_for_the_buffer_that_growth_copies_into(pair: Path) -> None:
    config = TargetConfig.from_dict(read_json(pair / "target" / "config.json"))
    cache = SlotCache(config, 3, mx.float32, 2048)
    largest = max(buffer.nbytes for buffer in cache.keys)
    held = sum(buffer.nbytes for buffer in cache.keys + cache.values)
    beside = activation_bytes(config, 4, 3, 2048)
    assert MemoryBudget(config, 4, 0, 0).needed(3, 2048) >= held + largest + beside


@given(
    size=st.sampled_from(sorted(SIZES)),
    slots=st.integers(1, 262_144),
    limit=st.integers(1, 300 * GB),
    taken=st.integers(0, 20 * GB),
)
def test_the_rows_that_fit_are_the_most_that_fit(
    size: str, slots: int, limit: int, taken: int
) -> None:
    budget = MemoryBudget(config_of(size), 2, 4 * GB, limit)
    rows = budget.rows_at(slots, 8, taken)
    assert 0 <= rows <= 8
    if rows:
        assert budget.needed(rows, slots) + taken <= limit
    if rows < 8:
        assert budget.needed(rows + 1, slots) + taken > limit
    assert budget.rows_at(round_up(slots), 8, taken) == rows


def test_the_device_has_a_limit() -> None:
    assert device_limit() > GB
