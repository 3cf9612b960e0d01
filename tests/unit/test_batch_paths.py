"""Which paths can be input and OUTPUT, and OUTPUT put in place as a whole or not at all."""

import csv
import errno
import json
import multiprocessing
import os
import signal
import stat

import pytest
from journals import OK, fill

from mlx_mtp.batch.journal import Journal
from mlx_mtp.batch.paths import check_paths, replace_output
from mlx_mtp.errors import ResourceError, UsageError


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def test_outputs_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent" / "x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, why in (
        (".", "is a folder"),
        ("absent/out.jsonl", "absent does not exist"),
        ("dangling", "absent does not exist"),
        ("file/out.jsonl", "Not a directory"),
        ("loop", "symbolic link"),
        ("pipe", "not a regular file"),
        ("x" * 250, "name too long"),
        ("/dev/stdout", "not a regular file"),
        ("/dev/fd/1", "not a regular file"),
        ("/dev/null", "not a regular file"),
    ):
        for attempt in (Journal.open, lambda path: replace_output(path, lambda out: None)):
            if attempt is not Journal.open and name.startswith("x"):
                continue
            with pytest.raises(UsageError, match=f"(?i){why}") as caught:
                attempt(tmp_path / name)
            assert caught.value.hint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dangling", "file", "loop", "pipe"]


def test_write_protected_places_are_refused(tmp_path, monkeypatch):
    # os.access says yes to root, so the system's answer is put in its mouth
    denied = tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(denied))
    with pytest.raises(UsageError, match="cannot be written to"):
        Journal.open(tmp_path / "out")
    denied = tmp_path / "out"
    denied.write_text("kept")
    with pytest.raises(UsageError, match="write-protected"):
        Journal.open(tmp_path / "out")
    assert not (tmp_path / "out.journal").exists()


def test_an_input_is_never_overwritten(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    (tmp_path / "link").symlink_to(rows)
    os.link(rows, tmp_path / "hard")
    for output in (rows, tmp_path / "link", tmp_path / "hard", tmp_path / "." / "rows.jsonl"):
        with pytest.raises(UsageError, match="both the input and the output"):
            check_paths(rows, output)
    (tmp_path / "out.journal").symlink_to(rows)
    with pytest.raises(UsageError, match="is the journal of"):
        check_paths(rows, tmp_path / "out")
    check_paths(rows, tmp_path / "other")
    check_paths(tmp_path / "absent", tmp_path / "other")


def test_an_output_is_not_a_file_that_is_read_as_input(tmp_path):
    folder, away = tmp_path / "in", tmp_path / "away.jsonl"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "alias").symlink_to(folder)
    away.write_text("")
    (folder / "linked.md").symlink_to(away)
    (folder / "dangling.txt").symlink_to(tmp_path / "absent.jsonl")
    for output in (
        folder / "new.txt",
        folder / "sub" / "new.MD",
        tmp_path / "alias" / "new.txt",
        folder / "dangling.txt",
        away,
    ):
        with pytest.raises(UsageError, match="would be read as input"):
            check_paths(folder, output)
    for output in (folder / "new.jsonl", tmp_path / "new.txt", tmp_path / "in.txt"):
        check_paths(folder, output)


def test_an_output_is_replaced_as_a_whole(output, tmp_path):
    replace_output(output, lambda out: out.write("first\r\n"))
    assert output.read_bytes() == b"first\r\n"
    umask = os.umask(0o027)
    os.umask(umask)
    assert stat.S_IMODE(output.stat().st_mode) == 0o666 & ~umask

    def write(out):
        out.write("second")
        out.flush()
        assert output.read_bytes() == b"first\r\n"
        (partial,) = (p.name for p in tmp_path.iterdir() if p != output)
        assert partial.startswith(".")
        assert partial.endswith(".partial")

    output.chmod(0o640)
    replace_output(output, write)
    assert output.read_bytes() == b"second"
    assert stat.S_IMODE(output.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [output]


def test_what_a_killed_run_left_of_an_output_goes(output, tmp_path):
    def write(out):
        out.write("half")
        out.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=replace_output, args=(output, write))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    replace_output(output, lambda out: out.write("whole"))
    assert list(tmp_path.iterdir()) == [output]
    assert output.read_text() == "whole"


def test_a_link_stays_and_what_it_leads_to_is_replaced(output, tmp_path):
    real = tmp_path / "far" / "real.jsonl"
    real.parent.mkdir()
    output.symlink_to(real)
    for text in ("new", "newer"):
        replace_output(output, lambda out, text=text: out.write(text))
        assert output.is_symlink()
        assert real.read_text() == text
    assert list(real.parent.iterdir()) == [real]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (KeyError("x"), KeyError),
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ResourceError),
        (OSError(errno.EROFS, "Read-only file system"), UsageError),
    ],
)
@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_an_error_leaves_the_output_as_it_was(output, tmp_path, monkeypatch, error, raised, where):
    def fail(*_):
        raise error

    output.write_text("old")
    if where != "write":
        monkeypatch.setattr(os, where, fail)
    with pytest.raises(raised):
        replace_output(output, lambda out: (out.write("half"), where == "write" and fail()))
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_lone_surrogates_reach_the_output(output):
    text = "a\ud800b é"

    def write(out):
        out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        csv.writer(out).writerow(["two\nlines", "ü"])

    replace_output(output, write)
    first, rest = output.read_bytes().split(b"\n", 1)
    assert json.loads(first)["text"] == text
    assert rest.decode() == '"two\nlines",ü\r\n'


def test_a_very_long_name_can_be_an_output(tmp_path):
    output = tmp_path / ("ü" * 120 + ".jsonl")
    fill(output, [("a", OK)])
    replace_output(output, lambda out: out.write("x"))
    assert output.read_text() == "x"
