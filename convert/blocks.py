"""Tensors in row blocks. Owns: reading rows of a weight file into MLX, and turning a block into the
bytes that are written for it. Quantization works within a row, so blocks give the same bits as the
whole tensor. Nothing here outlives a block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mtp.convert.grid import quantize_on_grid
from mlx_mtp.convert.layout import DTYPES, Rows
from mlx_mtp.convert.recipes import Params
from mlx_mtp.convert.tensors import TOWERS, TensorPlan
from mlx_mtp.errors import IncompatibleError, ModelNotFoundError, ResourceError
from mlx_mtp.files import PlacedTensor, read_places

_AGAIN = "run the same command again: it goes on where it was."
_RAW = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_INFINITE = {"BF16": (np.int16, 0x7F80), "F16": (np.int16, 0x7C00), "F32": (np.int32, 0x7F800000)}
"""Of floating dtypes, the integers of their width and the one that stands for infinity."""


class Block(NamedTuple):
    """Rows [begin, end) of a tensor, and for each of its outputs the bytes of these rows."""

    begin: int
    end: int
    buffers: tuple[memoryview, ...]


class Reader:
    """The weight files of a checkpoint, open while they are read from. A context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, tuple[int, dict[str, PlacedTensor]]] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in list(self._open):
            self.close(file)

    def close(self, file: Path) -> None:
        """Close one file, if it is open."""
        if file in self._open:
            os.close(self._open.pop(file)[0])

    def read(
        self, rows: Rows, file: Path, begin: int, end: int, *, finite: bool = True
    ) -> mx.array:
        """Rows [begin, end) of what `rows` means, as an array [end - begin, width].

        ``finite``: numbers must be finite.

        Raises ModelNotFoundError: the file is shorter or another than it was, or holds numbers
            that are none; ResourceError: no memory for it.
        """
        descriptor, places = self._opened(file)
        name, width = rows.stored.name, rows.stored.info.shape[-1] if rows.stored.info.shape else 1
        placed = places.get(name)
        if placed is None or placed.info != rows.stored.info:
            raise ModelNotFoundError(
                f"{file} has changed since it was looked at.", "Run the command again."
            )
        dtype = DTYPES[rows.stored.info.dtype]
        try:
            array = mx.zeros((end - begin, width), dtype=_RAW[dtype.size])
            mx.eval(array)
        except RuntimeError as error:  # MLX has no memory for it
            raise ResourceError(
                f"There is no memory for rows of {name}.", f"Free some memory and {_AGAIN}"
            ) from error
        host = np.array(array, copy=False)
        target = host.reshape(-1).data.cast("B")
        row_bytes, position = width * dtype.size, 0
        for row, count in rows.segments(begin, end):
            length = count * row_bytes
            _read_into(
                descriptor,
                target[position : position + length],
                file,
                name,
                placed.offset + row * row_bytes,
            )
            position += length
        if finite and not _is_finite(host, rows.stored.info.dtype):
            raise ModelNotFoundError(
                f"{file}: {name} holds weights that are not finite numbers.",
                "Download or copy the model again, or take it from another place.",
            )
        return array.view(dtype)

    def _opened(self, file: Path) -> tuple[int, dict[str, PlacedTensor]]:
        if file not in self._open:
            places = read_places(file)
            try:
                descriptor = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise ModelNotFoundError(
                    f"{file} cannot be read: {error.strerror}.", f"Check the disk and {_AGAIN}"
                ) from error
            self._open[file] = descriptor, places
        return self._open[file]


def blocks(tensor: TensorPlan, reader: Reader, files: dict[str, Path]) -> Iterator[Block]:
    """All of a tensor in order, one block at a time.

    Args:
        files: the weight files that it is read from, by their names in the checkpoint.

    Raises as `Reader.read`.
    """
    total = tensor.rows.total
    for begin in range(0, total, tensor.block_rows):
        end = min(begin + tensor.block_rows, total)
        stored = read_rows(tensor, reader, files, begin, end)
        arrays = encode(tensor, stored)
        del stored
        mx.eval(arrays)
        block = Block(begin, end, tuple(map(_bytes_of, arrays)))
        del arrays
        yield block
        del block  # or it would live beside the next one


def read_rows(
    tensor: TensorPlan, reader: Reader, files: dict[str, Path], begin: int, end: int
) -> list[mx.array]:
    """Rows of a tensor and of what belongs to it, as stored."""
    wanted = [tensor.rows, *map(Rows.all_of, tensor.companions)]
    finite = tensor.part != TOWERS  # their clipping bounds may be infinite
    return [
        reader.read(rows, files[rows.stored.file], begin, end, finite=finite) for rows in wanted
    ]


def encode(tensor: TensorPlan, stored: list[mx.array]) -> list[mx.array]:
    """What is written for rows as stored: an array for each output, not evaluated yet."""
    if tensor.action == "copy":
        return stored
    if tensor.action == "cast":
        return [stored[0].astype(DTYPES[tensor.outputs[0].info.dtype])]
    params = tensor.params
    if params is None:
        raise IncompatibleError(
            f"{tensor.name} has no quantization.", "Convert the original checkpoint."
        )
    if tensor.action == "dequantize":
        return [dequantized(stored, params).astype(DTYPES[tensor.outputs[0].info.dtype])]
    weight = stored[0].astype(tensor.quantized_from)
    if tensor.on_grid:
        return quantize_on_grid(weight, params["group_size"])
    return list(
        mx.quantize(
            weight, group_size=params["group_size"], bits=params["bits"], mode=params["mode"]
        )
    )


def dequantized(arrays: list[mx.array], params: Params) -> mx.array:
    """What quantized weights, scales and, if any, biases stand for."""
    weight, scales, *biases = arrays
    return mx.dequantize(
        weight,
        scales,
        biases[0] if biases else None,
        group_size=params["group_size"],
        bits=params["bits"],
        mode=params["mode"],
    )


def _bytes_of(array: Any) -> memoryview:
    """An evaluated array's own memory."""
    return memoryview(array.view(mx.uint8)).cast("B")


def _read_into(descriptor: int, target: memoryview, file: Path, name: str, offset: int) -> None:
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise ModelNotFoundError(
                f"{file} cannot be read: {error.strerror}.", f"Check the disk and {_AGAIN}"
            ) from error
        if not count:
            raise ModelNotFoundError(
                f"{file} is damaged: it ends within {name}.", "Download or copy the model again."
            )
        done += count


def _is_finite(host: np.ndarray, dtype: str) -> bool:
    """Whether floating numbers, seen as integers, are all finite: exponents are not all ones."""
    if dtype not in _INFINITE:
        return True
    signed, infinity = _INFINITE[dtype]
    if not host.size:
        return True
    sign = 1 << (8 * host.itemsize - 1)
    return bool(host.view(signed).max() < infinity and host.max() < sign + infinity)
