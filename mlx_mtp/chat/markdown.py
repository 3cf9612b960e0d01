"""Markdown as it streams in. Owns: what can be shown already and in which style, each character
once and in order. Knows no terminal: it gives out pieces of text with the names of their styles.

What is finished is given out at once and never again. Held back is only what the next characters
may still turn into something else: the beginning of a line, an emphasis that has not ended, a line
of code or of a table. What does not become markup is given out as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from rich.cells import cell_len

from mlx_mtp.chat.highlight import Highlighter

MOST_HELD = 160
"""Characters of an emphasis that is waited for at most."""

_MARKERS = "*_`\\"
_SPANS = (
    ("code", re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)")),
    ("bold", re.compile(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1(?![*_])")),
    ("italic", re.compile(r"([*_])(?=[^\s*_])(.+?)(?<=[^\s*_])\1(?![\w*_])")),
)
_FENCE = re.compile(r"(\s*)(`{3,}|~{3,})\s*([^\s`]*)[^`]*$")
_HEADING = re.compile(r"#{1,6}\s+")
_BULLET = re.compile(r"(\s*)[-*+]\s+")
_RULE = re.compile(r"\s*([-*_])(\s*\1){2,}\s*$")
_QUOTE = re.compile(r"\s*>\s?")
_TABLE_RULE = re.compile(r"[\s|:-]+$")
_UNDECIDED = re.compile(r"\s*(#{0,6}\s*|[-*_](\s*[-*_])*\s*|\+\s*|>|`{0,2}|~{0,2})$")


class Piece(NamedTuple):
    """Text in a style.

    Attributes:
        style: "" plain, "bold", "italic", "code", "heading", "mark", or a token type's style.
    """

    text: str
    style: str = ""


class Markdown:
    """One reply."""

    def __init__(self) -> None:
        self._held = ""
        self._at_line_start = True
        self._line_style = ""
        self._last = " "  # the character before what is held
        self._fence = ""
        self._code: Highlighter | None = None
        self._widths: list[int] = []

    def feed(self, text: str) -> list[Piece]:
        """What can be shown now that `text` has come."""
        self._held += text
        return [piece for piece in self._run(is_end=False) if piece.text]

    def finish(self) -> list[Piece]:
        """The rest of the reply."""
        return [piece for piece in self._run(is_end=True) if piece.text]

    def _run(self, is_end: bool) -> Iterator[Piece]:
        while self._held:
            before = len(self._held), self._at_line_start
            yield from self._line_start(is_end) if self._at_line_start else self._inline(is_end)
            if (len(self._held), self._at_line_start) == before:
                return

    # The beginning of a line decides what it is.

    def _line_start(self, is_end: bool) -> Iterator[Piece]:
        line, newline, rest = self._held.partition("\n")
        whole = bool(newline) or is_end
        if self._fence or line.lstrip().startswith(("```", "~~~", "|")):
            if whole:  # such lines are shown whole
                self._held = rest
                yield from (
                    self._code_line(line, newline)
                    if self._is_code(line)
                    else (self._table_row(line, newline))
                )
            return
        if not whole and (_UNDECIDED.match(line) or _RULE.match(line)):
            return
        self._widths = []
        self._at_line_start, self._last = False, " "
        if whole and _RULE.match(line):
            self._held = newline + rest
            yield Piece("─" * 24, "mark")
        elif heading := _HEADING.match(line):
            self._line_style = "heading"
            self._held = self._held[heading.end() :]
        elif bullet := _BULLET.match(line):
            self._held = self._held[bullet.end() :]
            yield Piece(bullet[1] + "• ", "mark")
        elif quote := _QUOTE.match(line):
            self._held = self._held[quote.end() :]
            yield Piece("│ ", "mark")
        elif line[:1] in (" ", "\t"):
            indent = len(line) - len(line.lstrip())
            self._held = self._held[indent:]
            yield Piece(line[:indent])

    def _is_code(self, line: str) -> bool:
        return bool(self._fence) or not line.lstrip().startswith("|")

    def _code_line(self, line: str, newline: str) -> Iterator[Piece]:
        fence = _FENCE.match(line)
        if not self._fence:
            if fence is None:  # not a fence after all, such as ```code``` within a line
                self._held = line + newline + self._held
                self._at_line_start = False
                return
            self._fence = fence[2]
            self._code = Highlighter(fence[3])
            yield Piece(line + newline, "mark")
        elif fence and fence[2].startswith(self._fence) and not fence[3]:
            self._fence, self._code = "", None
            yield Piece(line + newline, "mark")
        else:
            assert self._code is not None
            yield from (Piece(text, style) for text, style in self._code.line(line))
            yield Piece(newline)

    def _table_row(self, line: str, newline: str) -> Iterator[Piece]:
        """A row, its cells as wide as those above; rows above stay as they are."""
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        is_first = not self._widths
        if not is_first and _TABLE_RULE.match(line):
            yield Piece("─┼─".join("─" * width for width in self._widths) + newline, "mark")
            return
        widths = [*self._widths, *[3] * len(cells)]
        self._widths = [max(widths[n], cell_len(cell)) for n, cell in enumerate(cells)]
        for n, (cell, width) in enumerate(zip(cells, self._widths, strict=True)):
            if n:
                yield Piece(" │ ", "mark")
            shown = list(_spans(cell, "bold" if is_first else ""))
            yield from shown
            if n < len(cells) - 1:
                yield Piece(" " * (width - sum(cell_len(piece.text) for piece in shown)))
        yield Piece(newline)

    # Within a line.

    def _inline(self, is_end: bool) -> Iterator[Piece]:
        line, newline, rest = self._held.partition("\n")
        whole, style = bool(newline) or is_end, self._line_style
        if whole:
            self._held = rest
            yield from _spans(line, style, self._last)
            yield Piece(newline)
            self._at_line_start, self._line_style = True, ""
            return
        done = _settled(line, self._last)
        shown, self._held = line[:done], line[done:]
        if shown:
            yield from _spans(shown, style, self._last)
            self._last = shown[-1]


def _settled(line: str, last: str) -> int:
    """How much of the beginning of a line no further character can change."""
    at = 0
    while at < len(line):
        start = next((n for n in range(at, len(line)) if line[n] in _MARKERS), len(line))
        if start == len(line):
            return start
        before = line[start - 1] if start else last
        if len(line) - start > MOST_HELD or not _may_open(line[start], before):
            at = start + 1
            continue
        span = _match(line, start, before)
        if span is None or span[1].end() == len(line):
            return start
        at = span[1].end()
    return at


def _may_open(marker: str, before: str) -> bool:
    return marker in "`\\" or not (before.isalnum() or before == marker)


def _match(line: str, start: int, before: str) -> tuple[str, re.Match[str]] | None:
    if not _may_open(line[start], before):
        return None
    for style, pattern in _SPANS:
        if found := pattern.match(line, start):
            return style, found
    return None


def _spans(text: str, style: str, before: str = " ") -> Iterator[Piece]:
    """Text that is whole, with its emphasis; what is none stays as it is."""
    plain, at = "", 0
    while at < len(text):
        last = text[at - 1] if at else before
        if text[at] == "\\" and text[at + 1 : at + 2] in set("*_`\\#"):
            plain, at = plain + text[at + 1 : at + 2], at + 2
            continue
        span = _match(text, at, last) if text[at] in _MARKERS else None
        if span is None:
            plain, at = plain + text[at], at + 1
            continue
        yield Piece(plain, style)
        plain, at = "", span[1].end()
        inner = span[1][2]
        if span[0] == "code":
            yield Piece(inner, "code")
        else:
            yield from _spans(inner, style or span[0])
    yield Piece(plain, style)
