"""Inputs are read row by row, and whatever is wrong with them has a place and a sentence."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest
from inputs import Write, prompts, read, refusal

from mlx_mtp.batch import csv_source, sources, text_sources
from mlx_mtp.batch.rows import BadRow, Row, RowOptions
from mlx_mtp.batch.sources import open_source
from mlx_mtp.types import SamplingParams

# JSON lines


def test_jsonl_with_bom_crlf_blank_lines_and_no_last_newline(write: Write) -> None:
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b", "id": "x", "top_k": 2}'
    first, second = read(write("in.jsonl", data))
    user = {"role": "user", "content": "b"}
    assert (first.index, first.place, first.id) == (0, "line 1", "0")
    assert second == Row(1, "line 4", "x", [user], SamplingParams(top_k=2))


def test_jsonl_takes_openai_rows_beside_simple_ones(write: Write) -> None:
    body = {"messages": [{"role": "user", "content": "o"}]}
    lines = [{"custom_id": "c", "body": body}, {"prompt": "s"}, {"custom_id": "d", "body": 5}]
    rows = read(write("in.ndjson", "\n".join(map(json.dumps, lines)).encode()))
    assert prompts(rows[:2]) == ["o", "s"]
    assert [getattr(row, "is_openai", None) for row in rows] == [True, False, None]
    assert rows[2].id == "d"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"prompt": "a"', "The line is not valid JSON at column 15: expecting ',' delimiter."),
        (b'{"prompt": "a"} x', "The line is not valid JSON at column 17: extra data."),
        (b'{"prompt": "a\tb"}', "The line is not valid JSON at column 14: invalid control"),
        (b"[1]", 'The line is not a JSON object. Write {"prompt": "..."}.'),
        (b'"text"', "The line is not a JSON object."),
        (b'{"prompt": "\xff"}', "The line is not valid UTF-8 at byte 13. Save it as UTF-8 text."),
        (b'{"prompt": "\xc3', "The line is not valid UTF-8 at byte 13."),
        (b'{"prompt": "\xed\xa0\x80"}', "The line is not valid UTF-8 at byte 13."),
        (b'{"prompt": "\\ud800"}', "The prompt has half of a surrogate pair at character 1."),
        (b'{"prompt": "a\0"}', "The line has NUL bytes. Save it as UTF-8 text."),
        (b"\0\0\0", "The line has NUL bytes."),
        (b'{"prompt": "a", "top_p": NaN}', "The line has NaN, which is not JSON."),
        (b'{"prompt": "a", "top_p": -Infinity}', "The line has -Infinity, which is not JSON."),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature is inf. Give a number from 0"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "The line has a number that is too"),
        (b'{"prompt": "a", "prompt": "b"}', "The key 'prompt' occurs twice in one object."),
        (b'{"messages": [{"role": "user", "role": 1}]}', "The key 'role' occurs twice in one"),
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "The line is nested deeper than 100."),
        (b"[" * 100_000, "The line is nested deeper than 100. Flatten it."),
        (b'{"a":' * 100_000, "The line is nested deeper than 100. Flatten it."),
        (b'{"promt": "a"}', "Unknown key 'promt'. Did you mean prompt?"),
        (b'{"' + b"x" * 2**20 + b'": "a"}', "Unknown key 'xxx"),
    ],
)
def test_a_bad_line_is_a_bad_row_and_the_others_are_read(
    write: Write, line: bytes, sentence: str
) -> None:
    good = b'{"prompt": "good"}\n'
    rows = read(write("in.jsonl", good + line + b"\n" + good), "jsonl")
    assert prompts(rows)[::2] == ["good", "good"]
    assert isinstance(rows[1], BadRow)
    assert rows[1].place == "line 2"
    assert rows[1].error.startswith(sentence)
    assert len(rows[1].error) < 700


def test_a_bad_row_has_its_id_where_it_could_be_read(write: Write) -> None:
    lines = b'{"id": "x"}\n{"id": 5, "prompt": 1}\n{"id": [], "prompt": "a"}\n{"custom_id": "c"}\n'
    assert [row.id for row in read(write("in.jsonl", lines))] == ["x", "5", None, "c"]


def test_a_prompt_of_two_megabytes_is_a_prompt(write: Write) -> None:
    prompt = "ä" * 2**20
    (row,) = read(write("in.jsonl", json.dumps({"prompt": prompt}).encode()))
    assert prompts([row]) == [prompt]


def test_a_line_that_is_too_long_is_skipped_in_pieces(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sources, "MAX_RECORD_BYTES", 2**16)
    line = b'{"prompt": "' + b"x" * (2**16 - 14) + b'"}\n'  # just fits
    assert len(line) == 2**16 + 1
    long = b'{"prompt": "' + b"x" * 2**24 + b'"}'
    path = write("in.jsonl", line + long + b"\n" + b'{"prompt": "b"}\n' + long)
    tracemalloc.start()
    rows = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [type(row) for row in rows] == [Row, BadRow, Row, BadRow]
    assert [row.place for row in rows] == ["line 1", "line 2", "line 3", "line 4"]
    assert prompts(rows)[3].endswith("Cut it into several rows.")
    assert peak < 2**23


def test_rows_are_streamed(write: Write) -> None:
    path = write("in.jsonl", b'{"prompt": "' + b"x" * 1000 + b'"}\n' * 1)
    Path(path).write_bytes(Path(path).read_bytes() * 5000)
    tracemalloc.start()
    with open_source(path, "auto", RowOptions()) as source:
        assert sum(1 for _ in source.rows()) == 5000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_json_array_is_refused_with_the_command_that_converts_it(write: Write) -> None:
    path = write("in.json", b'\xef\xbb\xbf\n [{"prompt": "a"}]')
    assert refusal(path) == (
        "in.json is one JSON array, not one object per line. "
        "Convert it with: jq -c '.[]' in.json > in.jsonl"
    )
    assert prompts(read(write("b.json", b'{"prompt": "a"}'))) == ["a"]


def test_a_template_makes_prompts_of_any_fields(write: Write) -> None:
    lines = b'{"title": "A", "body": "text"}\n{"titel": "B"}\n{"title": null, "id": "x"}\n'
    rows = read(write("in.jsonl", lines), template="Sum up {title}.")
    assert prompts(rows) == [
        "Sum up A.",
        "The template's {title} is not a field. Did you mean titel?",
        "The field 'title' is neither text nor a number. Leave it out of the template.",
    ]
    assert rows[2].id == "x"


# Lines


def test_every_line_that_is_not_blank_is_a_prompt(write: Write) -> None:
    data = "\ufeff one \r\n\n\t\n\u3000\ntwo\u2028{x}\n".encode() + b"\xff\nnu\0l\nlast"
    rows = read(write("in.txt", data))
    assert prompts(rows) == [
        " one ",
        "two\u2028{x}",
        "The line is not valid UTF-8 at byte 1. Save it as UTF-8 text.",
        "The line has NUL bytes. Save it as UTF-8 text.",
        "last",
    ]
    assert [row.place for row in rows] == [f"line {n}" for n in (1, 5, 6, 7, 8)]
    assert prompts(read(write("b", b"a"), template="Sum up: {text}")) == ["Sum up: a"]


# CSV


def test_csv_records_over_several_lines(write: Write) -> None:
    data = b'\xef\xbb\xbfid,prompt\r\na,"one\r\ntwo, ""three"""\r\n\r\nb,four\r\n'
    rows = read(write("in.csv", data))
    assert prompts(rows) == ['one\r\ntwo, "three"', "four"]
    assert [(row.id, row.place) for row in rows] == [("a", "line 2"), ("b", "line 5")]


def test_csv_bad_records(write: Write) -> None:
    data = (
        b"id,prompt\n1\n2,a,b\n3,\xff\n4,a\0b\n,noid\n6,\n"
        b'7,"a"b\n8,a\rb\n9,good\n10,"never closed\n11,x\n'
    )
    rows = read(write("in.csv", data))
    assert [(row.place, row.id) for row in rows] == [
        ("line 2", None), ("line 3", None), ("line 4", None), ("line 5", None), ("line 6", None),
        ("line 7", "6"), ("line 8", None), ("line 9", None), ("line 10", "9"), ("line 11", None),
    ]  # fmt: skip
    many = "Put values with separators, quotes or line breaks in quotes."
    quotes = "Check its quotes and line ends."
    assert prompts(rows) == [
        f"The record has 1 values for 2 columns. {many}",
        f"The record has 3 values for 2 columns. {many}",
        "The record is not valid UTF-8 at byte 2. Save it as UTF-8 text.",
        "The record has NUL bytes. Save it as UTF-8 text.",
        "The id is empty. Give one or leave it out.",
        "The prompt is blank. Write one or leave the row out.",
        f"The record is not valid CSV: ',' expected after '\"'. {quotes}",
        f"The record is not valid CSV: new-line character seen in unquoted field. {quotes}",
        "good",
        f"The record is not valid CSV: unexpected end of data. {quotes}",
    ]


def test_csv_which_column_is_the_prompt(write: Write) -> None:
    path = write("in.csv", b"text, product name ,stars\ngood,tea,5\n")
    assert prompts(read(path)) == ["good"]
    assert prompts(read(path, prompt_column="product name")) == ["tea"]
    assert prompts(read(path, template="{product name}: {stars}")) == ["tea: 5"]
    tabs = write("in.tsv", b"prompt\tother\na,b\tc\n")
    assert prompts(read(tabs)) == ["a,b"]
    both = write("both.csv", b"text,prompt\nt,p\n")
    assert prompts(read(both)) == ["p"]
    assert prompts(read(write("in.data", b"prompt\na\n"), "csv")) == ["a"]


@pytest.mark.parametrize(
    ("header", "options", "sentence"),
    [
        (b"a,b", {}, "in.csv has no column prompt or text. Say which column is the prompt, or"),
        (b"review,b", {"prompt_column": "reviw"}, "in.csv has no column 'reviw'. Did you mean re"),
        (b"a,b", {"prompt_column": "zzz"}, "in.csv has no column 'zzz'. Known: a, b."),
        (b"ab,b", {"template": "{abc}"}, "The template's {abc} is not a field. Did you mean ab?"),
        (b"a,b", {"template": "{a"}, "The template has a lone { at character 1."),
        (b"a", {"template": "{a}", "prompt_column": "a"}, "Both a prompt column and a template"),
        (b"", {}, "in.csv has no header row. Name its columns in line 1."),
        (b"\n ,\n", {}, "in.csv has no header row. Name its columns in line 1."),
        (b"text,a,a", {}, "in.csv has two columns 'a'. Rename one of them."),
        (b"t\xffxt", {}, "in.csv, header: The record is not valid UTF-8 at byte 2."),
        (b"\xff\xfet\0e\0", {}, "in.csv, header: The record has NUL bytes. Save it as UTF-8"),
        (b'"text', {}, "in.csv, header: The record is not valid CSV: unexpected end of data."),
    ],
)
def test_csv_headers_that_do_not_serve(
    write: Write, header: bytes, options: dict[str, str], sentence: str
) -> None:
    assert refusal(write("in.csv", header), **options).startswith(sentence)


def test_csv_fields_and_lines_that_are_too_long(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = write("in.csv", b"prompt\n" + b"x" * 300_000 + b"\n")
    assert len(prompts(read(long))[0]) == 300_000  # the csv module's own limit is 128 KB
    monkeypatch.setattr(text_sources, "MAX_RECORD_BYTES", 5000)
    data = b'id,prompt\n1,"a\n' + b"y" * 6000 + b'\nb"\n' + b"z" * 6000 + b"\n2,good\n"
    rows = read(write("b.csv", data))
    assert [(type(row), row.place) for row in rows] == [
        (BadRow, "line 2"), (BadRow, "line 5"), (Row, "line 6"),
    ]  # fmt: skip


def test_a_quote_left_open_does_not_fill_the_memory(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = csv_source.csv.field_size_limit(1000)
    monkeypatch.setattr(csv_source, "MAX_RECORD_BYTES", 1000)
    try:
        rows = read(write("in.csv", b'prompt\n"open\n' + b"a line of text\n" * 100))
    finally:
        csv_source.csv.field_size_limit(before)
    assert prompts(rows)[0].startswith("The record is not valid CSV: field larger than field limit")
    assert prompts(rows)[1] == "a line of text"


# Folders


def test_a_folder_of_texts(write: Write, tmp_path: Path) -> None:
    secret = write("outside/secret.txt", b"secret")
    for name, data in {
        "b.txt": b"\xef\xbb\xbfB", "a.MD": b"A\r\n", "sub/c.txt": b"C {x}", "sub/blank.md": b" \n",
        "bad.txt": b"\xff", "nul.txt": b"\0", ".hidden.txt": b"x", ".git/d.txt": b"x",
        "other.py": b"x",
    }.items():  # fmt: skip
        write(f"in/{name}", data)
    folder = tmp_path / "in"
    (folder / "out.txt").symlink_to(secret)
    (folder / "outside").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to(folder)
    (folder / "gone.txt").symlink_to(folder / "nothing.txt")
    (folder / "in.txt").symlink_to(folder / "b.txt")
    (folder / "folder.txt").mkdir()
    os.mkfifo(folder / "pipe.txt")
    rows = read(str(folder))
    assert [row.place for row in rows] == [
        "file a.MD", "file b.txt", "file bad.txt", "file in.txt", "file nul.txt",
        "file sub/blank.md", "file sub/c.txt",
    ]  # fmt: skip
    assert [row.id for row in rows] == [row.place.removeprefix("file ") for row in rows]
    assert prompts(rows) == [
        "A\r\n",
        "B",
        "The file is not valid UTF-8 at byte 1. Save it as UTF-8 text.",
        "B",
        "The file has NUL bytes. Save it as UTF-8 text.",
        "The file is blank. Write a prompt or remove it.",
        "C {x}",
    ]
    assert prompts(read(str(folder), template="{name}: {text}"))[1] == "b.txt: B"


def test_a_file_that_vanishes_from_a_folder_is_a_bad_row(write: Write, tmp_path: Path) -> None:
    path = write("in/a.txt", b"a")
    write("in/b.txt", b"b")
    with open_source(str(tmp_path / "in"), "auto", RowOptions()) as source:
        os.unlink(path)
        first, second = source.rows()
    assert prompts([first, second]) == [
        "The file cannot be read: No such file or directory. Check its permissions and name.",
        "b",
    ]
    assert first.id == "a.txt"


def test_a_file_that_is_too_long_is_a_bad_row(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_RECORD_BYTES", 100)
    write("in/a.txt", b"x" * 101)
    write("in/b.txt", b"x" * 100)
    long, fits = read(str(tmp_path / "in"))
    assert isinstance(fits, Row)
    assert prompts([long])[0].endswith("Cut it into several rows.")


@pytest.mark.skipif(sys.platform == "darwin", reason="APFS takes no such names")
def test_a_file_name_that_is_not_utf8_is_a_bad_row(write: Write, tmp_path: Path) -> None:
    write("in/b\udcff.txt", b"text")
    (row,) = read(str(tmp_path / "in"))
    assert isinstance(row, BadRow)
    assert (row.place, row.id) == ("file b\\udcff.txt", None)
    assert row.error == "The file's name is not UTF-8. Rename it."
