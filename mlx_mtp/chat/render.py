"""What a conversation looks like. Owns: all that is written to the terminal while one is held.

Output is only ever appended: no line is drawn twice and the cursor never goes back, so what was
read stays where it is, lines wrap as the terminal wraps them, and a change of its width does no
harm. Where stdout is no terminal, TERM is dumb or NO_COLOR is set, replies are written as they
come.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from shutil import get_terminal_size
from textwrap import fill
from typing import TextIO

from mlx_mtp.chat.markdown import Markdown, Piece
from mlx_mtp.plain import without_controls

TOOL_CALL = re.compile(r"<\|tool_call>(?:call:)?(.*?)<tool_call\|>", re.DOTALL)
PROMPT = "› "  # noqa: RUF001
_TOOL_START, _TOOL_END = "<|tool_call>", "<tool_call|>"
_CODES = {
    "": "",
    "bold": "1",
    "italic": "3",
    "code": "36",
    "heading": "1;34",
    "mark": "2",
    "dim": "2",
    "warn": "33",
    "error": "31",
    "comment": "2",
    "string": "32",
    "number": "36",
    "keyword": "35",
    "name": "34",
}


def is_styled(stream: TextIO) -> bool:
    """Whether a stream is a terminal that may be given colours."""
    environment = os.environ
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


class Screen:
    """The terminal of a conversation.

    Args:
        stream: where everything goes.
        styled: None: as the stream and the environment allow.
    """

    def __init__(self, stream: TextIO, styled: bool | None = None) -> None:
        self._stream = stream
        self.styled = is_styled(stream) if styled is None else styled
        self._style = ""
        self._is_fresh_line = True

    def line(self, text: str = "", style: str = "") -> None:
        """A line of its own."""
        self.end_line()
        self.write([Piece(text, style)])
        self.end_line(even_empty=True)

    def note(self, text: str) -> None:
        """Something that matters little."""
        self.say(f"  {text}", "dim")

    def warn(self, text: str) -> None:
        """Something to know or to act on."""
        self.say(f"warning: {text}", "warn")

    def error(self, message: str, hint: str = "") -> None:
        """What went wrong and what to do about it."""
        self.say(f"error: {message}", "error")
        if hint:
            self.say(f"  {hint}")

    def say(self, text: str, style: str = "") -> None:
        """A line of the program's own, broken between words as wide as the terminal is now."""
        width = get_terminal_size().columns if self._stream.isatty() else sys.maxsize
        if len(text) >= width:
            text = fill(text, width - 1, subsequent_indent="  ", break_on_hyphens=False)
        self.line(text, style)

    def end_line(self, even_empty: bool = False) -> None:
        """Go to the beginning of a line, if it is not there."""
        if even_empty or not self._is_fresh_line:
            self._put(self._restyled("") + "\n")
            self._is_fresh_line = True

    def write(self, pieces: Iterable[Piece]) -> None:
        """Append text in styles; control characters are left out."""
        out = ""
        for text, style in pieces:
            shown = without_controls(text)
            if shown:
                # Line breaks and blanks look alike in most styles: no codes for them alone.
                out += shown if shown.isspace() else self._restyled(style) + shown
                self._is_fresh_line = shown.endswith("\n")
        self._put(out)

    def flush_style(self) -> None:
        """Back to plain text."""
        self._put(self._restyled(""))

    def _restyled(self, style: str) -> str:
        if not self.styled or style == self._style:
            return ""
        code, was, self._style = _CODES[style], self._style, style
        return f"\x1b[{'0;' if was and code else ''}{code}m"

    def _put(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()


class ReplyView:
    """One reply as it streams in.

    Args:
        screen: where it goes.
        show_thinking: False says only that there is some.
    """

    def __init__(self, screen: Screen, show_thinking: bool) -> None:
        self._screen = screen
        self._show_thinking = show_thinking
        self._markdown = Markdown() if screen.styled else None
        self._thinks = self._has_text = False
        self._held = ""

    def feed(self, text: str, thinking: str) -> None:
        """What the reply grew by."""
        if thinking:
            self._think(thinking)
        if text and self._thinks:
            self._screen.end_line()
            self._thinks = False
        if not self._has_text:
            text = text.lstrip("\n")
        self._has_text = self._has_text or bool(text)
        self._text(text)

    def finish(self) -> None:
        """The reply is over."""
        self._show(self._held, is_end=True)
        self._held = ""
        self._screen.end_line()
        self._screen.flush_style()

    def _think(self, thinking: str) -> None:
        if self._show_thinking:
            self._screen.write([Piece(thinking, "dim")])
        elif not self._thinks:
            self._screen.write([Piece("thinking ...", "dim")])
        self._thinks = True

    def _text(self, text: str) -> None:
        """Text with tool calls told apart; the beginning of one is held back."""
        self._held += text
        while True:
            start = self._held.find(_TOOL_START)
            if start < 0:
                keep = _begun(self._held, _TOOL_START)
                self._show(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                return
            end = self._held.find(_TOOL_END, start)
            if end < 0:
                self._show(self._held[:start])
                self._held = self._held[start:]
                return
            self._show(self._held[:start], is_end=True)
            call = TOOL_CALL.match(self._held[start : end + len(_TOOL_END)])
            self._held = self._held[end + len(_TOOL_END) :]
            self._screen.line(f"tool call: {tool_text(call[1] if call else '')}", "code")

    def _show(self, text: str, is_end: bool = False) -> None:
        if self._markdown is None:
            self._screen.write([Piece(text)])
            return
        self._screen.write(self._markdown.feed(text))
        if is_end:
            self._screen.write(self._markdown.finish())
            self._markdown = Markdown()


def tool_text(call: str) -> str:
    """A call as people write it: name{key: value}."""
    return call.replace('<|"|>', '"').strip()


def _begun(text: str, word: str) -> int:
    """Length of the longest end of a text that is a beginning of a word."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if word.startswith(text[-n:])), 0)
