"""Requests from any thread. Owns: the one thread that runs them, and their handles."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread

import mlx.core as mx

from mlx_mtp.answer import Answer
from mlx_mtp.decode.engine import Engine
from mlx_mtp.errors import UsageError
from mlx_mtp.types import Chunk, Result

IDLE_SECONDS = 10.0
"""After so long without work the K/V buffers are given back."""


class Handle:
    """A request that was submitted. Its methods may be called from any thread."""

    def __init__(self, answer: Answer, worker: Worker) -> None:
        self._answer = answer
        self._worker = worker
        self._future: Future[Result] = Future()
        self._chunks: SimpleQueue[Chunk | None] = SimpleQueue()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the finished answer.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it is not finished by then; it goes on.
        """
        return self._future.result(timeout)

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._future.done()

    def cancel(self) -> None:
        """End it at the next round with finish_reason "cancelled"; nothing if it is finished."""
        self._worker.tell(lambda: self._worker.drop(self))

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they are produced; each is given once, so iterate in one place only."""
        while (chunk := self._chunks.get()) is not None:
            yield chunk

    def give(self, chunks: list[Chunk]) -> None:
        """For the worker: what was produced; the last chunk of an answer makes the result."""
        for chunk in chunks:
            self._chunks.put(chunk)
        if chunks and chunks[-1].finish_reason is not None:
            self._chunks.put(None)
            self._future.set_result(self._answer.result())

    def fail(self, error: Exception) -> None:
        """For the worker: it will never be finished."""
        self._chunks.put(None)
        self._future.set_exception(error)


class Worker:
    """Runs submitted requests in a thread of its own, several at a time.

    MLX's lazy arrays belong to the thread that made them, so all work of its engine is done there.

    Args:
        make_engine: an engine without work.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._engine = make_engine()
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running: dict[int, Handle] = {}
        self._lock = Lock()
        self._closed = False
        self._thread = Thread(target=self._run, name="mlx-mtp", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # MLX must not be at work while the interpreter goes down

    def submit(self, answer: Answer) -> Handle:
        """Queue an answer. Raises UsageError after `close`."""
        handle = Handle(answer, self)
        with self._lock:
            if self._closed:
                raise UsageError("The model was closed.", "Load it anew.")
            self.tell(lambda: self._begin(handle))
        return handle

    def tell(self, what: Callable[[], None]) -> None:
        """Have something done in the worker's thread, between two steps."""
        self._inbox.put(what)

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()
        atexit.unregister(self.close)

    # In the thread.

    def _run(self) -> None:
        while self._read_inbox():
            self._step()
        for job_id in self._running:
            self._engine.cancel(job_id)
        while self._running:
            self._step()
        # MLX's thread of this thread's stream would outlive it and abort the interpreter's exit.
        mx.synchronize()
        mx.clear_streams()

    def _read_inbox(self) -> bool:
        """Do what was asked for; waits while there is nothing to run. False: it is closed."""
        while True:
            try:
                what = self._inbox.get(not self._engine.has_work, IDLE_SECONDS)
            except Empty:
                if self._engine.has_work:
                    return True
                self._engine.rest()
                continue
            if what is None:
                return False
            what()

    def _begin(self, handle: Handle) -> None:
        try:
            self._running[self._engine.add(handle._answer.job)] = handle
        except UsageError as error:
            handle.fail(error)

    def drop(self, handle: Handle) -> None:
        """Cancel a request, if it still runs."""
        for job_id, running in self._running.items():
            if running is handle:
                self._engine.cancel(job_id)

    def _step(self) -> None:
        try:
            everything = self._engine.step()
        except Exception as error:  # whatever it is, those who wait must hear of it
            running, self._running = self._running, {}
            self._engine = self._make_engine()
            for handle in running.values():
                handle.fail(error)
            return
        for progress in everything:
            handle = self._running[progress.job_id]
            if progress.finish_reason is not None:
                del self._running[progress.job_id]
            handle.give(handle._answer.advance(progress))
