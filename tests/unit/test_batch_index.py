"""Which rows there are and which are done: the index of a batch."""

import errno
import os

import pytest
from journals import BAD, OK, fill, output_of

from mlx_mtp.batch.index import Counts, Index
from mlx_mtp.batch.journal import Journal
from mlx_mtp.errors import ResourceError


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def test_what_the_index_knows(output):
    again = {"n": 2, "error": None}
    rows = [("a", BAD), ("b", OK), ("gone", OK), ("c", BAD), ("a", again)]
    fill(output, [(f"model:{key}", record) for key, record in rows])
    with Journal.open(output) as journal, Index(journal) as index:
        for i, key in enumerate("dcba"):
            assert index.add_row(i, f"id {i}", key, f"line {i + 1}") is None
        index.use_model("model")
        assert index.counts() == Counts(total=4, done=3, failed=1)
        assert [index.is_done(key) for key in "abcd"] == [True, True, True, False]
        assert [index.is_done(key, retry_errors=True) for key in "abcd"] == [
            True, True, False, False,
        ]  # fmt: skip
        journal.begin(rows=8)
        index.add_record("d", BAD)
        index.add_record("c", OK)
        assert index.counts() == (4, 4, 1)
        in_order = list(index.records(ordered=True))
        assert in_order == [(0, "d", BAD), (1, "c", OK), (2, "b", OK), (3, "a", again)]
        assert [i for i, _, _ in index.records(ordered=False)] == [2, 3, 0, 1]
    with Journal.open(output) as journal:  # and the journal knows what the index was told
        assert [row.key for row in journal.finished()][-2:] == ["model:d", "model:c"]


def test_a_row_whose_record_is_not_written_is_not_done(output, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal.open(output) as journal, Index(journal) as index:
        index.add_row(0, None, "a", "line 1")
        index.use_model("model")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(ResourceError):
                index.add_record("a", OK)
        assert not index.is_done("a")
        assert index.counts() == (1, 0, 0)
        index.add_record("a", OK)
        assert list(index.records(ordered=True)) == [(0, "a", OK)]


def test_only_the_records_of_the_model_in_use_count(output):
    rows = [("one:a", OK), ("two:a", BAD), ("one:b", BAD), ("on:c", OK), ("one", OK)]
    fill(output, rows)
    with Journal.open(output) as journal, Index(journal) as index:
        for i, key in enumerate("abc"):
            index.add_row(i, None, key, f"line {i + 1}")
        assert index.counts() == (3, 0, 0)
        for model, counts, found in (
            ("one", (3, 2, 1), [(0, "a", OK), (1, "b", BAD)]),
            ("two", (3, 1, 1), [(0, "a", BAD)]),
            ("on", (3, 1, 0), [(2, "c", OK)]),
            ("none", (3, 0, 0), []),
        ):
            index.use_model(model)
            assert index.counts() == counts
            assert list(index.records(ordered=True)) == found
        index.add_record("c", OK)
        index.use_model("two")
        assert index.counts() == (3, 1, 1)
        index.use_model("none")
        assert list(index.records(ordered=True)) == [(2, "c", OK)]


def test_an_id_that_comes_twice_is_told_with_its_first_place(output):
    with Journal.open(output) as journal, Index(journal) as index:
        index.use_model("model")
        assert index.add_row(0, "same", "a", "line 1\udcff") is None
        assert index.add_row(1, "same", "b", "line 2") == "line 1\udcff"
        assert index.add_row(2, "\ud800", "c\udfff", "line 3") is None
        assert index.add_row(3, "\ud800", "d", "line 4") == "line 3"
        assert index.add_row(4, None, "e", "line 5") is None
        assert index.add_row(5, None, "f", "line 6") is None
        assert index.counts() == (4, 0, 0)
        index.add_record("c\udfff", OK)
        assert list(index.records(ordered=True)) == [(2, "c\udfff", OK)]
        assert index.place_of("same") == "line 1\udcff"
        assert index.place_of("absent") == "no row"


def test_a_row_is_known_by_its_index_and_key(output):
    with Journal.open(output) as journal, Index(journal) as index:
        index.add_row(0, "same", "a\udfff", "line 1")
        index.add_row(1, "same", "b", "line 2")  # not noted: its id is taken
        assert index.has_row(0, "a\udfff")
        assert not index.has_row(0, "b")
        assert not index.has_row(1, "b")
        assert not index.has_row(2, "a\udfff")


def test_an_empty_index(output):
    with Journal.open(output) as journal, Index(journal) as index:
        for _ in range(2):
            assert index.counts() == (0, 0, 0)
            assert list(index.records(ordered=False)) == []
            index.use_model("model")


def test_memory_stays_flat_with_many_rows(output):
    script = """
def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux's ru_maxrss begins with that of the process that started this one
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

def work(journal, rows):
    with Index(journal) as index:
        index.use_model("model")
        for i in range(rows):
            scattered = i * 7919 % rows
            index.add_row(i, f"a rather long id {scattered}", f"{scattered:064}", "line")
            if not index.is_done(f"{i:064}"):
                index.add_record(f"{i:064}", {"text": "x" * 50, "error": None})
        index.use_model("model")
        assert sum(1 for _ in index.records(ordered=True)) == rows
        assert sum(1 for _ in index.records(ordered=False)) == rows
        assert index.counts() == (rows, rows, 0)

with Journal.open(Path(sys.argv[1])) as journal:
    work(journal, 5_000)
    before = peak()
    work(journal, 50_000)
    print(peak() - before)
"""
    (grown,) = map(int, output_of(script, output))
    assert grown < 8_000_000  # 4 MB; with all of the index in memory 16 MB


def test_a_full_temporary_folder_is_told(output):
    with Journal.open(output) as journal, Index(journal) as index:
        index._database.execute("PRAGMA max_page_count = 10")
        with pytest.raises(ResourceError, match="full") as caught:
            index.add_row(0, "id", "key", "x" * 100_000)
        assert "Free some space" in caught.value.hint
