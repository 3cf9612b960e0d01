"""When the journal's lines reach the disk, and what happens where they cannot."""

import errno
import os
import threading
import time

import pytest
from journals import HEADER, OK, keys, output_of

from mlx_mtp.batch.journal import Journal
from mlx_mtp.errors import ResourceError


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def test_rows_reach_the_disk_together_within_a_second(output, monkeypatch):
    times = []
    with Journal.open(output) as journal:
        original = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (original(fd), times.append(time.monotonic())))
        start = time.monotonic()
        for i in range(500):
            journal.append(str(i), OK)
        appended = time.monotonic()
        while not times and time.monotonic() < appended + 5:
            time.sleep(0.01)
        assert times[0] - start < 1.5
        while times[-1] < appended and time.monotonic() < appended + 5:
            time.sleep(0.01)
        assert times[-1] - appended < 1.5
        assert len(times) <= 2 + (appended - start) / 0.5
        count = len(times)
        time.sleep(0.7)
        assert len(times) == count  # nothing new, nothing to do
        journal.sync()
        assert len(times) == count + 1
        journal.append("last", OK)
    assert len(times) >= count + 2


def test_a_line_written_during_an_fsync_gets_another(output, monkeypatch):
    monkeypatch.setattr("mlx_mtp.batch.journal.SYNC_SECONDS", 0.01)
    first, goes_on, second = (threading.Event() for _ in range(3))

    def slow(descriptor):
        if first.is_set():
            second.set()
        first.set()
        goes_on.wait(5)

    with Journal.open(output) as journal:
        monkeypatch.setattr(os, "fsync", slow)
        journal.append("before", OK)
        assert first.wait(5)
        journal.append("during", OK)
        goes_on.set()
        assert second.wait(5)


def test_end_is_on_the_disk_when_it_returns(output, monkeypatch):
    synced = []
    with Journal.open(output) as journal:
        monkeypatch.setattr(os, "fsync", synced.append)
        journal.end("done")
        assert synced


def test_no_thread_is_left_behind(output):
    before = threading.active_count()
    with Journal.open(output):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_failed_fsync_is_raised_by_the_next_call_and_stays(output, monkeypatch):
    failed = threading.Event()

    def fail(descriptor):
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    journal = Journal.open(output)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        journal.begin(rows=8)
        journal.append("a", OK)
        assert failed.wait(5)
        time.sleep(0.05)
    # the disk "works" again, but what was lost is lost
    for call in (lambda: journal.append("k", OK), journal.sync, lambda: journal.end("failed")):
        with pytest.raises(ResourceError, match="Input/output error") as caught:
            call()
        assert caught.value.exit_code == 5
        assert caught.value.hint.endswith("run the same command again; finished rows are kept.")
    with pytest.raises(ResourceError):
        journal.close()
    with Journal.open(output) as journal:  # unlocked all the same, and the end was noted
        assert not journal.was_killed


def test_an_error_on_closing_does_not_hide_the_first_trouble(output, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    def work():
        with Journal.open(output):
            monkeypatch.setattr(os, "fsync", fail)
            raise KeyError("first")

    with pytest.raises(KeyError):
        work()


def test_a_full_disk_leaves_only_whole_lines(output):
    script = """
path = Path(sys.argv[1])
record = {"text": "x" * 100, "error": None}
with Journal.open(path) as journal:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    end = 0
    try:
        while True:
            place = journal.append("k", record)
            end = place.offset + place.length
    except Exception as error:
        print(type(error).__name__, error.exit_code, error.hint)
    print(end, os.stat(journal.path).st_size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print(*journal.append("after", record))
"""
    said, sizes, after = output_of(script, output)
    hint = "Free some space and run the same command again; finished rows are kept."
    assert said == f"ResourceError 5 {hint}"
    end, size = map(int, sizes.split())
    assert 700 < end == size < 1000
    assert int(after.split()[0]) == end
    assert keys(output) == ["k"] * ((end - len(HEADER)) // 141) + ["after"]


@pytest.mark.parametrize("can_cut", [True, False])
def test_a_write_cut_short_does_not_spoil_the_next_line(output, monkeypatch, can_cut):
    def interrupted_write(descriptor, data):
        write(descriptor, data[:7])
        raise KeyboardInterrupt

    def refuse(descriptor, length):
        raise OSError(errno.EIO, "Input/output error")

    write = os.write
    with Journal.open(output) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", interrupted_write)
            if not can_cut:
                patch.setattr(os, "ftruncate", refuse)
            with pytest.raises(KeyboardInterrupt):
                journal.append("lost", OK)
        journal.append("kept", OK)
    with Journal.open(output) as journal:
        assert journal.damaged == 0
        assert [row.key for row in journal.finished()] == ["kept"]


def test_short_writes_are_gone_on_with(output, monkeypatch):
    write = os.write
    with Journal.open(output) as journal, monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
        assert journal.read(journal.append("k", OK)) == OK
    assert keys(output) == ["k"]
