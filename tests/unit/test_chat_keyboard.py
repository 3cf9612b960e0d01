"""What is typed while a reply is made is not shown, not lost and, after Ctrl-C, not sent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from mlx_mtp.chat.keyboard import as_one_message, hold, quiet

SHELL = """
import fcntl, os, signal, subprocess, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)

def wait_for_echo(wanted):
    limit = time.monotonic() + 10
    while bool(termios.tcgetattr(0)[3] & termios.ECHO) != wanted:
        assert time.monotonic() < limit, wanted
        time.sleep(0.01)

job = subprocess.Popen([sys.executable, "-c", sys.argv[1]], process_group=0)
os.tcsetpgrp(0, job.pid)
wait_for_echo(False)
before = termios.tcgetattr(0)
assert before[3] & termios.ISIG and before[3] & termios.NOFLSH
os.kill(job.pid, signal.SIGTSTP)
assert os.WIFSTOPPED(os.waitpid(job.pid, os.WUNTRACED)[1])
wait_for_echo(True)
os.kill(job.pid, signal.SIGCONT)
wait_for_echo(False)
os.kill(job.pid, signal.SIGSTOP)
assert os.WIFSTOPPED(os.waitpid(job.pid, os.WUNTRACED)[1])
sane = termios.tcgetattr(0)
sane[3] |= termios.ECHO
termios.tcsetattr(0, termios.TCSANOW, sane)
os.kill(job.pid, signal.SIGCONT)
wait_for_echo(False)
os.kill(job.pid, signal.SIGTERM)
assert os.waitpid(job.pid, 0)[1] == 3 << 8
wait_for_echo(True)
print("well")
"""
"""Of a terminal: runs one job in front, stops it, lets it go on and ends it."""
JOB = """
import signal, sys, time
from prompt_toolkit.input import create_input
from mlx_mtp.chat.keyboard import quiet
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with quiet(create_input()):
    for _ in range(1000):
        time.sleep(0.02)
"""


def pressed(text: str) -> list[KeyPress]:
    named = {"\r": Keys.ControlM, "\n": Keys.ControlJ, "\x1b": Keys.Escape, "\x04": Keys.ControlD}
    return [KeyPress(named.get(key, key), key) for key in text]


@pytest.mark.parametrize(
    ("typed", "held"),
    [
        ("", ""),
        ("a\r", "a"),
        ("a\n\r", "a"),
        ("a\rb\n", "a\x1b\rb"),
        ("a\x1b\rb", "a\x1b\rb"),
        ("a\x1b\r", "a"),
        ("a\r\x04", "a"),
    ],
)
def test_held_lines_are_one_message(typed: str, held: str) -> None:
    assert as_one_message(pressed(typed)) == pressed(held)


def test_only_a_terminal_is_kept_quiet() -> None:
    before = signal.getsignal(signal.SIGTSTP)
    with create_pipe_input() as keys, quiet(keys):
        keys.send_text("a\r")
        hold(keys)
        assert signal.getsignal(signal.SIGTSTP) is before
        assert [press.data for press in keys.read_keys()] == ["a", "\r"]


def test_who_stops_or_ends_it_has_the_terminal_as_it_was() -> None:
    master, terminal = os.openpty()
    try:
        shell = subprocess.run(
            [sys.executable, "-c", SHELL, JOB],
            stdin=terminal,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=60,
        )
    finally:
        os.close(terminal)
        os.close(master)
    assert shell.stdout == "well\n", shell.stderr
