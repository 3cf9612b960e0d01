"""Whatever happens to a batch, its finished rows stay: the journal."""

import os
import signal
import stat
import subprocess
import threading
import time

import pytest
from journals import BAD, HEADER, OK, fill, keys, output_of, run

from mlx_mtp.batch.journal import Journal
from mlx_mtp.errors import UsageError, VerificationError


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def file(tmp_path):
    """The journal's file of `output`."""
    return tmp_path / "out.jsonl.journal"


def test_a_row_is_in_the_file_at_once_and_is_read_back(output, file):
    record = {"text": "a\ud800 lone surrogate, ümlaut, \0, new\nline", "error": None}
    with Journal.open(output) as journal:
        place = journal.append("k\udcff", record)
        raw = file.read_bytes()
        assert raw.startswith(HEADER)
        assert raw[place.offset :].count(b"\n") == 1
        assert len(raw) == place.offset + place.length
        assert journal.read(place) == record
    assert keys(output) == ["k\udcff"]


def test_the_file_is_private(output, file):
    with Journal.open(output):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_journal_with_nothing_to_tell_leaves_no_file(output, file):
    Journal.open(output).close()
    assert not file.exists()
    file.write_bytes(HEADER)
    Journal.open(output).close()
    assert not file.exists()
    journal = Journal.open(output)
    file.unlink()
    file.write_text("of another")
    journal.close()
    assert file.read_text() == "of another"
    file.unlink()
    fill(output, [])
    assert not file.exists()


@pytest.mark.parametrize(("rows", "end"), [([("a", BAD)], "failed"), ([], None)])
def test_a_journal_that_tells_of_a_row_or_of_a_killed_run_stays(output, file, rows, end):
    fill(output, rows, end)
    whole = file.read_bytes()
    Journal.open(output).close()
    assert file.read_bytes() == whole


def test_closing_twice_does_nothing(output):
    journal = Journal.open(output)
    journal.close()
    journal.close()
    with pytest.raises(UsageError, match="cannot be written"):
        journal.append("k", OK)


def test_how_the_last_run_ended(output):
    for end, was_killed in (
        ("done", False),
        ("interrupted", False),
        ("failed", False),
        (None, True),
    ):
        fill(output, [("a", OK)], end)
        with Journal.open(output) as journal:
            assert (journal.was_killed, journal.last_rows) == (was_killed, 8)


def test_a_new_journal_knows_of_no_run(output):
    for _ in range(2):
        with Journal.open(output) as journal:
            assert (journal.was_killed, journal.last_rows, journal.damaged) == (False, None, 0)


def test_the_last_begin_counts(output):
    with Journal.open(output) as journal:
        journal.begin(rows=8)
        journal.begin(rows=4, details={"model": "pocket", "rows": 99})
    with Journal.open(output) as journal:
        assert journal.last_rows == 4


def test_a_begin_with_odd_rows_is_no_trouble(output, file):
    file.write_bytes(HEADER + b'{"begin": {"rows": "many"}}\n')
    with Journal.open(output) as journal:
        assert (journal.was_killed, journal.last_rows) == (True, None)


def test_a_tail_torn_at_any_byte_is_cut_off(output, file, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    fill(output, [("a", OK), ("b", BAD)], end=None)
    whole = file.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        file.write_bytes(whole[:cut])
        with Journal.open(output) as journal:
            assert [row.key for row in journal.finished()] == ["a"]
            assert (journal.damaged, journal.last_rows) == (0, 8)
            assert file.read_bytes() == whole[:last]
            place = journal.append("c", OK)
            assert journal.read(place) == OK
        assert keys(output) == ["a", "c"]


def test_a_header_torn_at_any_byte_is_begun_anew(output, file, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for cut in range(len(HEADER) + 1):
        for tail in (b"", b"\0" * 100):
            file.write_bytes(HEADER[:cut] + tail)
            with Journal.open(output):
                assert file.read_bytes() == HEADER


@pytest.mark.parametrize(
    "tail",
    [
        b"\0" * 5000,
        b'{"row": "b", "reco' + b"\0" * 100,
        b"\0" * 100 + b'cord": {}}\n',
        b'{"row": "b"\n\0\0\0\n{"row',
        b'{"row": 7, "record": {}}\n',
        b'{"row": "b", "record": {}, "begin": 7}\n',
        b'{"begin": {}, "row": "b"}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_a_tail_of_lost_blocks_is_cut_off(output, file, tail):
    fill(output, [("a", OK)])
    whole = file.read_bytes()
    file.write_bytes(whole + tail)
    with Journal.open(output) as journal:
        assert journal.damaged == 0
    assert file.read_bytes() == whole
    assert keys(output) == ["a"]


def test_a_damaged_line_in_the_middle_is_skipped_and_counted(output, file):
    fill(output, [("a", OK), ("b", OK), ("c", OK)])
    lines = file.read_bytes().splitlines(keepends=True)
    lines[3] = b"\0" * (len(lines[3]) - 1) + b"\n"
    lines.insert(2, HEADER)  # of another journal, put in with cat
    file.write_bytes(b"".join(lines))
    for _ in range(2):
        with Journal.open(output) as journal:
            assert journal.damaged == 2
            assert [row.key for row in journal.finished()] == ["a", "c"]
    assert file.read_bytes() == b"".join(lines)


def test_lines_longer_than_what_is_read_at_once(output):
    long = {"text": "x" * 2_500_000, "error": None}
    fill(output, [("a", long), ("b", OK), ("c", long)])
    with Journal.open(output) as journal:
        assert [(row.key, journal.read(row.place)["text"][-1]) for row in journal.finished()] == [
            ("a", "x"), ("b", "e"), ("c", "x"),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"my notes\n", "not a journal"),
        (b"my notes", "not a journal"),
        (b'{"mlx_mtp_journal":1}', "not a journal"),
        (b'{"row": "a", "record": {}}\n', "not a journal"),
        (b"x" * 200_000, "not a journal"),
        (b"\0" * 200_000, "not a journal"),
        (b"[1]\n", "not a journal"),
        (b'{"mlx_mtp_journal": 2}\n{"new": "kind"}\n', "another version"),
    ],
)
def test_another_file_in_its_place_is_refused_and_left_alone(output, file, content, why):
    file.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        Journal.open(output)
    assert file.read_bytes() == content
    with pytest.raises(UsageError, match=why):  # and not because it is still locked
        Journal.open(output)


def test_a_link_or_folder_in_its_place_is_refused(output, file, tmp_path):
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot be written"):
        Journal.open(output)
    assert not (tmp_path / "elsewhere").exists()
    file.unlink()
    file.mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        Journal.open(output)


def test_a_second_process_is_refused_until_the_first_has_closed(output):
    script = """
try:
    Journal.open(Path(sys.argv[1])).close()
    print("open")
except Exception as error:
    print(type(error).__name__, error)
"""
    with Journal.open(output) as journal:
        journal.append("a", OK)
        (said,) = output_of(script, output)
        assert said.startswith(f"UsageError Another process is writing {output}. Wait for it,")
        journal.append("b", OK)
    assert output_of(script, output) == ["open"]
    assert keys(output) == ["a", "b"]


def test_all_names_of_an_output_have_one_journal(output, tmp_path):
    link = tmp_path / "there" / "link"
    link.parent.mkdir()
    link.symlink_to(output)
    fill(output, [("a", OK)])
    assert keys(link) == ["a"]
    with Journal.open(link), pytest.raises(UsageError, match="Another process is writing"):
        Journal.open(output)


def test_a_program_started_meanwhile_does_not_keep_the_lock(output):
    journal = Journal.open(output)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as sleeper:
        journal.close()
        Journal.open(output).close()
        sleeper.kill()


def test_a_journal_replaced_while_it_is_locked_is_not_written_to(output, file, monkeypatch):
    Journal.open(output).close()
    original, calls = os.fstat, []

    def replace_first(descriptor):
        if not calls:
            calls.append(descriptor)
            file.unlink()
        return original(descriptor)

    monkeypatch.setattr(os, "fstat", replace_first)
    with Journal.open(output) as journal:
        journal.append("a", OK)
    assert keys(output) == ["a"]


def test_a_killed_process_loses_no_row_it_was_told_is_kept(output):
    script = """
journal = Journal.open(Path(sys.argv[1]))
journal.begin(rows=16)
for i in range(10**9):
    journal.append(str(i), {"text": "x" * (i % 5000), "error": None})
    os.write(1, b"%d\\n" % i)
"""
    with run(script, output) as process:
        told = [process.stdout.readline().strip() for _ in range(300)]
        process.send_signal(signal.SIGKILL)
        told += [line.strip() for line in process.stdout if line.endswith("\n")]
    with Journal.open(output) as journal:
        rows = list(journal.finished())
        assert (journal.was_killed, journal.last_rows, journal.damaged) == (True, 16, 0)
        assert [row.key for row in rows[: len(told)]] == told
        assert len(journal.read(rows[299].place)["text"]) == 299


def test_threads_do_not_mix_their_lines(output, monkeypatch):
    def slow_write(descriptor, data):
        written = write(descriptor, data)
        time.sleep(0.0001)  # another thread's turn
        return written

    def work(name):
        for i in range(100):
            key = f"{name}{i}"
            places[key] = journal.append(key, {"text": key, "error": None})

    write, places = os.write, {}
    with Journal.open(output) as journal:
        monkeypatch.setattr(os, "write", slow_write)
        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {row.key: row.place for row in journal.finished()} == places
        assert all(journal.read(place)["text"] == key for key, place in places.items())
    assert len(places) == 400


def test_a_record_changed_by_others_is_not_handed_out(output, file):
    with Journal.open(output) as journal:
        place = journal.append("k", OK)
        with file.open("r+b") as stream:
            stream.seek(place.offset)
            stream.write(b"XX")
        with pytest.raises(VerificationError, match="changed by another program"):
            journal.read(place)
