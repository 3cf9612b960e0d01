"""What a batch writes. Owns: the record of a finished row and the three output formats. Knows
nothing of the input or of when a record is written.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import Any, TextIO

from mlx_mtp.batch.openai_rows import openai_record
from mlx_mtp.errors import UsageError, nearest_hint
from mlx_mtp.types import Result

OUTPUT_FORMATS = ("simple", "openai", "csv")
CSV_COLUMNS = (
    "index", "id", "text", "finish_reason", "prompt_tokens", "completion_tokens", "error",
)  # fmt: skip

_SHOWN = ("id", "text", "finish_reason", "usage", "seed", "stats", "error")
_LINE_ENDS = str.maketrans({char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"})
"""JSON leaves these as they are, and some readers (str.splitlines) end a line at them."""


def make_record(row_id: str, result: Result, created: int) -> dict[str, Any]:
    """The record of an answer: plain JSON values.

    Args:
        row_id: the row's id.
        result: its answer; one with an error keeps the text it came to.
        created: when it was finished, in seconds since 1970.
    """
    stats = asdict(result.stats)
    prompt_tokens, tokens = stats.pop("prompt_tokens"), stats.pop("tokens")
    return {
        "id": row_id,
        "text": result.text,
        "thinking": result.thinking,
        "finish_reason": result.finish_reason,
        "usage": _usage(prompt_tokens, tokens),
        "stats": {name: _plain(value) for name, value in stats.items()},
        "seed": result.seed,
        "error": None if result.error is None else {"message": result.error},
        "created": created,
    }


def error_record(row_id: str, error: str, created: int) -> dict[str, Any]:
    """The record of a row that was never begun: no seed, no tokens, no stats."""
    return {
        "id": row_id,
        "text": "",
        "thinking": "",
        "finish_reason": "error",
        "usage": _usage(0, 0),
        "stats": {},
        "seed": None,
        "error": {"message": error},
        "created": created,
    }


class RecordWriter:
    """Writes records to a text stream, each whole; flushing and closing are the caller's.

    Args:
        format: one of OUTPUT_FORMATS; csv writes its header at once.
        stream: UTF-8, opened with newline="".
        model: the model's name, for the openai format.

    Raises:
        UsageError: the format is unknown.
    """

    def __init__(self, format: str, stream: TextIO, model: str) -> None:
        if format not in OUTPUT_FORMATS:
            raise UsageError(
                f"Unknown output format {format!r}.", nearest_hint(format, OUTPUT_FORMATS)
            )
        self._format, self._stream, self._model = format, stream, model
        # The default line end, CRLF (RFC 4180), makes Python 3.11 quote a lone CR in a cell.
        self._csv = csv.writer(stream)
        if format == "csv":
            self._csv.writerow(CSV_COLUMNS)

    def write(self, index: int, record: Mapping[str, Any], key: str = "") -> None:
        """Write one record.

        Args:
            index: the row's number in the input.
            record: from `make_record` or `error_record`.
            key: the row's key, of which the openai format makes its ids; where there is none they
                are made of the model's name and the row's id.
        """
        if self._format == "csv":
            self._csv.writerow([_cell(value) for value in _csv_values(index, record)])
        elif self._format == "openai":
            number = key or _number(self._model, record["id"])
            self._stream.write(json_line(openai_record(record, number, self._model)))
        else:
            self._stream.write(json_line(_simple(index, record)))


def json_line(values: Mapping[str, Any]) -> str:
    """One line of readable JSON that any UTF-8 stream takes and any reader sees as one line."""
    text = json.dumps(values, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair survives as its escape only
        text = json.dumps(values)
    return text.translate(_LINE_ENDS) + "\n"


def _simple(index: int, record: Mapping[str, Any]) -> dict[str, Any]:
    line = {"index": index, **{name: record[name] for name in _SHOWN}}
    return line | ({"thinking": record["thinking"]} if record["thinking"] else {})


def _csv_values(index: int, record: Mapping[str, Any]) -> list[Any]:
    usage, error = record["usage"], record["error"]
    return [
        index,
        record["id"],
        record["text"],
        record["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        "" if error is None else error["message"],
    ]


def _cell(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _number(model: str, row_id: str) -> str:
    return sha256(json.dumps([model, row_id]).encode()).hexdigest()


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return list(value) if isinstance(value, tuple) else value
