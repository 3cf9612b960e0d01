"""A user at a terminal: runs the program behind a pseudo-terminal and plays with it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType

PROGRAM = str(Path(sys.executable).with_name("mlx-mtp"))
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]|[\r\x08]|\x1b[^a-zA-Z~]*$")
PROMPT = r"› ?$"  # noqa: RUF001
ASK_CURSOR = b"\x1b[6n"
SECONDS = 15.0


class Terminal:
    """One run of `mlx-mtp` at a terminal.

    Attributes:
        raw: all bytes that the program wrote.
    """

    def __init__(
        self, *arguments: str, home: Path, columns: int = 80, cwd: Path | None = None, **extra: str
    ) -> None:
        self._master, slave = os.openpty()
        self.resize(columns)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MLX_MTP_M")}
        own = {
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "MLX_MTP_HOME": str(home),
            "TERM": "xterm",
            "LC_ALL": "C.UTF-8",
            "NO_COLOR": "",
        }
        self._process = subprocess.Popen(
            [PROGRAM, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=kept | own | {"HF_HUB_OFFLINE": "1"} | extra,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.raw = b""
        self._read_to = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)

    def resize(self, columns: int, lines: int = 24) -> None:
        """Change the terminal's size; the program hears of it."""
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._master, text.encode())

    def say(self, text: str) -> None:
        """Wait for the prompt, type a line and press Enter."""
        self.expect(PROMPT)
        self.type(text + "\r")
        time.sleep(0.05)

    def expect(self, pattern: str, seconds: float = SECONDS) -> re.Match[str]:
        """Wait until what came since the last match holds a pattern."""
        limit = time.monotonic() + seconds
        while True:
            text = ESCAPES.sub("", self.raw.decode(errors="ignore"))
            if found := re.compile(pattern).search(text, self._read_to):
                self._read_to = found.end()
                return found
            if time.monotonic() > limit or not self._read(limit):
                raise AssertionError(
                    f"{pattern!r} did not come; this did:\n{text[self._read_to :]}"
                )

    def kill(self, number: int) -> None:
        """Send the program a signal."""
        os.kill(self._process.pid, number)

    def end(self) -> int:
        """Wait for the program to leave; its exit code, or the number of its signal below 0."""
        limit = time.monotonic() + SECONDS
        while time.monotonic() < limit and self._read(limit):
            pass
        return self._process.wait(SECONDS)

    def _read(self, limit: float) -> bool:
        """Take what the program wrote; False: it is gone."""
        wait = max(0.0, min(1.0, limit - time.monotonic()))
        if not select.select([self._master], [], [], wait)[0]:
            return True
        try:
            new = os.read(self._master, 65536)
        except OSError:  # Linux says so when the program is gone
            return False
        self.raw += new
        for _ in range(new.count(ASK_CURSOR)):
            os.write(self._master, b"\x1b[1;1R")
        return bool(new)


def _take_terminal() -> None:
    """In the child: make the terminal its own, so that Ctrl-C reaches it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it
