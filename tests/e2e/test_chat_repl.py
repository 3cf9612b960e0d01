"""The loop of a conversation: replies that do not come to their end, and what is no command."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlx_mtp import LLM, load
from mlx_mtp.chat.input import Reader
from mlx_mtp.chat.render import Screen
from mlx_mtp.chat.repl import Repl
from mlx_mtp.chat.session import ChatSession
from mlx_mtp.chat.settings import Settings
from mlx_mtp.chat.store import Store
from mlx_mtp.errors import UsageError

GREEDY = Settings().with_value("temperature", "0").with_value("max_tokens", "40")
ALT_ENTER, CTRL_C, CTRL_D = "\x1b\r", "\x03", "\x04"
COUNT = "Count from 1 to 40."
LONG = "Spell banana. " * 50


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load("pocket")


@pytest.fixture
def chat(llm: LLM, tmp_path: Path) -> ChatSession:
    return ChatSession(llm, Store(tmp_path), GREEDY)


class Shown(io.StringIO):
    """What is on the screen. Ctrl-C is pressed when a text comes.

    Attributes:
        presses: how often, for each text.
    """

    def __init__(self, presses: dict[str, int]) -> None:
        super().__init__()
        self.presses = presses

    def write(self, text: str) -> int:
        written = super().write(text)
        for awaited in [one for one in self.presses if one in self.getvalue()]:
            for _ in range(self.presses.pop(awaited)):
                signal.raise_signal(signal.SIGINT)
        return written


def talk(
    chat: ChatSession,
    *entries: str,
    presses: dict[str, int] | None = None,
    history: Path | None = None,
) -> str:
    """Type entries and leave; what was shown."""
    shown = Shown(presses or {})
    with create_pipe_input() as keys:
        keys.send_text("".join(f"{entry}\r" for entry in entries) + CTRL_D)
        reader = Reader(history, keys, DummyOutput())
        assert Repl(chat, Screen(shown), reader).run() == 0
    return shown.getvalue()


def press_in(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Ctrl-C pressed in the next call of a method."""
    method = getattr(owner, name)

    def pressed(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, pressed)


def refuse(*arguments: Any, **options: Any) -> str:
    raise UsageError("The template refuses.")


def test_a_stopped_reply_says_what_was_kept(chat: ChatSession) -> None:
    said = talk(chat, COUNT, presses={", 5": 1})
    assert f"[stopped: kept {len(chat.messages[1]['token_ids'])} tok, type to continue" in said
    assert chat.stats.drafted > 0  # its figures are whole


def test_a_reply_that_is_ended_at_once_says_what_was_kept(chat: ChatSession) -> None:
    said = talk(chat, COUNT, "Go on.", presses={", 5": 2})
    kept = len(chat.messages[1]["token_ids"])
    assert f"[stopped: kept {kept} tok" in said
    assert kept > 0
    assert chat.turns == 2


@pytest.mark.parametrize("where", ["tokenizer", "target"])
def test_a_reply_that_was_stopped_before_it_began(
    chat: ChatSession, llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    name = "render_chat" if where == "tokenizer" else "forward"
    press_in(getattr(llm, where), name, monkeypatch)
    said = talk(chat, LONG)  # more than one chunk to prefill
    assert "[stopped before the reply began: /regen makes it, /undo takes" in said
    assert [message["role"] for message in chat.messages] == ["user"]


@pytest.mark.parametrize("where", ["tokenizer", "target"])
def test_a_reply_stays_until_another_takes_its_place(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    store = Store(tmp_path)
    list(ChatSession(llm, store, GREEDY).ask(LONG))
    chat = ChatSession(llm, store, GREEDY, store.latest())
    first = dict(chat.messages[1])
    name = "render_chat" if where == "tokenizer" else "forward"
    press_in(getattr(llm, where), name, monkeypatch)
    said = talk(chat, "/regen")
    assert where == "tokenizer" or "[stopped: the reply before stays]" in said
    assert chat.messages[1] == store.latest().messages[1] == first
    monkeypatch.setattr(llm.tokenizer, "render_chat", refuse)
    assert "error: The template refuses." in talk(chat, "/regen")
    assert chat.messages[1] == store.latest().messages[1] == first


def test_a_greedy_reply_that_is_made_again_is_said_once_to_be_the_same(chat: ChatSession) -> None:
    note = "At temperature 0 the reply is always the same; /set temperature"
    assert note not in talk(chat, COUNT, COUNT, "/set max_tokens 20", "/regen")
    assert talk(chat, "/regen", "/regen").count(note) == 1


def test_a_summary_that_is_stopped_or_cut_off_stands_for_nothing(
    chat: ChatSession, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(chat, "Hello. " * 60, "Spell banana.")
    before, used = list(chat.messages), chat.used
    press_in(llm.target, "forward", monkeypatch)
    said = talk(chat, "/compact")
    assert "[stopped: nothing was summarised, and the conversation stays as it is]" in said
    context = chat._row.turn.prompt_tokens + 20
    monkeypatch.setattr(LLM, "context", property(lambda self: context))
    said = talk(chat, "/set ignore_eos on", "/compact")
    assert "[cut off: the context is full; nothing was summarised]" in said
    assert chat.messages == before
    assert chat.used == used


def test_a_summary_makes_room(chat: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    chat.settings = GREEDY.with_value("max_tokens", "12")
    monkeypatch.setattr(LLM, "context", property(lambda self: 385))
    said = talk(chat, "Thank you. " * 60, "Spell banana.", "Spell keyboard.", "Hi.", "/compact")
    assert said.count("the context is nearly full") == 1  # not again with each reply
    assert "error: There is no room for a summary" in said
    assert chat.is_nearly_full
    monkeypatch.setattr(LLM, "context", property(lambda self: 460))
    said = talk(chat, "/compact")
    assert not chat.is_nearly_full
    assert re.search(r"context \d\d/460", said)


def test_a_path_or_a_comment_is_a_message(chat: ChatSession) -> None:
    chat.settings = GREEDY.with_value("max_tokens", "1")
    said = talk(chat, "/usr/bin/ls: what is it?", "/* a comment */", "// another")
    assert "error" not in said
    assert chat.turns == 3
    said = talk(chat, "/tmp is full")
    assert 'There is no command /tmp.\n  /help lists them. Between two """ it is' in said
    talk(chat, '"""/tmp is full"""')
    assert chat.messages[-2]["content"] == "/tmp is full"
    talk(chat, "/system Be brief." + ALT_ENTER + "Be kind.")
    assert chat.system == "Be brief.\nBe kind."


def test_code_that_begins_with_a_docstring_is_sent_as_it_is(chat: ChatSession) -> None:
    chat.settings = GREEDY.with_value("max_tokens", "1")
    code = '"""Adds."""\ndef add(a, b):\n    """Add."""\n    return a + b'
    talk(chat, f"\x1b[200~{code}\x1b[201~")
    assert chat.messages[0]["content"] == code


def test_colour_codes_that_are_typed_are_left_out(chat: ChatSession) -> None:
    chat.settings = GREEDY.with_value("max_tokens", "1")
    talk(chat, "a\x1b[31mb\x1b[0;1mc")
    assert chat.messages[0]["content"].startswith("abc")


def test_what_the_editor_wrote_can_be_brought_back(
    chat: ChatSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.settings = GREEDY.with_value("max_tokens", "1")
    monkeypatch.delenv("VISUAL", raising=False)
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'Spell banana.' > \"$1\"\n")
    editor.chmod(0o700)
    monkeypatch.setenv("EDITOR", str(editor))
    talk(chat, "/edit", history=tmp_path / "history")
    assert chat.messages[0]["content"] == "Spell banana."
    assert "+Spell banana." in (tmp_path / "history").read_text().splitlines()
    monkeypatch.setenv("EDITOR", "true")
    assert "nothing was sent" in talk(chat, "/edit")
    assert chat.turns == 1


def test_ctrl_c_clears_a_line_and_twice_leaves(chat: ChatSession) -> None:
    shown = Shown({})
    with create_pipe_input() as keys:
        keys.send_text(f"not sent{CTRL_C}{CTRL_C}{CTRL_C}")
        repl = Repl(chat, Screen(shown), Reader(None, keys, DummyOutput()))
        assert repl.run() == 130
    assert "Ctrl-C again leaves" in shown.getvalue()
    assert chat.turns == 0
