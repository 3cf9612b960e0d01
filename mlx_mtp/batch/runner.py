"""A batch from input to OUTPUT. Owns: its order of work, what is done again, and the summary.
Knows no terminal.

    with Batch(input, output, options) as batch:
        batch.survey()      # reads all rows once: what is broken is known before any work
        batch.use(files)    # of a model: finds what an earlier run with it has finished
        batch.run(llm)      # the rest; `stop()` ends it early, rows in flight are finished
        batch.write()       # OUTPUT in one piece
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from mlx_mtp.batch.index import Counts, Index
from mlx_mtp.batch.journal import Journal
from mlx_mtp.batch.output import RecordWriter, error_record, make_record
from mlx_mtp.batch.paths import AGAIN, check_output, check_paths, replace_output
from mlx_mtp.batch.rows import BadRow, Row, bad_row, row_key
from mlx_mtp.batch.sources import open_source
from mlx_mtp.batch.types import BatchOptions, Problems, Summary
from mlx_mtp.errors import MlxMtpError, UsageError
from mlx_mtp.files import fingerprint
from mlx_mtp.hub import ModelFiles
from mlx_mtp.plain import printable
from mlx_mtp.types import MAX_ROWS, Request, RequestStats, Result

if TYPE_CHECKING:  # these load mlx, which takes seconds, and `survey` does without
    from mlx_mtp.completions import BatchSize, Completions
    from mlx_mtp.llm import LLM

_SHOWN_ID = 60
"""Characters of an id that a message quotes."""


class Batch:
    """One run of `mlx-mtp batch`; see the module's example.

    Args:
        source: the input's path, or ``-``.
        output: OUTPUT; its journal stands beside it and is locked until `close`.
        options: how.

    Attributes:
        broken: rows of the input that cannot be served.
        failures: rows that failed in this run when it was their turn.
        total: rows of the input, known after `survey`.
        finished_now, failed_now: rows of this run so far.
        model_name: known after `use`.
        drafter_name: of the model that ran; None without one, or where nothing was left to do.
        notes: what the user should know, one sentence each.

    Raises:
        UsageError: the input or OUTPUT cannot be what they are asked to be.
        ResourceError: no room on the disk.
    """

    def __init__(self, source: str, output: Path, options: BatchOptions) -> None:
        self.output = output
        self.options = options
        self.broken = Problems()
        self.failures = Problems()
        self.notes: list[str] = []
        self.completions: Completions | None = None
        self.model_name = ""
        self._llm: LLM | None = None
        self._stopped = False
        self._is_openai = False
        self.total = 0
        self.finished_now = 0
        self.failed_now = 0
        self._seconds = 0.0
        self._before = Counts(0, 0, 0)
        self._left = 0
        self._rows: BatchSize = options.batch_size
        self._in_flight: dict[str, tuple[Row, str]] = {}
        with ExitStack() as stack:
            check_output(output)
            if source != "-":
                check_paths(Path(source), output)
            self._source = stack.enter_context(open_source(source, options.kind, options.rows))
            self._journal = stack.enter_context(Journal.open(output))
            self._index = stack.enter_context(Index(self._journal))
            self._open = stack.pop_all()

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    # The steps.

    def survey(self) -> int:
        """Read all rows once; how many there are.

        Raises:
            UsageError: there are none, or broken ones that `skip_invalid` does not allow.
        """
        for row in self._source.rows():
            self.total += 1
            if isinstance(row, Row):
                earlier = self._index.add_row(row.index, row.id, self._key(row), row.place)
                if earlier is None:
                    self._is_openai = self._is_openai or row.is_openai
                    continue
                row = _duplicate(row, earlier)
            self._index.add_row(row.index, None, self._key(row), row.place)
            self.broken.add(row.place, row.error)
        if not self.total:
            raise UsageError(f"{self._source.describe()} has no rows.", "Give at least one prompt.")
        if self.broken.count and not self.options.skip_invalid:
            raise UsageError(
                f"{_rows(self.broken.count)} of {self.total} cannot be served.",
                "Mend the input, or record them as failed with --skip-invalid.",
            )
        return self.total

    def use(self, model: ModelFiles) -> int:
        """Take this model's answers; how many rows it has still to do."""
        self.model_name = model.name
        self._index.use_model(fingerprint(model.path))
        self._before = self._index.counts()
        if self._journal.damaged:
            self.notes.append(
                f"The journal has damaged lines ({self._journal.damaged}); "
                "what they held is done again."
            )
        done = self._before.done - (self._before.failed if self.options.retry_errors else 0)
        self._left = self.total - done
        if self._left:
            self._rows = self._batch_size()
        return self._left

    def run(self, llm: LLM) -> None:
        """Answer what is left with the model of `use`. Every finished row is in the journal before
        the next one is taken.

        Raises:
            UsageError: rows of the input were changed or removed since `survey`; the others are
                done.
            ResourceError: the disk is full; nothing finished is lost.
        """
        self._llm = llm
        began = time.perf_counter()
        try:
            self._journal.begin(MAX_ROWS if self._rows == "auto" else self._rows)
            self.completions = llm.as_completed(
                self._requests(),
                batch_size=self._rows,
                draft_depth=self.options.draft_depth,
                thinking=self.options.thinking,
            )
            if self._stopped:  # asked for before there was anything to stop
                self.completions.stop()
            for result in self.completions:
                self._finish(result)
        except BaseException as error:
            orderly = isinstance(error, KeyboardInterrupt | SystemExit)
            with suppress(MlxMtpError):
                self._journal.end("interrupted" if orderly else "failed")
            raise
        finally:
            self._seconds = time.perf_counter() - began
        self._journal.end("interrupted" if self._stopped else "done")
        missing = self._left - self.finished_now
        if missing and not self._stopped:
            raise UsageError(
                f"{self._source.describe()} was changed while it was read, so {_rows(missing)} "
                "could not be done.",
                f"When it is as you want it, {AGAIN}",
            )

    @property
    def drafter_name(self) -> str | None:
        return None if self._llm is None else self._llm.drafter_name

    @property
    def in_flight(self) -> int:
        """Rows that have begun and are not finished."""
        return 0 if self.completions is None else self.completions.in_flight

    def stop(self) -> None:
        """Begin no more rows; those in flight are finished. A signal handler may call it."""
        self._stopped = True
        if self.completions is not None:
            self.completions.stop()

    def write(self) -> None:
        """Put OUTPUT in its place, with every row of the input once."""

        def write_records(out: TextIO) -> None:
            writer = RecordWriter(self._format(), out, self.model_name)
            for index, key, record in self._index.records(ordered=self.options.ordered):
                writer.write(index, record, key)

        replace_output(self.output, write_records)

    def summary(self) -> Summary:
        """Where it stands; call it after `use`, or `run` where rows were left."""
        counts = self._index.counts()
        retried = self._before.failed if self.options.retry_errors else 0
        return Summary(
            rows=self.total,
            done=counts.done - counts.failed,
            failed=counts.failed,
            reused=self._before.done - retried,
            interrupted=self.finished_now < self._left,
            batch_size=0 if self.completions is None else self.completions.rows,
            seconds=self._seconds,
            tokens=0 if self._llm is None else self._llm.run_stats.tokens,
            mode=_mode(self._llm, self.options),
        )

    # Rows.

    def _requests(self) -> Iterator[Request]:
        """Rows that are not done, as requests; broken ones are recorded on the way."""
        for row in self._source.rows():
            key = self._key(row)
            if isinstance(row, Row) and not self._index.has_row(row.index, key):
                row = _duplicate(row, self._index.place_of(row.id))
                key = self._key(row)
            if not self._index.has_row(row.index, key):
                continue  # changed or added since the survey: `run` tells, or the next run does it
            if self._index.is_done(key, self.options.retry_errors):
                continue
            if isinstance(row, BadRow):
                name = str(row.index) if row.id is None else row.id
                self._record(key, error_record(name, row.error, int(time.time())))
                continue
            number = str(row.index)
            self._in_flight[number] = (row, key)
            yield Request(messages=row.messages, params=row.params, id=number)

    def _finish(self, result: Result) -> None:
        assert result.id is not None
        row, key = self._in_flight.pop(result.id)
        now = int(time.time())
        if result.error is not None:
            self.failures.add(row.place, printable(result.error))
        if result.error is not None and result.stats == RequestStats():  # it was never begun
            self._record(key, error_record(row.id, result.error, now))
        else:
            self._record(key, make_record(row.id, result, now))

    def _record(self, key: str, record: dict[str, Any]) -> None:
        self._index.add_record(key, record)
        self.finished_now += 1
        self.failed_now += record["error"] is not None

    def _key(self, row: Row | BadRow) -> str:
        if isinstance(row, Row):
            return row_key(row, "", self.options.thinking, exact=self.options.exact)
        return sha256(f"{row.index}\0{row.id}\0{row.error}".encode()).hexdigest()[:32]

    def _batch_size(self) -> BatchSize:
        asked, last = self.options.batch_size, self._journal.last_rows
        if asked != "auto" or not self._journal.was_killed or last is None:
            return asked
        half = max(1, last // 2)
        self.notes.append(
            f"The last run was killed, perhaps for lack of memory; this one takes {half} rows "
            "at a time (--batch-size says otherwise)."
        )
        return half

    def _format(self) -> str:
        if self.options.format is not None:
            return self.options.format
        if self.output.suffix.lower() == ".csv":
            return "csv"
        return "openai" if self._is_openai else "simple"


def _duplicate(row: Row, earlier: str) -> BadRow:
    shown = row.id if len(row.id) <= _SHOWN_ID else f"{row.id[:_SHOWN_ID]}..."
    error = UsageError(f"The id {shown!r} is also that of {earlier}.", "Give each row its own.")
    return bad_row(row.index, row.place, error, row.id)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _mode(llm: LLM | None, options: BatchOptions) -> str:
    if llm is None:
        return "nothing was left to do"
    if llm.drafter is None:
        return "plain: no drafter is loaded"
    if options.draft_depth == 0:
        return "plain: the draft depth is 0"
    if not llm.run_stats.tokens:
        return "nothing was decoded"
    if options.draft_depth == "auto" and llm.parked:
        return f"at the end plain, as drafting did not pay: {llm.parked}"
    if not llm.run_stats.drafted:
        return "plain: nothing was drafted"
    return f"drafted by {llm.drafter_name}{', exact' if llm.exact else ''}"
