"""Ctrl-C does what it is told to and tears nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from mlx_mtp.chat.interrupts import Interrupts


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as entered:
        yield entered
    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_happens_where_nobody_waits_for_it(interrupts: Interrupts) -> None:
    press()
    with interrupts.calling(lambda: None):
        pass
    press()


def test_it_calls_what_it_is_told_to(interrupts: Interrupts) -> None:
    calls: list[int] = []
    with interrupts.calling(lambda: calls.append(1)):
        press()
        press()
    assert calls == [1, 1]


def test_one_is_raised_and_the_next_does_not_tear_what_tidies_up(interrupts: Interrupts) -> None:
    done = []
    try:
        with interrupts.raising():
            try:
                press()
                done.append("went on")
            finally:
                press()
                done.append("tidied up")
    except KeyboardInterrupt:
        done.append("ended")
    press()
    assert done == ["tidied up", "ended"]


def test_a_reply_is_asked_to_stop_and_then_ended(interrupts: Interrupts) -> None:
    done = []
    try:
        with interrupts.stopping(lambda: done.append("stop")) as stopping:
            stopping.repeat()
            press()
            stopping.repeat()  # what began since then is asked, too
            press()
            done.append("went on")
    except KeyboardInterrupt:
        done.append("ended")
    assert done == ["stop", "stop", "ended"]


def test_a_process_that_ignores_it_goes_on_to() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.raising():
            press()
    finally:
        signal.signal(signal.SIGINT, before)
