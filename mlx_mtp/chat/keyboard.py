"""The keyboard while nobody reads it. Owns: the terminal's mode while a reply is made, and what
becomes of what is typed meanwhile.

It is not shown, as it would stand in the middle of the answer, but waits for the next prompt as if
it were typed there: a line that was ended with Enter is sent. After Ctrl-C, or where a reply fails,
nothing is sent by itself: what was typed stands at the prompt as one message, which Enter sends and
Ctrl-C clears.
"""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

if TYPE_CHECKING:
    from prompt_toolkit.input import Input

_ENTER = (Keys.ControlM, Keys.ControlJ)
_LEAVING = (Keys.ControlC, Keys.ControlD, Keys.SIGINT)


@contextmanager
def quiet(keys: Input) -> Iterator[None]:
    """Keep what is typed from being shown, and for the next prompt; does nothing where the keys
    come from no terminal."""
    if not os.isatty(keys.fileno()):
        yield
        return
    mode = _QuietMode(keys.fileno())
    try:
        mode.begin()
        yield
    finally:
        mode.end()


def hold(keys: Input) -> None:
    """Let nothing that was typed so far be sent, or leave, by itself. For use within `quiet`."""
    if not os.isatty(keys.fileno()):
        return
    typed = get_typeahead(keys)
    while new := keys.read_keys():
        typed += new
    store_typeahead(keys, as_one_message(typed + keys.flush_keys()))


def as_one_message(typed: Iterable[KeyPress]) -> list[KeyPress]:
    """Keys that write the same, each Enter a new line but for those at the end."""
    kept = [press for press in typed if press.key not in _LEAVING]
    while kept and kept[-1].key in _ENTER:
        kept.pop()
    if kept and kept[-1].key == Keys.Escape:  # of Alt-Enter; alone it would wait for its second key
        kept.pop()
    held: list[KeyPress] = []
    for press in kept:
        is_enter = press.key in _ENTER
        if is_enter and not (held and held[-1].key == Keys.Escape):
            held.append(KeyPress(Keys.Escape, "\x1b"))
        held.append(KeyPress(Keys.ControlM, "\r") if is_enter else press)
    return held


class _QuietMode:
    """Has a terminal keep keys as they are pressed, unseen; those that send signals go on to.
    While the process is stopped the shell has its terminal as it was.

    Args:
        terminal: its file descriptor.
    """

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._before: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    def begin(self) -> None:
        """Take the terminal and the signals of stopping and going on."""
        for number, act in ((signal.SIGTSTP, self._stop), (signal.SIGCONT, self._go_on)):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._handlers[number] = before
                signal.signal(number, act)
        self._set()

    def end(self) -> None:
        """Give all of them back."""
        for number, before in self._handlers.items():
            signal.signal(number, before)
        self._restore()

    def _set(self) -> None:
        if not self._is_in_front():
            return
        with suppress(termios.error):  # it hung up
            mode = termios.tcgetattr(self._terminal)
            self._before = self._before or termios.tcgetattr(self._terminal)
            mode[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
            mode[3] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.IEXTEN)
            mode[3] |= termios.ISIG | termios.NOFLSH
            mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._terminal, termios.TCSANOW, mode)

    def _restore(self) -> None:
        if self._before is None or not self._is_in_front():
            return
        with suppress(termios.error):
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)
        self._before = None

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Give the terminal back and stop; what follows is done when the process goes on."""
        self._restore()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        signal.signal(number, self._stop)
        self._set()

    def _go_on(self, number: int, frame: FrameType | None) -> None:
        """Whoever had the terminal meanwhile may have changed its mode."""
        self._set()

    def _is_in_front(self) -> bool:
        """Whether the terminal may be changed: a process in the background would be stopped."""
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:
            return False
