"""Rows out of text, line by line. Owns: the reading of lines, JSON lines and plain lines, and what
may be wrong with their bytes. Knows nothing of paths.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any, NoReturn, Self

from mlx_mtp.batch.openai_rows import is_openai, openai_row
from mlx_mtp.batch.rows import (
    BadRow,
    Row,
    RowOptions,
    bad_row,
    prompt_row,
    simple_row,
)
from mlx_mtp.batch.template import parse_template
from mlx_mtp.errors import UsageError
from mlx_mtp.files import is_nested_deeper

MAX_RECORD_BYTES = 64 * 2**20
"""Longest line, CSV field or file that is read."""

MAX_NESTING = 100
"""Deepest nesting in a JSON row: one near Python's own limit could not be written out again."""

_BOM = b"\xef\xbb\xbf"
_AS_UTF8 = "Save it as UTF-8 text."


class Source:
    """The rows of one input; a context manager. Made by `mlx_mtp.batch.sources.open_source`.

    A file is opened once and stays open, so it can be read again even after it was deleted. Rows
    are streamed: at most one is in memory.
    """

    def __init__(self, name: str, options: RowOptions, stream: IO[bytes] | None = None) -> None:
        self._name, self._options, self._stream = name, options, stream

    def rows(self) -> Iterator[Row | BadRow]:
        """All rows, from the first one at each call; finish one iteration before the next.

        Raises UsageError where the input cannot be read any more.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """What the input is called in messages, e.g. ``reviews.csv``."""
        return self._name

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Number and bytes of each line, None for one that is too long to keep."""
        assert self._stream is not None
        number = 0
        try:
            self._stream.seek(0)
            while data := self._stream.readline(MAX_RECORD_BYTES + 1):
                number += 1
                if len(data) > MAX_RECORD_BYTES and not data.endswith(b"\n"):
                    while data and not data.endswith(b"\n"):
                        data = self._stream.readline(2**20)
                    yield number, None
                else:
                    yield number, data.removeprefix(_BOM) if number == 1 else data
        except OSError as error:
            raise unreadable(self._name, error) from error


class JsonlSource(Source):
    """One JSON object per line, ours or OpenAI's; with a template, of any fields."""

    def rows(self) -> Iterator[Row | BadRow]:
        index = 0
        for number, data in self._lines():
            if data is None or data.strip():
                yield self._row(index, f"line {number}", data)
                index += 1

    def _row(self, index: int, place: str, data: bytes | None) -> Row | BadRow:
        record: dict[str, Any] = {}
        try:
            record = parse_object(decoded(data, "line").rstrip("\r\n"))
            if self._options.template is None and is_openai(record):
                return openai_row(record, index, place, self._options)
            return simple_row(record, index, place, self._options)
        except UsageError as error:
            return bad_row(index, place, error, record.get("custom_id", record.get("id")))


class LinesSource(Source):
    """Every line that is not blank is a prompt; a template may have the field ``text``."""

    def __init__(self, name: str, options: RowOptions, stream: IO[bytes]) -> None:
        super().__init__(name, options, stream)
        self._template = parse_template(options.template or "{text}")
        self._template.check(["text"])

    def rows(self) -> Iterator[Row | BadRow]:
        index = 0
        for number, data in self._lines():
            place = f"line {number}"
            try:
                text = decoded(data, "line").rstrip("\r\n")
                if not text.strip():
                    continue
                prompt = self._template.fill({"text": text})
                yield prompt_row(index, place, None, prompt, self._options)
            except UsageError as error:
                yield bad_row(index, place, error)
            index += 1


def decoded(data: bytes | None, what: str) -> str:
    """The text of a line or a file. Raises UsageError: too long (None), NUL bytes, not UTF-8."""
    if data is None:
        raise too_long(what)
    if b"\0" in data:
        raise UsageError(f"The {what} has NUL bytes.", _AS_UTF8)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The {what} is not valid UTF-8 at byte {error.start + 1}.", _AS_UTF8
        ) from error


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object as RFC 8259 has it: no NaN, no key twice. Raises UsageError with the reason."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"The line is not valid JSON at column {error.colno}: {error.msg.lower()}.",
            "Write one object per line.",
        ) from error
    except ValueError as error:  # more digits than Python converts
        raise UsageError("The line has a number that is too long.", "Write it as text.") from error
    except RecursionError as error:
        raise _too_deep() from error
    if not isinstance(value, dict):
        raise UsageError("The line is not a JSON object.", 'Write {"prompt": "..."}.')
    if is_nested_deeper(value, MAX_NESTING):
        raise _too_deep()
    return value


def too_long(what: str) -> UsageError:
    """What to raise for more than MAX_RECORD_BYTES."""
    return UsageError(
        f"The {what} is longer than {MAX_RECORD_BYTES // 2**20} MiB.", "Cut it into several rows."
    )


def unreadable(name: str, error: OSError) -> UsageError:
    """What to raise where the operating system refuses to read."""
    if isinstance(error, FileNotFoundError):
        return UsageError(
            f"There is no file or folder {name}.", "Check the path; - reads standard input."
        )
    return UsageError(f"{name} cannot be read: {error.strerror}.", "Check its permissions.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise UsageError(f"The key {twice!r} occurs twice in one object.", "Keep one of them.")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise UsageError(f"The line has {name}, which is not JSON.", "Leave it out or write null.")


def _too_deep() -> UsageError:
    return UsageError(f"The line is nested deeper than {MAX_NESTING}.", "Flatten it.")
