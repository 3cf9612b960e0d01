"""Weight files, written block by block. Owns: a shard's header and bytes, its temporary name, and
telling a whole file from a torn one. Knows nothing of why a tensor is stored as it is.

A shard gets its name only when it is whole and on the disk, so what has the name can be trusted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import mlx.core as mx

from mlx_mtp.convert.blocks import Reader, blocks
from mlx_mtp.convert.parts import PartPlan
from mlx_mtp.convert.tensors import Shard, TensorPlan
from mlx_mtp.errors import ResourceError
from mlx_mtp.files import INDEX, write_json

UNFINISHED = ".unfinished"


class Progress(NamedTuple):
    """How far a conversion is.

    Attributes:
        step: "fetch", "write" or "check".
        part: "target" or "drafter".
        shard, shards: the file under way, from 1, and how many the part has.
        bytes_done, bytes_total: of source data, both parts together; what an earlier run did is
            not among the former but in `bytes_skipped`.
        bytes_fetched: of the file that is downloaded, so far.
    """

    step: str
    part: str
    shard: int
    shards: int
    bytes_done: int
    bytes_total: int
    bytes_skipped: int = 0
    bytes_fetched: int = 0


Observer = Callable[[Progress], None]


class Inspector(Protocol):
    """Is shown what was written while its source is at hand."""

    def tensor(
        self, tensor: TensorPlan, reader: Reader, file: Path, sources: dict[str, Path]
    ) -> None:
        """A tensor is in its file, which has not got its name yet."""

    def shard(self, shard: Shard) -> None:
        """All tensors of a shard were shown."""


class PartWriter:
    """Writes one part's shards.

    Args:
        plan: of the part.
        folder: where they go; it exists.
        progress: how far the whole conversion is.
        observe: is told after each block.
        inspector: is shown each tensor that is written.
    """

    def __init__(
        self,
        plan: PartPlan,
        folder: Path,
        progress: Progress,
        observe: Observer | None = None,
        inspector: Inspector | None = None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._observe = observe
        self._inspector = inspector
        self._files: dict[str, Path] = {}
        self.progress = progress._replace(shards=len(plan.shards))

    def write(self) -> None:
        """Write every shard that is not whole yet, then the index.

        Raises ResourceError: the disk is full; ModelNotFoundError: the checkpoint is damaged.
        What has been written stays.
        """
        pending = {s.file for s in self._plan.shards if not is_whole(self._folder, s)}
        last_use: dict[str, str] = {}  # file of the checkpoint -> the last tensor that reads it
        for shard in self._plan.shards:
            if shard.file in pending:
                last_use |= {file: t.name for t in shard.tensors for file in t.files}
        for place, shard in enumerate(self._plan.shards, start=1):
            if shard.file in pending:
                self._write_shard(shard, place, last_use)
            else:
                skipped = sum(tensor.source_bytes for tensor in shard.tensors)
                skipped += self.progress.bytes_skipped
                self.progress = self.progress._replace(bytes_skipped=skipped)
        write_index(self._plan, self._folder)

    def _write_shard(self, shard: Shard, place: int, last_use: dict[str, str]) -> None:
        final = self._folder / shard.file
        unfinished = final.with_name(final.name + UNFINISHED)
        header = shard.header
        try:
            with unfinished.open("wb", buffering=0) as stream, Reader() as reader:
                descriptor = stream.fileno()
                _write_at(descriptor, memoryview(header), 0)
                os.ftruncate(descriptor, shard.bytes)  # from now on it reads as what it will be
                for tensor in shard.tensors:
                    files = self._fetched(tensor, place)
                    self._write_tensor(tensor, reader, files, descriptor, len(header), place)
                    if self._inspector is not None:
                        self._inspector.tensor(tensor, reader, unfinished, files)
                    for file in tensor.files:
                        if last_use[file] == tensor.name:
                            reader.close(files[file])
                            self._plan.source.release(file)
                            del self._files[file]
                os.fsync(descriptor)
            unfinished.replace(final)
        except OSError as error:
            raise disk_error(error, final) from error
        if self._inspector is not None:
            self._inspector.shard(shard)
        mx.clear_cache()

    def _fetched(self, tensor: TensorPlan, place: int) -> dict[str, Path]:
        """The checkpoint's files that a tensor is read from, on this machine."""
        for file in sorted(tensor.files - self._files.keys()):
            self._tell("fetch", place, 0)
            report = None if self._observe is None else self._fetched_more
            self._files[file] = self._plan.source.fetch(file, report)
            self.progress = self.progress._replace(bytes_fetched=0)
        return {file: self._files[file] for file in tensor.files}

    def _fetched_more(self, count: int) -> None:
        fetched = self.progress.bytes_fetched + count
        self.progress = self.progress._replace(bytes_fetched=fetched)
        self._tell("fetch", self.progress.shard, 0)

    def _write_tensor(
        self,
        tensor: TensorPlan,
        reader: Reader,
        files: dict[str, Path],
        descriptor: int,
        base: int,
        place: int,
    ) -> None:
        total = max(tensor.rows.total, 1)
        for block in blocks(tensor, reader, files):
            for output, buffer in zip(tensor.outputs, block.buffers, strict=True):
                row_bytes = output.info.nbytes // total
                _write_at(descriptor, buffer, base + output.offset + block.begin * row_bytes)
            done = tensor.source_bytes * block.end // total
            self._tell("write", place, done - tensor.source_bytes * block.begin // total)
            del block, buffer  # or they would live beside the next ones

    def _tell(self, step: str, place: int, more: int) -> None:
        done = self.progress.bytes_done + more
        self.progress = self.progress._replace(step=step, shard=place, bytes_done=done)
        if self._observe is not None:
            self._observe(self.progress)


def is_whole(folder: Path, shard: Shard) -> bool:
    """Whether a shard is there already, as planned."""
    header = shard.header
    try:
        with (folder / shard.file).open("rb") as stream:
            return stream.read(len(header)) == header and os.path.getsize(stream.fileno()) == (
                shard.bytes
            )
    except OSError:
        return False


def write_index(plan: PartPlan, folder: Path) -> None:
    """The index over a part's shards."""
    weight_map = {o.name: shard.file for shard in plan.shards for o in shard.outputs}
    total = sum(tensor.bytes for tensor in plan.tensors)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def disk_error(error: OSError, path: Path) -> Exception:
    """What to raise where a file could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceError(
            f"The disk is full; {path.name} is not written.",
            "Free some space and run the same command again: it goes on where it was.",
        )
    return ResourceError(
        f"{path.name} could not be written: {error.strerror}.",
        "Run the same command again: it goes on where it was.",
    )


def _write_at(descriptor: int, buffer: memoryview, offset: int) -> None:
    data = buffer.cast("B")
    while len(data):
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
