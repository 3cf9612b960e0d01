"""Where rows come from. Owns: how a path and a kind become a `Source`, and folders of text files.
Knows nothing of what is done with a row.

What is wrong with one row is a `BadRow`; what is wrong with the whole input raises UsageError.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

from mlx_mtp.batch.csv_source import CsvSource
from mlx_mtp.batch.rows import (
    BadRow,
    Row,
    RowOptions,
    bad_row,
    prompt_row,
)
from mlx_mtp.batch.template import parse_template
from mlx_mtp.batch.text_sources import (
    MAX_RECORD_BYTES,
    JsonlSource,
    LinesSource,
    Source,
    decoded,
    unreadable,
)
from mlx_mtp.errors import ResourceError, UsageError, nearest_hint
from mlx_mtp.plain import printable

__all__ = ["SOURCE_KINDS", "FolderSource", "Source", "open_source"]

SOURCE_KINDS = ("auto", "jsonl", "csv", "lines", "folder")
TEXT_SUFFIXES = (".txt", ".md")

_SUFFIX_KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
_SNIFFED_BYTES = 2**16
_COPIED_BYTES = 2**16
_CHECKED_BYTES = 2**24
_LEFT_FREE = 2**29
"""Bytes of the temporary folder that a copy of the input does not touch."""


def open_source(path: str, kind: str, options: RowOptions) -> Source:
    """The rows of a file, a folder or standard input (``-``); close it after use.

    Args:
        path: where; what cannot be read twice (standard input, a pipe) is first copied to an
            anonymous temporary file.
        kind: one of SOURCE_KINDS; auto goes by the suffix, else by the first byte.
        options: what the call says for all rows.

    Raises:
        UsageError: there is no such input, it cannot be read, or an option does not fit it.
        ResourceError: there is no room for the temporary file.
    """
    if kind not in SOURCE_KINDS:
        raise UsageError(f"Unknown kind of input {kind!r}.", nearest_hint(kind, SOURCE_KINDS))
    if path == "-":
        if kind == "folder":
            raise UsageError("Standard input is not a folder.", "Give the path of a folder.")
        return _file_source(_spooled(_standard_input()), "standard input", "", kind, options)
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            if kind not in ("auto", "folder"):
                raise UsageError(f"{path} is a folder, not {kind}.", "Give a file.")
            return FolderSource(Path(path), options)
        if kind == "folder":
            raise UsageError(f"{path} is not a folder.", "Give a folder of .txt and .md files.")
        stream: IO[bytes] = open(path, "rb")  # noqa: SIM115 - the source closes it
        if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode) and not stream.isatty():
            stream.close()
            raise UsageError(f"{path} is a device.", "Give a file, a folder or a pipe.")
    except OSError as error:
        raise unreadable(path, error) from error
    if not stream.seekable():
        with stream as pipe:
            stream = _spooled(pipe)
    target = Path(path)
    return _file_source(stream, target.name, target.suffix.lower(), kind, options)


class FolderSource(Source):
    """Every .txt and .md file below a folder is a prompt, in the order of their relative paths.

    Hidden files and folders are left out, as are links that lead out of the folder and linked
    folders. A template may have the fields ``text`` and ``name``.

    Raises:
        UsageError: on opening, where the folder or one below it cannot be read.
    """

    def __init__(self, folder: Path, options: RowOptions) -> None:
        super().__init__(folder.resolve().name or str(folder), options)
        _refuse_prompt_column(options)
        self._template = parse_template(options.template or "{text}")
        self._template.check(["text", "name"])
        self._folder = folder
        self._names = sorted(_text_files(folder))

    def rows(self) -> Iterator[Row | BadRow]:
        for index, name in enumerate(self._names):
            place = f"file {printable(name)}"
            try:
                _check_name(name)
                fields = {"text": self._read(name), "name": name}
                if not fields["text"].strip():
                    raise UsageError("The file is blank.", "Write a prompt or remove it.")
                prompt = self._template.fill(fields)
                yield prompt_row(index, place, name, prompt, self._options)
            except UsageError as error:
                yield bad_row(index, place, error, name)

    def _read(self, name: str) -> str:
        try:
            with open(self._folder / name, "rb") as stream:
                data = stream.read(MAX_RECORD_BYTES + 1)
        except OSError as error:
            raise UsageError(
                f"The file cannot be read: {error.strerror}.", "Check its permissions and name."
            ) from error
        too_long = len(data) > MAX_RECORD_BYTES
        return decoded(None if too_long else data, "file").removeprefix("\ufeff")


def _check_name(name: str) -> None:
    # the name of a file is bytes: those that are not UTF-8 are lone surrogates in the text
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError("The file's name is not UTF-8.", "Rename it.") from error


def _file_source(
    stream: IO[bytes], name: str, suffix: str, kind: str, options: RowOptions
) -> Source:
    try:
        first = _first_byte(stream, name)
        if kind == "auto":
            kind = _SUFFIX_KINDS.get(suffix, "jsonl" if first == b"{" else "lines")
        if kind == "csv":
            return CsvSource(name, options, stream, "\t" if suffix == ".tsv" else ",")
        _refuse_prompt_column(options)
        if kind == "lines":
            return LinesSource(name, options, stream)
        if suffix == ".json" and first == b"[":
            raise UsageError(
                f"{name} is one JSON array, not one object per line.",
                f"Convert it with: jq -c '.[]' {name} > {Path(name).stem}.jsonl",
            )
        if options.template is not None:
            parse_template(options.template)
        return JsonlSource(name, options, stream)
    except BaseException:
        stream.close()
        raise


def _first_byte(stream: IO[bytes], name: str) -> bytes:
    """The first byte that is not blank, or none."""
    try:
        stream.seek(0)
        start = stream.read(_SNIFFED_BYTES)
    except OSError as error:
        raise unreadable(name, error) from error
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _standard_input() -> IO[bytes]:
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("Standard input is closed.", "Pipe the rows in or give a file.")
    return sys.stdin.buffer


def _spooled(stream: IO[bytes]) -> IO[bytes]:
    try:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - the source closes it
        try:
            # by lines: read() asks a terminal for more after its Ctrl-D
            unchecked = 0
            while data := stream.readline(_COPIED_BYTES):
                copy.write(data)
                unchecked += len(data)
                if unchecked > _CHECKED_BYTES:
                    unchecked = 0
                    _check_space()
            copy.flush()
        except BaseException:
            copy.close()
            raise
    except OSError as error:
        raise ResourceError(
            f"The input cannot be copied to {tempfile.gettempdir()}: {error.strerror}.",
            "Make room there, or set TMPDIR to a disk that has it.",
        ) from error
    return copy


def _check_space() -> None:
    """Raises ResourceError while there is still room for others: an input may have no end."""
    folder = tempfile.gettempdir()
    if shutil.disk_usage(folder).free < _LEFT_FREE:
        raise ResourceError(
            f"The input does not end, or is too long to be copied to {folder}.",
            "Write it to a file first, or set TMPDIR to a disk that has room.",
        )


def _refuse_prompt_column(options: RowOptions) -> None:
    if options.prompt_column is not None:
        raise UsageError(
            "A prompt column is given, but the input is not CSV.",
            f"Give a template instead: {{{options.prompt_column}}}.",
        )


def _text_files(folder: Path) -> Iterator[str]:
    """Relative paths with ``/``; what is not a regular file could block when it is opened."""
    root = os.path.realpath(folder)

    def refuse(error: OSError) -> NoReturn:
        raise unreadable(str(error.filename), error) from error

    for parent, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = os.path.join(parent, name)
            if name.startswith(".") or Path(name).suffix.lower() not in TEXT_SUFFIXES:
                continue
            if os.path.islink(path):
                inside = os.path.realpath(path).startswith(os.path.join(root, ""))
                if not inside or not os.path.exists(path):
                    continue
            if os.path.isfile(path):
                yield os.path.relpath(path, root).replace(os.sep, "/")
