"""Which rows there are and which are done. Owns: a private temporary database of the input's rows
and the journal's records, so that memory stays flat however many there are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mlx_mtp.batch.journal import Journal, Place
from mlx_mtp.batch.paths import AGAIN
from mlx_mtp.errors import ResourceError

# Nothing here outlives the process, so no rollback and no fsync; 2 MB of it stay in memory.
_SETUP = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -2000;
CREATE TABLE records (key BLOB PRIMARY KEY, offset INTEGER, length INTEGER, failed INTEGER)
    WITHOUT ROWID;
CREATE TABLE rows (row_index INTEGER PRIMARY KEY, id BLOB UNIQUE, key BLOB, place BLOB);
BEGIN;
"""


class Counts(NamedTuple):
    """Rows of the input; those with a record, failed ones included; those whose record failed."""

    total: int
    done: int
    failed: int


class Index:
    """The rows of the input and the latest record of each key. For one thread.

    A journal may hold the records of several models; `use_model` says whose count.

    Its methods raise ResourceError where the temporary folder is full.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._model = ""
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(_SETUP)

    def use_model(self, model: str) -> None:
        """Read the journal and note where this model's records are, instead of another's."""
        self._model = model
        prefix = f"{model}:"
        found = (
            (_blob(entry.key.removeprefix(prefix)), *entry.place, entry.failed)
            for entry in self._journal.finished()
            if entry.key.startswith(prefix)
        )
        with _temporary_space():
            self._database.execute("DELETE FROM records")
            self._database.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", found)

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the index."""
        self._database.close()

    def add_row(self, row_index: int, row_id: str | None, key: str, place: str) -> str | None:
        """Note a row of the input, its index used once and its key the same in every run.

        Returns:
            None; or, where an earlier row has this id, that row's place, and nothing is noted.
        """
        blob = None if row_id is None else _blob(row_id)
        added = self._execute(
            "INSERT INTO rows VALUES (?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
            (row_index, blob, _blob(key), _blob(place)),
        )
        return None if added.rowcount == 1 or row_id is None else self.place_of(row_id)

    def place_of(self, row_id: str) -> str:
        """Where the row with this id stands in the input."""
        found = self._execute("SELECT place FROM rows WHERE id = ?", (_blob(row_id),)).fetchone()
        return _text(found[0]) if found else "no row"

    def add_record(self, key: str, record: dict[str, Any]) -> None:
        """Write the record of a row to the journal and note where it is."""
        place = self._journal.append(f"{self._model}:{key}", record)
        row = (_blob(key), *place, record["error"] is not None)
        self._execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", row)

    def has_row(self, row_index: int, key: str) -> bool:
        """Whether this row was noted with this key."""
        found = self._execute("SELECT key FROM rows WHERE row_index = ?", (row_index,)).fetchone()
        return found is not None and found[0] == _blob(key)

    def is_done(self, key: str, retry_errors: bool = False) -> bool:
        """Whether a key has a record; with `retry_errors`, one without an error."""
        found = self._execute("SELECT failed FROM records WHERE key = ?", (_blob(key),)).fetchone()
        return found is not None and not (retry_errors and found[0])

    def counts(self) -> Counts:
        """How far the input is. Reads the whole index: for the start and the end of a run."""
        query = (
            "SELECT count(*), count(offset), coalesce(sum(failed), 0)"
            " FROM rows LEFT JOIN records USING (key)"
        )
        return Counts(*self._execute(query).fetchone())

    def records(self, *, ordered: bool) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Each row of the input that has a record: its index, key and record from the journal.

        In the order of the input, or, if not `ordered`, of the journal. Records of other inputs
        are left out. Not to be mixed with `add_row` and `add_record`.
        """
        order = "row_index" if ordered else "offset, row_index"
        query = (
            "SELECT row_index, key, offset, length"
            f" FROM rows JOIN records USING (key) ORDER BY {order}"
        )
        with _temporary_space():
            for row_index, key, offset, length in self._database.execute(query):
                yield row_index, _text(key), self._journal.read(Place(offset, length))

    def _execute(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        with _temporary_space():
            return self._database.execute(statement, values)


@contextmanager
def _temporary_space() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise ResourceError(
            f"The index of rows cannot be kept in the temporary folder: {error}.",
            f"Free some space there, or set SQLITE_TMPDIR, and {AGAIN}",
        ) from error


def _blob(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # names of files may hold lone surrogates


def _text(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")
