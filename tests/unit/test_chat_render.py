"""Replies are shown as they come: each character once, nothing twice, nothing that is not text."""

from __future__ import annotations

import io
import random
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_mtp.chat.markdown import Markdown, Piece
from mlx_mtp.chat.render import ReplyView, Screen

SECTION = """## Sorting in Python

Use **`sorted`** for a *new* list, and `list.sort` to sort in place; both take a `key`.
They are stable: what compares equal keeps its order, 2 * 3 times or more.

- The **first** argument is any iterable.
- `reverse=True` turns the order around.

```python
def longest(words: list[str], n: int = 3) -> list[str]:
    \"\"\"The n longest words.\"\"\"
    # stable, so ties keep their order
    return sorted(words, key=len, reverse=True)[:n]
```

| call | returns | in place |
|------|---------|----------|
| `sorted(x)` | a list | no |
| `x.sort()` | None | **yes** |

> Sorting takes *n log n* comparisons.

"""


def pieces(text: str, sizes: list[int]) -> list[Piece]:
    markdown, found, at = Markdown(), list[Piece](), 0
    for size in sizes or [len(text)]:
        found += markdown.feed(text[at : at + size])
        at += size
    return [*found, *markdown.feed(text[at:]), *markdown.finish()]


def marked(found: list[Piece]) -> list[tuple[str, str]]:
    """Letters with their styles."""
    return [(letter, piece.style) for piece in found for letter in piece.text]


def shown(text: str, styled: bool = True, size: int = 4) -> str:
    """What a terminal is sent for a reply that comes in pieces."""
    stream = io.StringIO()
    view = ReplyView(Screen(stream, styled), show_thinking=True)
    for at in range(0, len(text), size):
        view.feed(text[at : at + size], "")
    view.finish()
    return stream.getvalue()


def test_bytes_written_are_at_most_three_times_the_text() -> None:
    text = SECTION * 12  # 2,000 tokens and more
    assert len(text.split()) > 1000
    written = shown(text)
    assert len(written.encode()) < 2 * len(text.encode())
    assert "\x1b[A" not in written
    assert "\r" not in written
    assert not re.search(r"\x1b\[[0-9;]*[^0-9;m]", written)  # colours only: nothing moves


def test_each_line_of_code_is_shown_once() -> None:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown(SECTION))
    assert plain.count("return sorted(words, key=len, reverse=True)[:n]") == 1
    assert plain.count("The n longest words.") == 1


def test_markup() -> None:
    found = pieces("# Title\nA **bold** `code` *it* and 2 * 3.\n- one\n***\n> q", [])
    assert Piece("Title", "heading") in found
    assert {Piece("bold", "bold"), Piece("code", "code"), Piece("it", "italic")} <= set(found)
    assert "".join(piece.text for piece in found) == (
        "Title\nA bold code it and 2 * 3.\n• one\n────────────────────────\n│ q"
    )


@pytest.mark.parametrize(
    "text",
    [
        "snake_case_name and __dunder",
        "2 * 3 * 4",
        "a**b and c**d",
        "**never closed",
        "`open",
        "10% #5 a|b",
        "x -- y",
        "*",
        "f(*args, **options",
        "1) one",
        "+1",
    ],
)
def test_what_is_no_markup_stays_as_it_is(text: str) -> None:
    assert "".join(piece.text for piece in pieces(text, [])) == text


def test_columns_are_as_wide_as_the_terminal_shows_them() -> None:
    table = "| a | b |\n|---|---|\n| 漢字 | x |\n| 🙂 | x |\n| abcd | x |\n"
    rows = "".join(piece.text for piece in pieces(table, [])).splitlines()
    assert rows[2:] == ["漢字 │ x", "🙂   │ x", "abcd │ x"]


def test_a_plain_paragraph_is_not_held_back() -> None:
    markdown, told = Markdown(), ""
    for letter in "It is a long text without an end of line":
        told += "".join(piece.text for piece in markdown.feed(letter))
    assert told == "It is a long text without an end of line"
    assert markdown.feed(" **" + "x" * 300) != []  # an emphasis is waited for only so long


@given(st.integers(0, 2**32 - 1))
@example(2295)  # a heading with two blanks
def test_how_a_text_is_cut_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices([*"*_`~#->|\\ \nab", "```\n", "**", "| a | b |\n", "- "], k=40))
    sizes = [rng.randrange(1, 6) for _ in range(len(text))]
    assert marked(pieces(text, sizes)) == marked(pieces(text, [1] * len(text)))


def test_without_colours_a_reply_is_written_as_it_came() -> None:
    assert shown(SECTION, styled=False) == SECTION


def test_the_environment_decides_about_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Screen(Terminal()).styled
    assert not Screen(io.StringIO()).styled
    monkeypatch.setenv("TERM", "dumb")
    assert not Screen(Terminal()).styled
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Screen(Terminal()).styled


def test_control_characters_never_reach_the_terminal() -> None:
    assert "\x1b]0;" not in shown("a\x1b]0;title\x07b\x9b2Jc")
    assert "a]0;titleb2Jc" in shown("a\x1b]0;title\x07b\x9b2Jc", styled=False)


def test_a_tool_call_is_shown_as_one() -> None:
    call = 'I look.\n<|tool_call>call:weather{city:<|"|>Ulm<|"|>}<tool_call|>'
    for size in (1, 5, 100):
        text = shown(call, styled=False, size=size)
        assert text == 'I look.\ntool call: weather{city:"Ulm"}\n'
    assert "tool_call" in shown("<|tool_call>call:broken", styled=False)  # nothing is swallowed


def test_thinking_is_dimmed_or_only_mentioned() -> None:
    for show, expected in ((True, "hm, hm\nAnswer\n"), (False, "thinking ...\nAnswer\n")):
        stream = io.StringIO()
        view = ReplyView(Screen(stream, styled=False), show_thinking=show)
        view.feed("", "hm, ")
        view.feed("", "hm")
        view.feed("\nAnswer", "")
        view.finish()
        assert stream.getvalue() == expected
