"""What a checkpoint holds. Owns: its tensors summed by part and by how they are stored, and the
bytes that they take once loaded. Made from a layout of headers; reads no tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mtp.convert.card import format_of
from mlx_mtp.convert.layout import DTYPES, Layout, Rows, quantized_modules
from mlx_mtp.convert.parts import is_buffer, part_of
from mlx_mtp.convert.tensors import TOWERS
from mlx_mtp.model.load import loaded_dtype, widens_experts

_OF_A_MATRIX = ("weight", "scales", "biases", "global_scale")


class Storage(NamedTuple):
    """How a tensor is stored: as numbers of a dtype, or quantized, which leaves dtype None."""

    dtype: str | None = None
    bits: int | None = None
    group_size: int | None = None
    mode: str | None = None

    def __str__(self) -> str:
        return self.dtype if self.dtype is not None else format_of(self._asdict())


class Held(NamedTuple):
    """Tensors of one part that are stored alike.

    Attributes:
        part: for example "attention".
        weights: trained numbers, however they are stored; buffers are not among them.
        bytes: stored, scales and biases of quantized matrices included.
    """

    part: str
    storage: Storage
    tensors: int
    weights: int
    bytes: int


class Unused(NamedTuple):
    """Stored tensors that are not loaded, and why."""

    why: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Contents:
    """A checkpoint's tensors, summed.

    Attributes:
        held: the largest first.
        unused: what is stored for nothing, or for other programs.
        activation: the dtype that it is stored for.
        loaded_bytes: what it takes once loaded.
    """

    held: tuple[Held, ...]
    unused: tuple[Unused, ...]
    activation: mx.Dtype
    loaded_bytes: int

    @classmethod
    def of(cls, layout: Layout, activation: mx.Dtype, *, is_drafter: bool) -> Contents:
        """Of a checkpoint laid out.

        Args:
            activation: dtype that it is to run in: the target's, for a drafter, too.
        """
        formats = quantized_modules(layout.modules)
        sums: dict[tuple[str, Storage], list[int]] = defaultdict(lambda: [0, 0, 0])
        for name, rows in layout.rows.items():
            path, _, leaf = name.rpartition(".")
            params = formats.get(path) if leaf in _OF_A_MATRIX else None
            key = (part_of(name, is_drafter=is_drafter), _storage(rows, params))
            for index, count in enumerate((1, _weights(name, rows, params), rows.nbytes)):
                sums[key][index] += count
        held = [Held(*key, *counts) for key, counts in sums.items()]
        return cls(
            held=tuple(sorted(held, key=lambda one: -one.bytes)),
            unused=tuple(_unused(layout)),
            activation=layout.dtype,
            loaded_bytes=_loaded_bytes(layout.rows, activation, is_drafter=is_drafter),
        )

    @property
    def weights(self) -> int:
        """Trained numbers, a tied table counted once; without towers and buffers."""
        return sum(one.weights for one in self.held)

    @property
    def bytes(self) -> int:
        """Of all that is loaded, as it is stored."""
        return sum(one.bytes for one in self.held)

    @property
    def storages(self) -> dict[Storage, int]:
        """How it is stored -> bytes, the most first."""
        sums: dict[Storage, int] = defaultdict(int)
        for one in self.held:
            sums[one.storage] += one.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _storage(rows: Rows, params: dict[str, Any] | None) -> Storage:
    if params is not None:
        return Storage(None, params["bits"], params["group_size"], params["mode"])
    return Storage(dtype_name(DTYPES[rows.stored.info.dtype]))


def dtype_name(dtype: mx.Dtype) -> str:
    """For example ``bfloat16``."""
    return str(dtype).rpartition(".")[2]


def _weights(name: str, rows: Rows, params: dict[str, Any] | None) -> int:
    """Trained numbers in a tensor: none in the scales of a quantized matrix."""
    if is_buffer(name):
        return 0
    count = math.prod(rows.shape)
    if params is None:
        return count
    return count * 32 // params["bits"] if name.endswith(".weight") else 0


def _unused(layout: Layout) -> Iterable[Unused]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    unused = [(TOWERS, tower) for tower in layout.towers]
    for why, stored in [*unused, *((one.why, one.stored) for one in layout.dropped)]:
        sums[why][0] += 1
        sums[why][1] += stored.info.nbytes
    return (Unused(why, *counts) for why, counts in sums.items())


def _loaded_bytes(rows: dict[str, Rows], activation: mx.Dtype, *, is_drafter: bool) -> int:
    wide = not is_drafter and widens_experts(activation)
    return sum(
        math.prod(one.shape)
        * loaded_dtype(name, DTYPES[one.stored.info.dtype], activation, wide=wide).size
        for name, one in rows.items()
    )
