"""The folded form against MLX's own attention, and the rule that chooses between them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.model import attention
from mlx_mtp.model.attention import Seen, SlotMask, attend, use_fused


def inputs(
    rows: int, heads: int, kv_heads: int, length: int, slots: int
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(heads * length)
    shapes = [(rows, heads, length, 32), (rows, kv_heads, slots, 32), (rows, kv_heads, slots, 32)]
    visible = rng.random((rows, length, slots)) < 0.3
    visible[..., 0] = True
    return *(mx.array(rng.normal(size=s).astype(np.float32)) for s in shapes), mx.array(visible)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (8, 4), (2, 2)])
@pytest.mark.parametrize("length", [1, 5])
def test_both_forms_agree(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, length: int
) -> None:
    queries, keys, values, visible = inputs(3, heads, kv_heads, length, 48)
    mask = SlotMask(visible)
    folded = attend(queries, [Seen(keys, values, mask)])
    assert folded.shape == (3, length, heads * 32)
    monkeypatch.setattr(attention, "use_fused", lambda *_: True)
    fused = attend(queries, [Seen(keys, values, mask)])
    np.testing.assert_allclose(np.array(folded), np.array(fused), rtol=0, atol=1e-5)
    assert mask.wide(heads) is mask.wide(heads)


def test_what_a_mask_hides_has_no_weight() -> None:
    queries, keys, values, visible = inputs(2, 4, 2, 3, 16)
    out = np.array(attend(queries, [Seen(keys, values, SlotMask(visible))]))
    hidden = ~np.array(visible).any(axis=1)  # slots that no query of the row sees
    garbage = mx.array(np.where(hidden[:, None, :, None], 1e4, 0).astype(np.float32))
    again = np.array(attend(queries, [Seen(keys + garbage, values + garbage, SlotMask(visible))]))
    assert np.array_equal(out, again)


def test_runs_of_rows_give_what_one_run_gives() -> None:
    """A run may leave out slots that its rows do not see: the bits are the same."""
    queries, keys, values, visible = inputs(3, 4, 2, 2, 512)
    short = visible & (mx.arange(512) < 256)
    visible = mx.concatenate([short[:2], visible[2:]])
    whole = attend(queries, [Seen(keys, values, SlotMask(visible))])
    runs = [
        Seen(keys[:2, :, :256], values[:2, :, :256], SlotMask(visible[:2, :, :256])),
        Seen(keys[2:], values[2:], SlotMask(visible[2:])),
    ]
    assert np.array_equal(np.array(whole), np.array(attend(queries, runs)))


def test_the_last_query_has_the_last_mask() -> None:
    queries, keys, values, visible = inputs(2, 4, 2, 3, 16)
    mask = SlotMask(visible)
    whole = np.array(attend(queries, [Seen(keys, values, mask)]))
    last = np.array(attend(queries[:, :, -1:], [Seen(keys, values, mask.last())]))
    assert np.array_equal(whole[:, -1:], last)


def test_fused_only_where_its_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts of MLX's dispatch: head_dim 256, at most 8 query tokens, 32 query rows per KV head."""
    assert not use_fused(256, 1, 2)  # the CPU always folds

    class Gpu:
        type = mx.DeviceType.gpu

    monkeypatch.setattr(mx, "default_device", lambda: Gpu)
    group = {"E2B": 8, "E4B": 4, "12B": 2, "26B-A4B": 2, "31B": 2}
    longest = {
        name: max(length for length in range(1, 300) if use_fused(256, length, g))
        for name, g in group.items()
    }
    assert longest == {"E2B": 4, "E4B": 8, "12B": 8, "26B-A4B": 8, "31B": 8}
    assert not use_fused(512, 1, 8)
