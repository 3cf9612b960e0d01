"""Output lines: their shape, and that any text survives being written."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.batch.output import OUTPUT_FORMATS, RecordWriter, error_record, json_line, make_record
from mlx_mtp.errors import UsageError
from mlx_mtp.types import RequestStats, Result

STATS = RequestStats(
    prompt_tokens=4, tokens=3, rounds=2, drafted=5, accepted=1, accepted_by_position=(1, 0),
    first_token_seconds=0.123456789, prefill_seconds=0.1, decode_seconds=1 / 3,
)  # fmt: skip
NASTY = 'a,"b"\r\n\rä\u2028\x85\0\ud800 =1'


def result(text: str = "Yes.", thinking: str = "", error: str | None = None) -> Result:
    return Result(text, [1, 2, 3], "error" if error else "stop", 9, STATS, thinking, error)


def written(format: str, *records: dict[str, Any]) -> str:
    stream = io.StringIO(newline="")
    writer = RecordWriter(format, stream, "gemma")
    for index, record in enumerate(records):
        writer.write(index, record)
    return stream.getvalue()


def test_a_record_is_plain_json() -> None:
    record = make_record("r1", result(thinking="Hm."), 1700000000)
    assert json.loads(json.dumps(record)) == record
    assert record == {
        "id": "r1",
        "text": "Yes.",
        "thinking": "Hm.",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
        "stats": {
            "rounds": 2,
            "drafted": 5,
            "accepted": 1,
            "accepted_by_position": [1, 0],
            "first_token_seconds": 0.123457,
            "prefill_seconds": 0.1,
            "decode_seconds": 0.333333,
        },
        "seed": 9,
        "error": None,
        "created": 1700000000,
    }


def test_the_simple_format() -> None:
    bad = error_record("r2", "The prompt is blank. Write one.", 5)
    first, second = map(
        json.loads, written("simple", make_record("r1", result(), 5), bad).splitlines()
    )
    assert list(first) == [
        "index",
        "id",
        "text",
        "finish_reason",
        "usage",
        "seed",
        "stats",
        "error",
    ]
    assert (first["index"], first["text"], first["error"]) == (0, "Yes.", None)
    assert second == {
        "index": 1,
        "id": "r2",
        "text": "",
        "finish_reason": "error",
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        "seed": None,
        "stats": {},
        "error": {"message": "The prompt is blank. Write one."},
    }
    assert (
        json.loads(written("simple", make_record("r", result(thinking="Hm."), 5)))["thinking"]
        == "Hm."
    )


def test_the_csv_format() -> None:
    text = written("csv", make_record("r1", result("a,\n"), 5), error_record("r2", "No.", 5))
    assert text == (
        "index,id,text,finish_reason,prompt_tokens,completion_tokens,error\r\n"
        '0,r1,"a,\n",stop,4,3,\r\n'
        "1,r2,,error,0,0,No.\r\n"
    )


def test_the_openai_format_makes_ids_of_the_key_or_of_the_row() -> None:
    stream = io.StringIO()
    writer = RecordWriter("openai", stream, "gemma")
    writer.write(0, make_record("r1", result(), 5), "f" * 32)
    for row_id in ("r1", "r1", "r2"):
        writer.write(0, make_record(row_id, result(), 5))
    ids = [json.loads(line)["id"] for line in stream.getvalue().splitlines()]
    assert ids[0] == f"batch_req_{'f' * 24}"
    assert ids[1] == ids[2]
    assert len(set(ids)) == 3
    assert {len(line_id) for line_id in ids} == {len("batch_req_") + 24}


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Unknown output format 'cvs'\. Did you mean csv\?"):
        RecordWriter("cvs", io.StringIO(), "gemma")


def test_json_is_readable() -> None:
    assert json_line({"text": "größer 🙂"}) == '{"text": "größer 🙂"}\n'


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_is_one_line_of_utf8(text: str) -> None:
    line = json_line({"text": text})
    assert line.encode().decode().splitlines() == [line[:-1]]
    assert json.loads(line) == {"text": text}


@pytest.mark.parametrize("format", OUTPUT_FORMATS)
def test_nasty_text_reaches_the_file(format: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    record = make_record(NASTY, result(NASTY, error=NASTY), 5)
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = RecordWriter(format, stream, "gemma")
        writer.write(0, record)
        writer.write(1, record)
    with path.open(encoding="utf-8", newline="") as stream:
        if format == "csv":
            _, first, second = csv.reader(stream)
            assert first[1] == first[2] == first[6] == NASTY.replace("\ud800", "?")
            assert second[1:] == first[1:]
        else:
            first_line, second_line = map(json.loads, stream.read().splitlines())
            assert first_line.get("id" if format == "simple" else "custom_id") == NASTY
            assert second_line["error"]["message"] == NASTY
