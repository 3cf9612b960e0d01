"""Rows out of CSV. Owns: its header, which column or template is the prompt, and records that are
malformed. Knows nothing of paths.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from mlx_mtp.batch.rows import (
    BadRow,
    Row,
    RowOptions,
    bad_row,
    prompt_row,
)
from mlx_mtp.batch.template import Template, parse_template
from mlx_mtp.batch.text_sources import MAX_RECORD_BYTES, Source, decoded, too_long
from mlx_mtp.errors import UsageError, nearest_hint

PROMPT_COLUMNS = ("prompt", "text")
"""What is the prompt where nothing says so: the first of these that there is."""


class CsvSource(Source):
    """A header row, then a prompt per record; a column ``id`` names the rows.

    Raises:
        UsageError: on opening, where the header is missing or malformed or has no such column.
    """

    def __init__(self, name: str, options: RowOptions, stream: IO[bytes], delimiter: str) -> None:
        super().__init__(name, options, stream)
        self._delimiter = delimiter
        csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))
        self._columns = self._read_columns()
        self._template = _prompt_template(name, self._columns, options)

    def rows(self) -> Iterator[Row | BadRow]:
        lines = _CsvLines(self._lines())
        reader = self._reader(lines)
        _header(reader)
        index = 0
        while True:
            place = f"line {lines.number + 1}"
            lines.has_overlong = False
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                row: Row | BadRow = bad_row(index, place, _malformed(error))
            else:
                if lines.has_overlong:
                    row = bad_row(index, place, too_long("line"))
                elif values:
                    row = self._row(index, place, values)
                else:
                    continue
            yield row
            index += 1

    def _row(self, index: int, place: str, values: list[str]) -> Row | BadRow:
        fields: dict[str, str] = {}
        try:
            _check_cells(values)
            if len(values) != len(self._columns):
                raise UsageError(
                    f"The record has {len(values)} values for {len(self._columns)} columns.",
                    "Put values with separators, quotes or line breaks in quotes.",
                )
            fields = dict(zip(self._columns, values, strict=True))
            prompt = self._template.fill(fields)
            return prompt_row(index, place, fields.get("id"), prompt, self._options)
        except UsageError as error:
            return bad_row(index, place, error, fields.get("id"))

    def _read_columns(self) -> list[str]:
        try:
            columns = _header(self._reader(_CsvLines(self._lines())))
            _check_cells(columns)
        except csv.Error as error:
            problem = _malformed(error)
            raise UsageError(f"{self._name}, header: {problem.message}", problem.hint) from error
        except UsageError as error:
            raise UsageError(f"{self._name}, header: {error.message}", error.hint) from error
        if not any(columns):
            raise UsageError(f"{self._name} has no header row.", "Name its columns in line 1.")
        for name, count in Counter(columns).items():
            if name and count > 1:
                raise UsageError(f"{self._name} has two columns {name!r}.", "Rename one of them.")
        return columns

    def _reader(self, lines: _CsvLines) -> Any:
        # strict: a quote that is never closed must not take in the rest of the file unseen
        return csv.reader(lines, delimiter=self._delimiter, strict=True)


class _CsvLines:
    """Lines as text for the csv module, with the number of the last one.

    Attributes:
        number: lines given out so far.
        has_overlong: one of them was too long and was given out as an empty one.
    """

    def __init__(self, lines: Iterator[tuple[int, bytes | None]]) -> None:
        self._inner = lines
        self.number = 0
        self.has_overlong = False

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        self.number, data = next(self._inner)
        if data is None:
            self.has_overlong = True
            return "\n"
        return data.decode("utf-8", "surrogateescape")


def _header(reader: Any) -> list[str]:
    """The first record that is not blank; none where the file is empty."""
    return [name.strip() for name in next((record for record in reader if record), [])]


def _prompt_template(name: str, columns: list[str], options: RowOptions) -> Template:
    if options.template is not None:
        if options.prompt_column is not None:
            raise UsageError(
                "Both a prompt column and a template are given.",
                "Give the template alone; it may name the column.",
            )
        template = parse_template(options.template)
        template.check(columns)
        return template
    wanted = options.prompt_column
    if wanted is None:
        wanted = next((column for column in PROMPT_COLUMNS if column in columns), None)
    if wanted is None:
        hint = nearest_hint("", columns).removesuffix(".")
        raise UsageError(
            f"{name} has no column prompt or text.",
            f"Say which column is the prompt, or give a template. {hint}.",
        )
    if wanted not in columns:
        raise UsageError(f"{name} has no column {wanted!r}.", nearest_hint(wanted, columns))
    return Template(("", wanted, ""))


def _check_cells(values: list[str]) -> None:
    # back to the file's own bytes: what was not UTF-8 is a lone surrogate in the text
    decoded("".join(values).encode("utf-8", "surrogateescape"), "record")


def _malformed(error: csv.Error) -> UsageError:
    what = str(error).partition(" - ")[0]
    return UsageError(f"The record is not valid CSV: {what}.", "Check its quotes and line ends.")
