"""What can be an input, how its kind is told, and inputs that can be read only once."""

from __future__ import annotations

import io
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from inputs import Write, prompts, read, refusal

from mlx_mtp.batch import sources
from mlx_mtp.batch.rows import RowOptions
from mlx_mtp.batch.sources import open_source
from mlx_mtp.errors import ResourceError


@pytest.mark.parametrize(
    ("name", "kind", "options", "sentence"),
    [
        ("none.txt", "auto", {}, "There is no file or folder {path}. Check the path; - reads"),
        ("a.txt/b", "auto", {}, "{path} cannot be read: Not a directory. Check its permissions."),
        ("a.txt", "jsn", {}, "Unknown kind of input 'jsn'. Did you mean jsonl?"),
        ("a.txt", "folder", {}, "{path} is not a folder. Give a folder of .txt and .md files."),
        ("sub", "csv", {}, "{path} is a folder, not csv. Give a file."),
        ("a.txt", "lines", {"prompt_column": "b"}, "A prompt column is given, but the input is"),
        ("a.txt", "jsonl", {"prompt_column": "b"}, "A prompt column is given, but the input is"),
        ("sub", "auto", {"prompt_column": "b"}, "A prompt column is given, but the input is not"),
        ("a.txt", "lines", {"template": "{name}"}, "The template's {name} is not a field. Known"),
        ("a.txt", "jsonl", {"template": "{"}, "The template has a lone { at character 1."),
        ("sub", "auto", {"template": "{nam}"}, "The template's {nam} is not a field. Did you me"),
    ],
)
def test_what_cannot_be_opened(
    write: Write, tmp_path: Path, name: str, kind: str, options: dict[str, str], sentence: str
) -> None:
    write("a.txt", b"a")
    write("sub/b.txt", b"b")
    path = str(tmp_path / name)
    assert refusal(path, kind, **options).startswith(sentence.replace("{path}", path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_is_a_sentence(write: Write, tmp_path: Path) -> None:
    path = write("in/sub/a.txt", b"a")
    os.chmod(path, 0)
    folder = tmp_path / "in" / "sub"
    denied = "cannot be read: Permission denied. Check its permissions."
    assert refusal(path) == f"{path} {denied}"
    folder.chmod(0)
    try:
        assert refusal(str(tmp_path / "in")) == f"{folder.resolve()} {denied}"
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize(
    ("name", "data", "count"),
    [
        ("a", b'\xef\xbb\xbf \n {"prompt": "a"}', 1),
        ("a.txt", b'{"prompt": "a"}\n\n', 1),
        ("a.JSONL", b"", 0),
        ("a", b"", 0),
        ("a.csv", b"prompt\n", 0),
    ],
)
def test_the_kind_is_told_by_suffix_or_first_byte(
    write: Write, name: str, data: bytes, count: int
) -> None:
    rows = read(write(name, data))
    assert len(rows) == count
    if count == 1:
        assert prompts(rows) == ["a"]


def test_standard_input_can_be_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for data, found in [(b'{"prompt": "a"}\n', ["a"]), (b"x\ny\n", ["x", "y"])]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert prompts(read("-")) == found
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"text\nx\n")))
    with open_source("-", "csv", RowOptions()) as source:
        assert source.describe() == "standard input"
        assert prompts(list(source.rows())) == ["x"]
    assert refusal("-", "folder") == "Standard input is not a folder. Give the path of a folder."
    monkeypatch.setattr(sys, "stdin", None)
    assert refusal("-") == "Standard input is closed. Pipe the rows in or give a file."


def test_one_end_of_input_is_enough_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    control, terminal = os.openpty()
    os.write(control, b"a\nb\n\x04for the next program\n\x04\x04\x04")
    with open(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert prompts(read("-")) == ["a", "b"]
    os.close(control)


def test_a_pipe_can_be_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"a\nb\n",))
    writer.start()
    assert prompts(read(str(path))) == ["a", "b"]
    writer.join()


def test_a_deleted_file_can_still_be_read(write: Write) -> None:
    path = write("in.csv", b"prompt\na\nb\n")
    with open_source(path, "auto", RowOptions()) as source:
        rows = source.rows()
        next(rows)
        os.unlink(path)
        assert prompts(list(source.rows())) == ["a", "b"]
        assert source.describe() == "in.csv"


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no such device")
def test_a_device_is_no_input() -> None:
    assert refusal("/dev/zero") == "/dev/zero is a device. Give a file, a folder or a pipe."


def test_an_input_without_an_end_leaves_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_CHECKED_BYTES", 1000)
    monkeypatch.setattr(sources, "_LEFT_FREE", 2**80)
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with suppress(BrokenPipeError), path.open("wb", buffering=0) as pipe:
            while True:
                pipe.write(b"y\n" * 1000)

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(ResourceError, match="does not end, or is too long to be copied to"):
        open_source(str(path), "auto", RowOptions())
    writer.join()
