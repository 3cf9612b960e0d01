"""What `mlx-mtp batch` says of input, options and places that it cannot do with."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from batches import B_A_N_A_N_A, read_jsonl

if TYPE_CHECKING:
    from conftest import BatchCommand

GREEDY = ("--temperature", "0")
GOOD = '{"prompt": "Spell banana."}'
BROKEN = [
    ("{nope", "The line is not valid JSON at column 2: "),
    ('{"id": "x"}', "The row has neither prompt nor messages. Give one of them."),
    ('{"prompt": 7}', "The prompt is not text. "),
    ('{"promt": "x"}', "Unknown key 'promt'. Did you mean prompt?"),
    ('{"prompt": "x", "max_tokens": "9"}', "max_tokens is '9'. Give a whole number at least 1."),
    ('{"prompt": "x", "id": "3"}', "The id '3' is also that of line 5. Give each row its own."),
    ('{"prompt": "a\0b"}', "The line has NUL bytes. Save it as UTF-8 text."),
    ('{"prompt": "\udcff"}', "The line is not valid UTF-8 at byte 13. Save it as UTF-8 text."),
    ("[1, 2]", "The line is not a JSON object. "),
    ('{"messages": [{"role": "boss", "content": "x"}]}', "Message 1 has the unknown role 'boss'."),
    ('{"prompt": "\\ud800"}', "The prompt has half of a surrogate pair at character 1. "),
    ('{"prompt": "x", "prompt": "y"}', "The key 'prompt' occurs twice in one object. "),
]
"""Lines of a file and what is said of them; line 5 is a good row with the id 3."""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "out.jsonl"


@pytest.fixture(autouse=True)
def _folder(output: Path) -> None:
    output.parent.mkdir()


def test_broken_rows_are_named_by_line_and_can_be_skipped(
    tmp_path: Path, output: Path, batch: BatchCommand
) -> None:
    lines = [line for line, _ in BROKEN]
    lines.insert(4, '{"prompt": "Spell apple.", "id": 3}')
    source = tmp_path / "in.jsonl"
    text = "\r\n".join(["\ufeff" + GOOD, "", *lines])
    source.write_bytes(text.encode("utf-8", "surrogateescape"))
    numbers = [n for n in range(3, 16) if n != 7]
    said = [f"line {n}: {error}" for n, (_, error) in zip(numbers, BROKEN, strict=True)]
    said = [line.replace("of line 5", "of line 7") for line in said]

    done = batch(source, "-o", output)
    assert (done.code, done.out) == (2, "")
    *warnings, more, error, hint = done.err.splitlines()
    assert len(warnings) == 10
    for warning, expected in zip(warnings, said, strict=False):
        assert warning.startswith(f"warning: {expected}")
    assert more == "warning: and 2 more broken rows."
    assert error == "error: 12 rows of 14 cannot be served."
    assert hint == "  Mend the input, or record them as failed with --skip-invalid."
    assert os.listdir(output.parent) == []

    done = batch(source, "-o", output, "--skip-invalid", "--ordered", *GREEDY)
    assert done.code == 6
    assert "  14 of 14 rows · 12 failed · " in done.err
    rows = read_jsonl(output)
    assert [row["index"] for row in rows] == list(range(14))
    good = {row["index"]: row["text"] for row in rows if row["error"] is None}
    assert good == {0: B_A_N_A_N_A, 5: "a-p-p-l-e"}
    for row, expected in zip([row for row in rows if row["error"]], said, strict=True):
        assert expected.split(": ", 1)[1] in row["error"]["message"]
        assert (row["finish_reason"], row["text"], row["seed"]) == ("error", "", None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "error: a.jsonl has no rows."),
        ("a.jsonl", b"\r\n \n\n", "error: a.jsonl has no rows."),
        ("a.csv", b"", "error: a.csv has no header row."),
        ("a.csv", b"prompt\n", "error: a.csv has no rows."),
        ("a.csv", b"id;prompt\n1;x\n", "error: a.csv has no column prompt or text."),
        ("a.csv", b"prompt,prompt\nx,y\n", "error: a.csv has two columns 'prompt'."),
        ("a.csv", b'prompt,id\n"x,1\ny,2\n', "warning: line 2: The record is not valid CSV: "),
        ("a.csv", b"prompt,id\nx,1\nx,y,z\n", "warning: line 3: The record has 3 values for 2 "),
        ("a.csv", b"prompt\n\xff\n", "warning: line 2: The record is not valid UTF-8 at byte 1."),
        ("a.txt", b"x\n\0\n", "warning: line 2: The line has NUL bytes."),
        ("a.txt", "prompt".encode("utf-16"), "warning: line 1: The line has NUL bytes."),
        ("a.json", b'[\n{"prompt": "x"}]', "error: a.json is one JSON array, not one object per "),
        ("n/a.txt", b" \n", "warning: file a.txt: The file is blank."),
        ("n/\x1b[1m.md", b"\xff", "warning: file \\x1b[1m.md: The file is not valid UTF-8 at "),
        ("n/.hidden.txt", b"x", "error: n has no rows."),
    ],
)
def test_broken_inputs(
    tmp_path: Path, output: Path, batch: BatchCommand, name: str, content: bytes, message: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    done = batch(tmp_path / name.split("/")[0], "-o", output)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(message)
    assert "\nerror: " in f"\n{done.err}"
    assert os.listdir(output.parent) == []


def test_a_line_of_two_megabytes_fails_alone(
    tmp_path: Path, output: Path, batch: BatchCommand
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "' + "word " * 400_000 + '"}\n' + GOOD)
    done = batch(source, "-o", output, *GREEDY)
    assert done.code == 6
    assert done.err.startswith("warning: line 1: The prompt has 400013 tokens and the model's ")
    found = {row["index"]: (row["text"], row["finish_reason"]) for row in read_jsonl(output)}
    assert found == {0: ("", "error"), 1: (B_A_N_A_N_A, "stop")}


def test_what_is_not_there(tmp_path: Path, output: Path, batch: BatchCommand) -> None:
    done = batch(tmp_path / "none", "-o", output)
    assert (done.code, done.err.splitlines()[0]) == (
        2,
        f"error: There is no file or folder {tmp_path / 'none'}.",
    )
    (tmp_path / "in.jsonl").write_text(GOOD)
    done = batch(tmp_path / "in.jsonl", "-o", output, model=str(tmp_path / "none"))
    assert done.code == 3
    assert os.listdir(output.parent) == []


def test_a_model_larger_than_the_limit_is_told_before_any_row_fails(
    tmp_path: Path, output: Path, batch: BatchCommand
) -> None:
    (tmp_path / "in.jsonl").write_text(GOOD)
    done = batch(tmp_path / "in.jsonl", "-o", output, "--memory-limit", "0.001")
    assert done.code == 5
    assert re.search(
        r"^error: The model takes [\d.]+ GB, but 0.001 GB is the limit.\n  Raise ", done.err, re.M
    )
    assert os.listdir(output.parent) == []
