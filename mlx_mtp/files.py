"""Files of a model folder, read with distrust. Owns: JSON files, the list of weight files, and
safetensors headers. Reads no tensor and needs no mlx.

A header is checked in full before any array is made from it: a truncated shard would otherwise
show up as an error, or as garbage, in the middle of a generation.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from mlx_mtp.errors import ModelNotFoundError
from mlx_mtp.plain import quoted

INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit (safetensors, tensor.rs MAX_HEADER_SIZE)."""
MAX_DIMENSIONS = 16
"""Dimensions of a tensor, with room: the number of its elements is computed."""
MAX_JSON_BYTES = 64 * 2**20
"""Largest JSON file that is read; an index of 100,000 tensors has a tenth of that."""
MAX_NESTING = 50
"""Deepest nesting in a JSON file: one near Python's own limit could not be copied or written."""

_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_SHOWN = 300
_SAMPLED_BYTES = 1 << 20
_UNREAD = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz")
"""Weights that are never read: most of these run code when they are."""
_AGAIN = "Download or copy the model again."


class TensorInfo(NamedTuple):
    """One tensor of a safetensors file: its dtype as the format spells it, e.g. "BF16"."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class PlacedTensor(NamedTuple):
    """One tensor of a safetensors file and where its first byte stands in that file."""

    info: TensorInfo
    offset: int


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelNotFoundError: absent, unreadable, damaged or absurdly
    large or deep."""
    try:
        values = json.loads(_bounded_bytes(path))
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path} is missing.", _AGAIN) from error
    except OSError as error:
        raise ModelNotFoundError(
            f"{path} cannot be read: {error.strerror}.", "Check its permissions."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelNotFoundError(f"{path} is not valid JSON.", _AGAIN) from error
    if not isinstance(values, dict):
        raise ModelNotFoundError(f"{path} holds no JSON object.", _AGAIN)
    if is_nested_deeper(values, MAX_NESTING):
        raise ModelNotFoundError(f"{path} is nested deeper than {MAX_NESTING}.", _AGAIN)
    return values


def read_optional_json(path: Path) -> dict[str, Any] | None:
    """As `read_json`, but None where there is no such file."""
    return read_json(path) if path.exists() else None


def is_nested_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects lie within each other more than so many times."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_nested_deeper(item, levels - 1) for item in inner)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """A JSON object to a file, the same bytes for the same values."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def wanted_weights(path: Path) -> list[str]:
    """The names of a model folder's safetensors files in order, missing ones among them.

    Taken from ``model.safetensors.index.json``, else ``model*.safetensors``. Raises
    ModelNotFoundError: an index that is damaged or points out of the folder.
    """
    if (path / INDEX).exists():
        names = indexed_files(path / INDEX)
    else:
        names = sorted(file.name for file in path.glob("model*.safetensors"))
        shards = [re.fullmatch(r"(.*-)\d{5}-of-(\d{5})(\..*)", name) for name in names]
        for shard in shards:
            if shard is not None:
                total = int(shard[2])
                wanted = {f"{shard[1]}{i + 1:05}-of-{total:05}{shard[3]}" for i in range(total)}
                names = sorted(wanted.union(names))
                break
    return names


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder, in order of their names.

    Raises ModelNotFoundError: no weights, shards missing (named), and as `wanted_weights`.
    """
    names = wanted_weights(path)
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        shown = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
        raise ModelNotFoundError(f"{path} lacks {shown}.", "Download the model again.")
    if not names:
        others = sorted(p.name for p in path.glob("*") if p.suffix in _UNREAD)
        found = f" (only {others[0]})" if others else ""
        raise ModelNotFoundError(
            f"{path} holds no model*.safetensors{found}.", "Use a checkpoint in safetensors format."
        )
    return [path / name for name in names]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file by name, from its header alone; see `read_places`."""
    return {name: placed.info for name, placed in read_places(file).items()}


def read_places(file: Path) -> dict[str, PlacedTensor]:
    """The tensors of a safetensors file and where they stand, from its header alone.

    Checks what the format promises: a bounded JSON header, known dtypes, byte ranges that fit
    dtype and shape, follow each other without gaps and end with the file. Raises
    ModelNotFoundError naming the file, with the bytes that are missing where it was cut short.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > MAX_HEADER_BYTES:
                raise _damaged(file, "it does not begin like a safetensors file")
            raw = stream.read(length)
    except OSError as error:
        raise ModelNotFoundError(f"{file} cannot be read: {error.strerror}.", _AGAIN) from error
    if len(raw) < length:
        raise _damaged(file, f"{length - len(raw):,} bytes of its header are missing")
    try:
        entries = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "its header is not valid JSON") from error
    if not isinstance(entries, dict):
        raise _damaged(file, "its header is no JSON object")
    about = entries.pop("__metadata__", None) or {}  # null where MLX has none to write
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise _damaged(file, "its metadata is not text")
    tensors, ranges = {}, []
    for name, entry in entries.items():
        info, begin, end = _tensor(file, name, entry)
        tensors[name] = PlacedTensor(info, 8 + length + begin)
        ranges.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            raise _damaged(file, f"the data of {name} do not follow the tensor before")
        position = end
    there = size - 8 - length
    if there < position:
        raise _damaged(file, f"{position - there:,} bytes are missing at its end")
    if there > position:
        raise _damaged(file, f"{there - position:,} bytes at its end belong to no tensor")
    return tensors


def read_headers(files: Iterable[Path]) -> dict[str, TensorInfo]:
    """The tensors of all shards. Raises ModelNotFoundError where two hold the same name."""
    merged: dict[str, TensorInfo] = {}
    origin: dict[str, Path] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in merged:
                raise ModelNotFoundError(
                    f"{name} is both in {origin[name].name} and in {file.name}.",
                    "Remove the files of another conversion from the folder.",
                )
            merged[name], origin[name] = info, file
    return merged


def needed_bytes(info: TensorInfo) -> int:
    """The bytes that a tensor's dtype and shape need; -1 where the dtype is unknown."""
    size = _DTYPE_BYTES.get(info.dtype)
    return -1 if size is None else math.prod(info.shape) * size


def fingerprint(folder: Path) -> str:
    """16 hex digits that change with a model folder's configs, tokenizer or weights.

    Of each weight file only the size, the header and the end are read, which every training and
    every conversion changes, so that it takes no time.
    """
    digest = sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            with file.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                digest.update(f"{file.name} {size} ".encode())
                for start in (0, max(0, size - _SAMPLED_BYTES)):
                    stream.seek(start)
                    digest.update(stream.read(_SAMPLED_BYTES))
        elif file.suffix in (".json", ".jinja", ".model") and file.is_file():
            digest.update(f"{file.name} ".encode())
            with file.open("rb") as stream:
                while piece := stream.read(_SAMPLED_BYTES):
                    digest.update(piece)
    return digest.hexdigest()[:16]


def indexed_files(index: Path) -> list[str]:
    """The weight files that an index names, sorted. Raises ModelNotFoundError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelNotFoundError(f"{index} has no weight_map.", _AGAIN)
    names = set()
    for name in weight_map.values():
        # only files of this very folder: an index must not make us read anything else
        if not isinstance(name, str) or not re.fullmatch(r"[\w][\w.-]*\.safetensors", name):
            raise ModelNotFoundError(
                f"{index} names {quoted(name)}, which is not a weight file of that folder.", _AGAIN
            )
        names.add(name)
    return sorted(names)


def _bounded_bytes(path: Path) -> bytes:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
        raise ModelNotFoundError(f"{path} is not a regular file.", _AGAIN)
    if status.st_size > MAX_JSON_BYTES:
        most = MAX_JSON_BYTES // 2**20
        raise ModelNotFoundError(f"{path} is larger than {most} MiB, which no config is.", _AGAIN)
    return path.read_bytes()


def _tensor(file: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(file, f"the header's entry for {name} has no shape and data_offsets")
    if len(shape) > MAX_DIMENSIONS or max([*shape, *offsets]) >= 2**63:
        raise _damaged(file, f"{name} has a shape or offsets that no tensor has")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise _damaged(file, f"{name} is of the unknown dtype {quoted(dtype)}")
    begin, end = offsets
    nbytes = math.prod(shape) * _DTYPE_BYTES[dtype]
    if end - begin != nbytes:
        raise _damaged(file, f"{name} has {end - begin:,} bytes where its shape needs {nbytes:,}")
    return TensorInfo(dtype, tuple(shape), nbytes), begin, end


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _damaged(file: Path, what: str) -> ModelNotFoundError:
    shown = what if len(what) <= _SHOWN else f"{what[:_SHOWN]}..."  # names may have any length
    return ModelNotFoundError(f"{file} is damaged: {shown}.", _AGAIN)
