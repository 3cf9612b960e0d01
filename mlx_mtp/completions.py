"""Requests through one engine. Owns: feeding it, one answer as it is produced, and the results of
many as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Literal

from mlx_mtp.answer import Answer, failed
from mlx_mtp.decode.engine import Engine
from mlx_mtp.errors import UsageError
from mlx_mtp.types import MAX_ROWS, Chunk, Request, Result

BatchSize = int | Literal["auto"]
"""Rows that decode together; "auto": MAX_ROWS, as far as memory goes."""


class Stream(Iterator[Chunk]):
    """One answer as it is produced, one chunk per token; the last carries finish_reason and stats.

    Args:
        engine: with nothing to do yet.
        answer: to be given.
        at_end: called when the answer is over or nobody wants more.
    """

    def __init__(self, engine: Engine, answer: Answer, at_end: Callable[[], None]) -> None:
        self._is_stopped = False
        self._chunks = self._run(engine, answer, engine.add(answer.job), at_end)

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def stop(self) -> None:
        """Have the answer end after its present round, as "cancelled". A signal handler may call
        it."""
        self._is_stopped = True

    def close(self) -> None:
        """End it where it is; no more chunks come."""
        self._chunks.close()

    def _run(
        self, engine: Engine, answer: Answer, job_id: int, at_end: Callable[[], None]
    ) -> Generator[Chunk]:
        try:
            while engine.has_work:
                if self._is_stopped:
                    engine.cancel(job_id)
                for progress in engine.step():
                    if progress.error is not None:
                        raise progress.error
                    yield from answer.advance(progress)
        finally:
            at_end()


class Completions(Iterator[Result]):
    """Results of requests, each when it is finished.

    Requests are taken as rows become free, a few ahead. One that cannot be served ends with
    finish_reason "error"; the others go on.

    Args:
        engine: with nothing to do yet.
        requests: numbered; taken from only while this is iterated.
        answering: makes a request's answer; UsageError ends that request.
        at_end: called when all results were given or nobody wants more.

    Attributes:
        in_flight: requests that had begun and were not finished at the last step; any thread may
            read it.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Iterator[tuple[int, Request]],
        answering: Callable[[Request], Answer],
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._answering = answering
        self._at_end = at_end
        self._running: dict[int, tuple[int, Answer]] = {}
        self._finished = self._run()
        self._stopped = False
        self.in_flight = 0

    def __next__(self) -> Result:
        return next(self._finished)[1]

    def in_order(self) -> list[Result]:
        """All of them, in the order of the requests."""
        results = dict(self._finished)
        return [results[number] for number in range(len(results))]

    @property
    def rows(self) -> int:
        """Most requests that decode together at present."""
        return self._engine.rows

    def stop(self) -> None:
        """Begin no more requests; those that have begun go on to their end. A signal handler may
        call it."""
        self._stopped = True

    def _run(self) -> Iterator[tuple[int, Result]]:
        try:
            while True:
                yield from self._refill()
                if not self._engine.has_work:
                    return
                yield from self._step()
        finally:
            self._at_end()

    def _step(self) -> Iterator[tuple[int, Result]]:
        progresses = self._engine.step()
        self.in_flight = len(self._running) - len(self._engine.waiting)
        for progress in progresses:
            number, answer = self._running[progress.job_id]
            answer.advance(progress)
            if progress.finish_reason is not None:
                del self._running[progress.job_id]
                self.in_flight -= 1
                yield number, answer.result()

    def _refill(self) -> Iterator[tuple[int, Result]]:
        """Give the engine work ahead; requests that failed at once."""
        if self._stopped:
            for job_id in self._engine.waiting:
                self._engine.withdraw(job_id)
                del self._running[job_id]
            return
        ahead = max(0, 2 * self._engine.rows - len(self._running))
        for number, request in islice(self._requests, ahead):
            try:
                answer = self._answering(request)
                self._running[self._engine.add(answer.job)] = (number, answer)
            except UsageError as error:
                yield number, failed(request, error)


def rows_asked(batch_size: BatchSize) -> int:
    """Most rows that decode together. Raises UsageError."""
    if batch_size == "auto":
        return MAX_ROWS
    is_number = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if is_number and 1 <= batch_size <= MAX_ROWS:
        return batch_size
    raise UsageError(
        f"batch_size is {batch_size!r}.", f'Give "auto" or a whole number from 1 to {MAX_ROWS}.'
    )
