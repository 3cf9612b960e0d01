"""A conversation without its terminal: what is kept, taken back and left out."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_mtp import LLM, load
from mlx_mtp.chat.commands import Commands
from mlx_mtp.chat.render import Screen
from mlx_mtp.chat.session import SUMMARISED, ChatSession
from mlx_mtp.chat.settings import Settings
from mlx_mtp.chat.store import Saved, Store
from mlx_mtp.errors import MlxMtpError, UsageError
from mlx_mtp.types import Chunk, Message

GREEDY = Settings().with_value("temperature", "0").with_value("max_tokens", "12")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load("pocket")


@pytest.fixture
def chat(llm: LLM, tmp_path: Path) -> ChatSession:
    return ChatSession(llm, Store(tmp_path), GREEDY)


def text(chunks: Iterator[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def run(chat: ChatSession, line: str) -> str:
    """What a command says."""
    stream = io.StringIO()
    outcome = Commands(chat, Screen(stream)).run(line)
    assert outcome is None
    return stream.getvalue()


def test_a_regenerated_reply_has_a_new_seed_unless_it_is_greedy(chat: ChatSession) -> None:
    first = text(chat.ask("Spell banana."))
    assert text(chat.regenerate()) == first
    assert chat.turns == 1
    chat.settings = Settings().with_value("seed", "5").with_value("max_tokens", "3")
    text(chat.regenerate())
    assert chat.messages[1]["seed"] != 5
    assert chat.prefilled == 1
    text(chat.ask("Again."))
    assert chat.messages[3]["seed"] == 5


def test_a_reply_that_is_left_is_kept_as_far_as_it_came(chat: ChatSession) -> None:
    chunks = chat.ask("Count from 1 to 40.")
    seen = "".join(next(chunks).text for _ in range(5))
    chunks.close()  # type: ignore[attr-defined]
    assert chat.messages[1]["content"] == seen
    assert chat.messages[1]["finish_reason"] == "cancelled"
    assert Store(chat.store.folder.parent).latest() == chat.saved if chat.store else False
    text(chat.ask("continue"))
    assert chat.turns == 2


def test_a_message_whose_reply_never_began_goes_with_the_next(chat: ChatSession) -> None:
    chat.ask("Count from 1 to 40.")
    assert [message["role"] for message in chat.messages] == ["user"]
    text(chat.ask("Please."))
    assert chat.messages[0]["content"] == "Count from 1 to 40.\n\nPlease."
    assert len(chat.messages) == 2


def test_undo_clear_and_system(chat: ChatSession) -> None:
    chat.system = "Be brief."
    text(chat.ask("Spell banana."))
    text(chat.ask("Go on."))
    assert chat.undo() == "Go on."
    assert chat.turns == 1
    name = chat.saved.id
    assert "none" in run(chat, "/system none")
    assert chat.system is None
    run(chat, "/clear")
    assert chat.messages == []
    with pytest.raises(UsageError, match="no turn to take back"):
        chat.undo()
    with pytest.raises(UsageError, match="nothing to reply to"):
        chat.regenerate()
    assert "Spell banana." in run(chat, f"/load {name}")
    assert chat.turns == 1
    assert chat.saved.id == name


def test_a_full_context_is_said_and_nothing_is_cut(
    chat: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "context", property(lambda self: 512))
    text(chat.ask("Spell banana."))
    before = list(chat.messages)
    with pytest.raises(UsageError, match="the context holds 512") as caught:
        chat.ask("Spell banana. " * 150)
    assert "/compact" in caught.value.hint
    assert "/drop" in caught.value.hint
    assert chat.messages == before
    text(chat.ask("Spell banana. " * 73))
    assert chat.is_nearly_full
    old = chat.saved.id
    assert "left out the oldest 1 turn; 1 turn left" in run(chat, "/drop 1")
    assert chat.turns == 1
    assert chat.saved.id != old
    assert chat.store is not None
    assert len(chat.store.load(old).messages) == 4
    with pytest.raises(UsageError, match="no older turn"):
        chat.drop(1)
    with pytest.raises(UsageError, match="needs a number of turns"):
        run(chat, "/drop all")


def test_a_summary_stands_for_what_was_said(chat: ChatSession) -> None:
    chat.system = "Be brief."
    text(chat.ask("Spell banana."))
    old = chat.saved.id
    outcome = Commands(chat, Screen(io.StringIO())).run("/compact")
    assert isinstance(outcome, Iterator)
    next(outcome)
    chat.stop()
    text(outcome)
    assert chat.saved.id == old  # a summary that was stopped stands for nothing
    outcome = Commands(chat, Screen(io.StringIO())).run("/compact")
    assert isinstance(outcome, Iterator)
    summary = text(outcome)
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[1]["content"] == SUMMARISED + summary.strip()
    assert chat.saved.id != old
    text(chat.ask("Go on."))
    assert chat.turns == 2


def test_commands_say_what_they_did(chat: ChatSession, tmp_path: Path) -> None:
    assert "no reply yet" in run(chat, "/stats")
    assert "nothing to save" in run(chat, "/save")
    chat.settings = chat.settings.with_value("draft_depth", "4")
    text(chat.ask("Spell banana."))
    assert "12 tok" in run(chat, "/stats")
    assert "draft 1" in run(chat, "/stats")
    model = run(chat, "/model")
    assert "pocket: e-series, 8 layers, bfloat16" in model
    assert "pocket/assistant: 4 layers" in model
    assert "weights 6 MB of " in model
    assert f"saved as {chat.saved.id}" in run(chat, "/save")
    run(chat, f"/save {tmp_path}/talk.md")
    assert (tmp_path / "talk.md").read_text().startswith("## You\n\nSpell banana.")
    shown = run(chat, "/set")
    assert "temperature     0.0\n" in shown
    assert "top_k           64 (the model's own)\n" in shown
    assert "seed            drawn for each reply\n" in shown
    assert "thinking: show" in run(chat, "/think")
    assert chat.settings.thinks
    assert "a whole number from 0; 0 keeps all tokens" in run(chat, "/help set")
    assert Commands(chat, Screen(io.StringIO())).run("/bye") == "leave"


def test_files_go_with_the_next_message(chat: ChatSession, tmp_path: Path) -> None:
    (tmp_path / "code.md").write_text("```\nx\n```\n")
    (tmp_path / "cat.png").write_bytes(b"\x89PNG")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "zeros").write_bytes(b"\0\0")
    (tmp_path / "huge").write_bytes(b"a" * 5_000_000)
    (tmp_path / "long").write_text("word " * 20_000)
    os.mkfifo(tmp_path / "pipe")
    assert "tokens go with your next message" in run(chat, f"/file {tmp_path}/code.md")
    text(chat.ask("What is it?"))
    fence = "`" * 4
    expected = f"File code.md:\n{fence}\n```\nx\n```\n{fence}\n\nWhat is it?"
    assert chat.messages[0]["content"] == expected
    for name, message in (
        ("cat.png", "is an image, and only text"),
        ("latin.txt", "is not UTF-8"),
        ("none.txt", "cannot be read: No such file"),
        ("", "is a folder"),
        ("pipe", "is not a regular file"),
        ("zeros", "is not text"),
        ("huge", "5,000,000 bytes; the most is 4,000,000"),
        ("long", "has 19k tokens, and the context holds 4.0k"),
    ):
        with pytest.raises(UsageError, match=message):
            run(chat, f"/file {tmp_path}/{name}")
    assert chat.attached == []
    (tmp_path / "my notes.txt").write_bytes(b"\xef\xbb\xbftwo\r\nlines\r\n")
    for typed in (f"'{tmp_path}/my notes.txt'", f"{tmp_path}/my\\ notes.txt"):
        run(chat, f"/file {typed}")
        assert chat.attached.pop() == "File my notes.txt:\n```\ntwo\nlines\n```\n\n"
    run(chat, f"/file {tmp_path}/code.md")
    assert "no file goes with" in run(chat, "/file none")
    assert chat.attached == []


@pytest.mark.parametrize("command", ["/file", "/load", "/save"])
@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a" * 300, "a\0b", "/nowhere/x"])
def test_a_path_that_can_be_none_is_an_error_in_a_sentence(
    chat: ChatSession, command: str, path: str
) -> None:
    with pytest.raises(MlxMtpError) as caught:
        run(chat, f"{command} {path}")
    assert caught.value.hint


def test_a_copy_takes_the_place_of_nothing_but_itself(chat: ChatSession, tmp_path: Path) -> None:
    text(chat.ask("Spell banana."))
    (tmp_path / "notes.md").write_text("mine")
    for name in ("notes.md", ""):
        with pytest.raises(UsageError, match="is there already"):
            run(chat, f"/save {tmp_path}/{name}")
    assert (tmp_path / "notes.md").read_text() == "mine"
    commands = Commands(chat, Screen(io.StringIO()))
    commands.run(f"/save {tmp_path}/talk.md")
    text(chat.ask("Go on."))
    commands.run(f"/save {tmp_path}/talk.md")
    assert "Go on." in (tmp_path / "talk.md").read_text()


def test_what_is_kept_about_a_reply_does_not_reach_the_template(
    chat: ChatSession, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: set[str] = set()
    render = llm.tokenizer.render_chat

    def seen(messages: list[Message], *, thinking: bool = False) -> str:
        keys.update(key for message in messages for key in message)
        return render(messages, thinking=thinking)

    monkeypatch.setattr(llm.tokenizer, "render_chat", seen)
    text(chat.ask("Spell banana."))
    text(chat.ask("Go on."))
    text(chat.compact())
    assert keys == {"role", "content"}


def test_a_conversation_with_another_model_says_so(llm: LLM, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(Saved("a", "other", [{"role": "user", "content": "Hi."}]))
    assert ChatSession(llm, store, GREEDY, store.load("a")).other_model == "other"
    chat = ChatSession(llm, store, GREEDY)
    assert "[held with other so far]" in run(chat, "/load a")
    text(chat.regenerate())
    assert ChatSession(llm, store, GREEDY, store.load("a")).other_model is None


def test_a_conversation_that_cannot_be_saved_goes_on(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chat = ChatSession(llm, Store(tmp_path / "file"), GREEDY)
    text(chat.ask("Spell banana."))
    assert chat.save_error is not None
    assert "cannot be written" in str(chat.save_error)
    text(chat.ask("Go on."))
    assert chat.turns == 2
