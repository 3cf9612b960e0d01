"""The journal of a batch: an append-only file of finished rows beside OUTPUT. Owns: its format,
its lock, the mending of what a crash left, and when it reaches the disk. Knows nothing of models,
of what a row means, or of the format of OUTPUT.

One JSON object per line::

    {"mlx_mtp_journal": 1}                 the first line
    {"begin": {"rows": 8}}                 a run starts, with that many rows in a batch
    {"row": "the key", "record": {...}}    a finished row; record["error"] is null or an object
    {"end": "done"}                        the run ended in an orderly way

A begin without an end is a process that died. A line is written with one call at the end of the
file, so that a crash leaves at most a torn last line, and other processes see it at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mlx_mtp.batch.paths import check_output, file_error, journal_path, sync_folder
from mlx_mtp.errors import MlxMtpError, UsageError, VerificationError

SYNC_SECONDS = 0.5
"""From the first line that is not on the disk to the fsync: half of the second promised."""

_HEADER = b'{"mlx_mtp_journal": 1}\n'
_HEAD_BYTES = 65_536
_CHUNK_BYTES = 1 << 20


class Place(NamedTuple):
    """Where a line stands in the journal, in bytes."""

    offset: int
    length: int


class Finished(NamedTuple):
    """One finished row of the journal; ``failed`` where its record holds an error."""

    key: str
    place: Place
    failed: bool


class Journal:
    """The journal of one OUTPUT, locked for this process from `open` to `close`.

    `append`, `begin` and `end` may be called from any thread. A line is on the disk within a
    second; where that fails, the next call that writes raises ResourceError.

    Attributes:
        path: the journal's file.
        was_killed: whether the last run found on opening began and never ended.
        last_rows: the ``rows`` of the last run found on opening, or None.
        damaged: how many broken lines were skipped; a torn end is cut off and not counted.
    """

    @classmethod
    def open(cls, output: Path) -> Journal:
        """Lock and mend the journal of `output`, or begin one.

        Raises:
            UsageError: `output` cannot be one, another process has it, or a file that is no
                journal stands in its place (which is left as it is).
            ResourceError: the disk is full or fails.
        """
        check_output(output)
        path = journal_path(output)
        try:
            descriptor = _locked(path, output)
            try:
                return cls(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise file_error(path, error) from error

    def __init__(self, path: Path, descriptor: int) -> None:
        """For `open` alone: takes over a locked descriptor."""
        self.path = path
        self.was_killed = False
        self.last_rows: int | None = None
        self.damaged = 0
        self._descriptor = descriptor
        self._first = self._end = 0  # where the first entry begins, where the last one ends
        self._has_rows = self._is_running = False
        self._failure: OSError | None = None
        self._writing, self._syncing = threading.Lock(), threading.Lock()
        self._dirty, self._closing = threading.Event(), threading.Event()
        self._check_header()
        self._mend()
        self._syncer = threading.Thread(target=self._keep_synced, name="journal", daemon=True)
        self._syncer.start()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self.close()
        except MlxMtpError:
            if error is None:  # else the first trouble is the one to report
                raise

    def begin(self, rows: int, details: Mapping[str, Any] | None = None) -> None:
        """Note that a run starts with `rows` rows in a batch."""
        self._raise_failure()
        self._write({"begin": {**(details or {}), "rows": rows}})
        self._is_running = True

    def append(self, key: str, record: Mapping[str, Any]) -> Place:
        """Add a finished row. When this returns, the row survives the death of this process."""
        self._raise_failure()
        self._has_rows = True
        return self._write({"row": key, "record": record})

    def end(self, how: Literal["done", "interrupted", "failed"]) -> None:
        """Note that the run ended, on the disk. Written even where an earlier fsync failed."""
        self._write({"end": how})
        self._is_running = False
        self.sync()

    def sync(self) -> None:
        """Bring all lines to the disk now."""
        # One fsync at a time: the system tells of a lost write only to the first that asks.
        with self._syncing:
            self._raise_failure()
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self._failure = error
                raise file_error(self.path, error) from error

    def close(self) -> None:
        """Sync and unlock, once; a journal that tells of no row and no killed run is removed."""
        if self._descriptor < 0:
            return
        self._closing.set()
        self._dirty.set()
        try:
            self._syncer.join()
            self.sync()
        finally:
            if not (self._has_rows or self._is_running or self.damaged):
                self._remove()
            os.close(self._descriptor)
            self._descriptor = -1

    def finished(self) -> Iterator[Finished]:
        """The rows of the journal in its order; a key that was done twice comes twice."""
        for offset, line in self._lines():
            entry = _parse(line)
            if entry is not None and "row" in entry:
                failed = entry["record"].get("error") is not None
                yield Finished(entry["row"], Place(offset, len(line)), failed)

    def read(self, place: Place) -> dict[str, Any]:
        """The record at a place that `append` or `finished` gave."""
        try:
            line = os.pread(self._descriptor, place.length, place.offset)
        except OSError as error:
            raise file_error(self.path, error, "read") from error
        entry = _parse(line)
        if entry is None or "row" not in entry:
            raise VerificationError(
                f"{self.path} was changed by another program.", "Run the same command again."
            )
        record: dict[str, Any] = entry["record"]
        return record

    def _remove(self) -> None:
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path)):
                self.path.unlink()

    def _check_header(self) -> None:
        """Refuse a file that is no journal; begin one where a crash left only its first bytes."""
        head = os.pread(self._descriptor, _HEAD_BYTES + 1, 0)
        if len(head) <= _HEAD_BYTES and _HEADER.startswith(head.rstrip(b"\0")):
            os.ftruncate(self._descriptor, 0)
            self._write_all(_HEADER)
            os.fsync(self._descriptor)
            sync_folder(self.path.parent)
            head = _HEADER
        first, newline, _ = head.partition(b"\n")
        version = (_json_object(first) or {}).get("mlx_mtp_journal") if newline else None
        if version is None:
            raise UsageError(
                f"{self.path} is in the way: it is not a journal of mlx-mtp.",
                "Move it away, or choose another output.",
            )
        if version != 1:
            raise UsageError(
                f"{self.path} was written by another version of mlx-mtp.",
                "Go on with that version, or choose another output.",
            )
        self._first = self._end = len(first) + 1

    def _mend(self) -> None:
        """Find out how the last run ended; cut off what follows the last whole line."""
        broken = 0
        for offset, line in self._lines():
            entry = _parse(line)
            if entry is None:
                broken += 1
                continue
            self.damaged, broken = self.damaged + broken, 0
            self._end = offset + len(line)
            if "begin" in entry:
                rows = entry["begin"].get("rows")
                self._is_running = True
                self.last_rows = rows if isinstance(rows, int) and rows > 0 else None
            elif "end" in entry:
                self._is_running = False
            else:
                self._has_rows = True
        self.was_killed = self._is_running
        os.ftruncate(self._descriptor, self._end)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Each line after the first with its offset, the last one perhaps without a newline."""
        offset, rest = self._first, b""
        while True:
            try:
                chunk = os.pread(self._descriptor, _CHUNK_BYTES, offset + len(rest))
            except OSError as error:
                raise file_error(self.path, error, "read") from error
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield offset, line + b"\n"
                offset += len(line) + 1
        if rest:
            yield offset, rest

    def _write(self, entry: dict[str, Any]) -> Place:
        # escapes keep lone surrogates, which UTF-8 cannot hold
        line = json.dumps(entry).encode("ascii") + b"\n"
        with self._writing:
            try:
                if os.fstat(self._descriptor).st_size > self._end:
                    os.ftruncate(self._descriptor, self._end)  # torn, and could not be cut then
                self._write_all(line)
            except BaseException as error:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._end)
                if isinstance(error, OSError):
                    raise file_error(self.path, error) from error
                raise
            place = Place(self._end, len(line))
            self._end += len(line)
            self._dirty.set()
        return place

    def _write_all(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def _keep_synced(self) -> None:
        while self._dirty.wait() and not self._closing.wait(SYNC_SECONDS):
            self._dirty.clear()  # before the fsync: a line written during it asks for another
            with suppress(MlxMtpError):  # kept, and raised by the next call that writes
                self.sync()

    def _raise_failure(self) -> None:
        # For good: after a failed fsync the next one succeeds although the lines are lost.
        if self._failure is not None:
            raise file_error(self.path, self._failure) from self._failure


def _locked(path: Path, output: Path) -> int:
    """A descriptor of the file, open for appending and locked until it is closed."""
    while True:
        # not through a link: in a folder shared with others it could lead anywhere
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                    return descriptor
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise UsageError(
                    f"Another process is writing {output}.",
                    "Wait for it, or choose another output.",
                ) from error
            raise
        os.close(descriptor)  # removed or replaced since: lock the one that is there now


def _parse(line: bytes) -> dict[str, Any] | None:
    """A whole line as one of the journal's entries, or None."""
    entry = _json_object(line) if line.endswith(b"\n") else None
    if entry is None:
        return None
    kinds = {name: type(value) for name, value in entry.items()}
    return entry if kinds in ({"row": str, "record": dict}, {"begin": dict}, {"end": str}) else None


def _json_object(text: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
