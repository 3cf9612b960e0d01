"""What a command says besides its answer. Owns: stderr, and how loud it is.

Answers go to stdout and nothing else does; notes, warnings, statistics and errors go to stderr,
in plain text where that is no terminal or NO_COLOR is set. Whatever a message quotes, nothing in it
can work the terminal, and no token of the hub is shown.
"""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mlx_mtp.plain import printable, printable_lines, without_tokens

if TYPE_CHECKING:
    from rich.console import Console as RichConsole


@dataclass
class Console:
    """Verbosity of one run, set by its flags.

    Attributes:
        verbose: show the package's own log.
        quiet: show errors only.
        debug: show everything logged, and the traceback of an error.
        arguments: the command line, without the program's name.
    """

    verbose: bool = False
    quiet: bool = False
    debug: bool = False
    arguments: tuple[str, ...] = ()

    def note(self, text: str) -> None:
        """One line that matters little."""
        if not self.quiet:
            self._say(text, style="dim")

    def warn(self, text: str) -> None:
        """One line that the user should act on or know."""
        if not self.quiet:
            self._say(f"warning: {text}", style="yellow")

    def error(self, message: str, hint: str = "") -> None:
        """What went wrong and what to do about it. With --debug, the traceback first."""
        if self.debug and sys.exc_info()[0] is not None:
            with suppress(OSError):
                sys.stderr.write(printable_lines(without_tokens(traceback.format_exc())))
        self._say(f"error: {message}", style="red")
        if hint:
            self._say(f"  {hint}")

    @property
    def terminal(self) -> RichConsole | None:
        """Where moving things may be shown; None where stderr is no terminal or all is quiet."""
        return self._stderr if self._stderr.is_terminal and not self.quiet else None

    def start_logging(self) -> None:
        """Send the package's log to stderr as loud as the flags say."""
        log = logging.getLogger("mlx_mtp")
        level = logging.ERROR if self.quiet else logging.WARNING
        level = logging.DEBUG if self.debug else logging.INFO if self.verbose else level
        log.setLevel(level)
        if not log.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(_Plain("%(levelname)s: %(message)s"))
            log.addHandler(handler)

    def _say(self, text: str, style: str | None = None) -> None:
        with suppress(OSError):  # an answer is worth more than what is said about it
            self._stderr.print(printable(without_tokens(text)), style=style)

    @cached_property
    def _stderr(self) -> RichConsole:
        from rich.console import Console as RichConsole

        return RichConsole(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


class _Plain(logging.Formatter):
    """Log lines that look like the console's own."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(without_tokens(super().format(record)))

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return printable(super().formatMessage(record))
