"""The fate of one tensor, and a file of them. Owns: what is read, in which blocks, what is written
and where, and what memory that takes. Plain data; decides nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from mlx_mtp.convert.layout import DTYPES, Rows
from mlx_mtp.convert.recipes import Params
from mlx_mtp.convert.sources import Stored
from mlx_mtp.files import TensorInfo

Action = Literal["copy", "cast", "quantize", "dequantize"]

TOWERS = "towers"
"""The part of vision and audio tensors: written as they are, whatever they hold."""

BLOCK_BYTES = 64 * 2**20
"""Most bytes of a tensor that are read at a time; rows are never cut."""
FP_BLOCK_BYTES = 4 * 2**20
"""The same for the modes that MLX's CPU backend quantizes with arrays many times as large."""
FP_COPIES = {"mxfp4": 21, "mxfp8": 16, "nvfp4": 39}
"""Bytes that such a mode takes on the CPU for a byte of bfloat16 (measured, MLX 0.32)."""
GRID_COPIES = 14
"""The same for looking for a QAT grid, on every backend."""


class Planned(NamedTuple):
    """A tensor as it will be written, and where in its shard's data it begins."""

    name: str
    info: TensorInfo
    offset: int = 0


@dataclass(frozen=True)
class TensorPlan:
    """The fate of one parameter.

    Attributes:
        name: of the parameter; quantized, its matrix is called so and has scales beside it.
        part: what kind of parameter it is, e.g. "attention".
        action: what is done.
        rows: what is read.
        companions: scales and, if any, biases that dequantizing reads.
        params: what it is quantized with, or was.
        cast_to: the dtype that it is quantized from; None: as stored.
        on_grid: look for the 4-bit grid that the weights were trained for.
        reason: why a matrix is not quantized although the recipe quantizes; "" for all others.
        outputs: what is written.
    """

    name: str
    part: str
    action: Action
    rows: Rows
    outputs: tuple[Planned, ...]
    companions: tuple[Stored, ...] = ()
    params: Params | None = None
    cast_to: mx.Dtype | None = None
    on_grid: bool = False
    reason: str = ""

    @property
    def elements(self) -> int:
        """Weights of the unquantized tensor."""
        if self.action == "dequantize":
            return math.prod(self.outputs[0].info.shape)
        return math.prod(self.rows.shape)

    @property
    def source_bytes(self) -> int:
        return self.rows.nbytes + sum(stored.info.nbytes for stored in self.companions)

    @property
    def bytes(self) -> int:
        return sum(output.info.nbytes for output in self.outputs)

    @property
    def files(self) -> set[str]:
        """The source's files that it is read from."""
        return {self.rows.stored.file, *(stored.file for stored in self.companions)}

    @property
    def block_rows(self) -> int:
        """Rows that are read at a time."""
        large = self.outputs[0].info if self.action == "dequantize" else self.rows.stored.info
        width = large.shape[-1] if large.shape else 1
        row = width * DTYPES[large.dtype].size
        limit = FP_BLOCK_BYTES if self._copies else BLOCK_BYTES
        return max(1, min(self.rows.total, limit // max(row, 1)))

    @property
    def working_bytes(self) -> int:
        """Memory that its largest block takes: what is read, in between and written."""
        taken = self.source_bytes
        if self.action == "quantize":
            whole = self.elements * self.quantized_from.size
            if self.quantized_from != DTYPES[self.rows.stored.info.dtype]:
                taken += whole
            taken += self._copies * whole
        if self.action != "copy" and not self._copies:
            taken += self.bytes
        return taken * self.block_rows // max(self.rows.total, 1)

    @property
    def quantized_from(self) -> mx.Dtype:
        """What weights are cast to before they are quantized: scales inherit it."""
        return self.cast_to or DTYPES[self.rows.stored.info.dtype]

    @property
    def _copies(self) -> int:
        """Arrays as large as the block that quantizing it takes beside it; 0: none worth it."""
        if self.action != "quantize" or self.params is None:
            return 0
        return GRID_COPIES if self.on_grid else FP_COPIES.get(self.params["mode"], 0)


class Shard(NamedTuple):
    """A weight file to be written."""

    file: str
    tensors: tuple[TensorPlan, ...]

    @property
    def header(self) -> bytes:
        """The file's first bytes, up to the data."""
        entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        for output in self.outputs:
            end = output.offset + output.info.nbytes
            entries[output.name] = {
                "dtype": output.info.dtype,
                "shape": list(output.info.shape),
                "data_offsets": [output.offset, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data are aligned
        return len(text).to_bytes(8, "little") + text

    @property
    def outputs(self) -> list[Planned]:
        """In the order of their data."""
        outputs = [output for tensor in self.tensors for output in tensor.outputs]
        return sorted(outputs, key=lambda output: output.offset)

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + sum(tensor.bytes for tensor in self.tensors)
