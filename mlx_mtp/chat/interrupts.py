"""What Ctrl-C does while a conversation is held. Owns: the process's SIGINT.

A KeyboardInterrupt that is raised wherever the program happens to be would tear the line editor as
it starts, or a turn as it ends. So there is none, but where somebody says that one is welcome; at
all other times Ctrl-C does nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

Act = TypeVar("Act", bound=Callable[[], None])


class Interrupts:
    """Has SIGINT do what it is told while it is entered; a process that ignores it goes on to."""

    def __init__(self) -> None:
        self._act: Callable[[], None] = _nothing
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda number, frame: self._act())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def calling(self, act: Act) -> Iterator[Act]:
        """Let SIGINT call a function, which must be safe wherever the program happens to be."""
        self._act = act
        try:
            yield act
        finally:
            self._act = _nothing

    def raising(self) -> AbstractContextManager[object]:
        """Let SIGINT raise one KeyboardInterrupt. To be caught around the `with`, as it may come
        in the moment in which that ends."""
        return self.calling(self._raise)

    def stopping(self, stop: Callable[[], None]) -> AbstractContextManager[Stopping]:
        """Let the first SIGINT call `stop`, and the second raise as in `raising`."""
        return self.calling(Stopping(stop, self._raise))

    def _raise(self) -> None:
        self._act = _nothing  # or the next one would tear what tidies up
        raise KeyboardInterrupt


class Stopping:
    """What SIGINT does to a reply.

    Args:
        stop: asks the reply to end.
        insist: ends it where it is.
    """

    def __init__(self, stop: Callable[[], None], insist: Callable[[], None]) -> None:
        self.is_asked = False
        self._stop = stop
        self._insist = insist

    def __call__(self) -> None:
        if self.is_asked:
            self._insist()
        self.is_asked = True
        self._stop()

    def repeat(self) -> None:
        """Ask again, if it was asked: what did not run yet could not be stopped."""
        if self.is_asked:
            self._stop()


def _nothing() -> None:
    """What SIGINT does where nobody waits for it."""
