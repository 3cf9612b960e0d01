"""Attention over slot caches. Owns: the folded form and the choice between it and MLX's kernel.

Gemma 4 scales attention by 1: its q_norm and k_norm take the place of 1/sqrt(head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

FUSED_HEAD_DIM = 256
"""The head_dim that MLX's fused vector kernel serves for short queries (512 it leaves unfused)."""
FUSED_MAX_QUERIES = 32
"""Most query rows per KV head, L * heads / kv_heads, that the fused vector kernel takes."""
FUSED_MAX_LENGTH = 8
"""Most query tokens that the fused vector kernel takes."""


def use_fused(head_dim: int, length: int, group: int) -> bool:
    """Whether `attend` should call MLX's fused kernel.

    Only on a GPU, whose vector kernel streams K and V once per KV head. The CPU has no such
    kernel: its fallback multiplies once per query head.

    Args:
        head_dim: width of a head.
        length: query tokens L per row.
        group: query heads per KV head.
    """
    return (
        mx.default_device().type == mx.DeviceType.gpu
        and head_dim == FUSED_HEAD_DIM
        and length <= FUSED_MAX_LENGTH
        and length * group <= FUSED_MAX_QUERIES
    )


class SlotMask:
    """Which slots each query may see, in the shapes that attention wants; made once per forward.

    Args:
        visible: bool [rows, L, S]; every query must see at least one slot.
        near: queries that see none but the first `near` slots attend over those alone; 0: all
            attend over S.

    Attributes:
        folded: bool [rows, 1, 1, L, S], for the folded form.
        slots: S.
        near: the mask of the first slots, None without.
        is_near: bool [rows, L, 1], the queries that attend over them alone; None without.
    """

    def __init__(self, visible: mx.array, near: int = 0) -> None:
        self._visible = visible
        self.folded = visible[:, None, None]
        self.slots = visible.shape[2]
        self.near = SlotMask(visible[..., :near]) if near else None
        self.is_near = ~visible[..., near:].any(-1, keepdims=True) if near else None
        self._wide: mx.array | None = None

    def wide(self, heads: int) -> mx.array:
        """bool [rows, heads, L, S], contiguous: MLX's kernel would copy any other at each layer.

        A model has one number of query heads, so one array serves all layers.
        """
        rows, length, slots = self._visible.shape
        if self._wide is None or self._wide.shape[1] != heads:
            shape = (rows, heads, length, slots)
            self._wide = mx.contiguous(mx.broadcast_to(self._visible[:, None], shape))
        return self._wide

    def last(self, ends: mx.array | None = None) -> SlotMask:
        """The mask of each row's last query; `ends` as `last_of` takes it."""
        near = 0 if self.near is None else self.near.slots
        return SlotMask(last_of(self._visible, ends), near)


def last_of(x: mx.array, ends: mx.array | None) -> mx.array:
    """[rows, L, ...] -> [rows, 1, ...]: each row's last place, or the one before ends[row]."""
    if ends is None:
        return x[:, -1:]
    index = (ends - 1).reshape(-1, *[1] * (x.ndim - 1))
    return mx.take_along_axis(x, mx.broadcast_to(index, (x.shape[0], 1, *x.shape[2:])), axis=1)


class Seen(NamedTuple):
    """What a run of rows attends to; holds views of a cache, so it must not outlive a forward.

    Attributes:
        keys, values: [rows, kv_heads, S, head_dim]; may be slices of a larger buffer.
        mask: of these rows, L and S.
    """

    keys: mx.array
    values: mx.array
    mask: SlotMask


def attend(queries: mx.array, seen: Sequence[Seen]) -> mx.array:
    """Masked attention of ragged rows, query heads grouped by KV head.

    Args:
        queries: [rows, heads, L, head_dim], normed and roped.
        seen: runs of rows that follow one another and make up all rows.

    Returns:
        [rows, L, heads * head_dim]
    """
    if len(seen) == 1:
        return _attend_run(queries, seen[0])
    outs, first = [], 0
    for part in seen:
        end = first + part.keys.shape[0]
        outs.append(_attend_run(queries[first:end], part))
        first = end
    return mx.concatenate(outs)


def _attend_run(queries: mx.array, seen: Seen) -> mx.array:
    """Attention of one run of rows."""
    keys, values, mask = seen
    out = _attend(queries, keys, values, mask)
    if mask.near is None or mask.is_near is None:
        return out
    first = mask.near.slots
    near = _attend(queries, keys[:, :, :first], values[:, :, :first], mask.near)
    return mx.where(mask.is_near, near, out)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, mask: SlotMask) -> mx.array:
    """Attention of rows that all attend over the same slots.

    The folded form multiplies all query heads of a KV head at once, so K and V are streamed once
    per KV head, and each query row is computed alike whatever L and the number of rows are.
    """
    rows, heads, length, head_dim = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    if use_fused(head_dim, length, group):
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=1.0, mask=mask.wide(heads)
        )
    else:
        folded = queries.reshape(rows, kv_heads, group * length, head_dim)
        scores = (folded @ keys.swapaxes(-1, -2)).reshape(rows, kv_heads, group, length, slots)
        lowest = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
        weights = _softmax(mx.where(mask.folded, scores, lowest))
        folded = weights.reshape(rows, kv_heads, group * length, slots) @ values
        out = folded.reshape(rows, heads, length, head_dim)
    return out.transpose(0, 2, 1, 3).reshape(rows, length, heads * head_dim)


def _softmax(scores: mx.array) -> mx.array:
    """Over the last axis, computed in fp32 whatever the dtype.

    On the CPU backend a cast there and back takes half the time of its own precise softmax and
    gives the same bits; a GPU's kernel needs no array of fp32 for it.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return mx.softmax(scores.astype(mx.float32), axis=-1).astype(scores.dtype)
    return mx.softmax(scores, axis=-1, precise=True)
