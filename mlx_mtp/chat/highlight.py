"""Code in colours, line by line. Owns: which style a piece of code has.

The lexers are Pygments'.
"""

from __future__ import annotations

from collections.abc import Iterator

CONTEXT_LINES = 60
"""Lines before the present one that a lexer sees, so that a long listing costs the same per line;
a text or comment over more lines than this loses its colour."""


class Highlighter:
    """One listing.

    Args:
        language: as the fence says; one that Pygments does not know stays plain.
    """

    def __init__(self, language: str) -> None:
        from pygments.lexers import get_lexer_by_name
        from pygments.util import ClassNotFound

        self._lines: list[str] = []
        try:
            self._lexer = get_lexer_by_name(language, stripnl=False) if language else None
        except ClassNotFound:
            self._lexer = None

    def line(self, line: str) -> Iterator[tuple[str, str]]:
        """The next line in pieces of text and style."""
        if self._lexer is None:
            yield line, ""
            return
        before = "".join(f"{one}\n" for one in self._lines)
        self._lines = [*self._lines[-(CONTEXT_LINES - 1) :], line]
        at = 0
        for token, text in self._lexer.get_tokens(before + line):
            skipped = max(0, min(len(text), len(before) - at))
            at += len(text)
            if shown := text[skipped:].replace("\n", ""):
                yield shown, _style(token)


def _style(token: object) -> str:
    from pygments.token import Comment, Keyword, Literal, Name, Operator, String

    if token in Comment:
        return "comment"
    if token in String:
        return "string"
    if token in Literal.Number:
        return "number"
    if token in Keyword or token in Operator.Word:
        return "keyword"
    if token in Name.Function or token in Name.Class or token in Name.Tag:
        return "name"
    return ""
