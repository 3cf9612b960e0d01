"""Whole conversations at a pseudo-terminal, with the pocket pair."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from terminal import PROMPT, Terminal

from mlx_mtp import SamplingParams, load
from mlx_mtp.chat.store import Saved, Store
from mlx_mtp.types import Message

CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"
PASTE = "\x1b[200~{}\x1b[201~"
NEARLY_GREEDY = 0.2
"""Sampled, so that seeds matter, and yet what the pair says does not depend on luck."""


def saved(home: Path) -> dict[str, Any]:
    """The only conversation there is."""
    (path,) = (home / "chats").glob("[!.]*")  # what is being written has a dot in front
    assert path.stat().st_mode & 0o077 == 0
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def check_replies(messages: list[Message], most: int) -> None:
    """Each reply is what the model says to the same history in a process of its own."""
    llm = load("pocket")
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        session, ids = llm.session(), message["token_ids"]
        params = SamplingParams(
            seed=message["seed"], max_tokens=min(most, len(ids)), temperature=NEARLY_GREEDY
        )
        for _ in session.send(messages[:place], params, draft_depth=0):
            pass
        assert session.reply()["token_ids"] == ids[:most]


def test_a_whole_conversation(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Sort 5, 3, 9, 1.\n")
    options = ("chat", "pocket", "--draft-depth", "2", "--temperature", str(NEARLY_GREEDY))
    with Terminal(*options, home=tmp_path, cwd=tmp_path) as terminal:
        terminal.expect("mlx-mtp .* · pocket [+] drafter · .* · /help")
        terminal.say(PASTE.format("Multiplication table of 7.\nThank you."))
        terminal.expect(r"\d+ tok · [\d.]+ tok/s · first [\d.]+ s · drafts \d+ %")
        terminal.expect(r"depth 2 ·\s+context \d+/4.0k")
        terminal.say("Count" + ALT_ENTER + "from 1 to 500.")
        terminal.expect("3, 4, 5")
        terminal.type(CTRL_C)
        kept = int(terminal.expect(r"\[stopped: kept (\d+) tok, type to continue")[1])
        terminal.say("continue")
        terminal.resize(60)
        terminal.expect(r"context \d+/4.0k")
        terminal.say("/undo")
        terminal.expect("took back: continue")
        terminal.say("/undo")
        terminal.expect("took back: Count from 1 to 500.")
        terminal.say('"""')
        terminal.type('Spell\rbanana."""\r')
        terminal.expect(r"context \d+/4.0k")
        terminal.say("/set temperature hot")
        terminal.expect(r"error: temperature is 'hot'.\s+Give a number from 0 to 1000000.")
        terminal.say("/set temperture 1")
        terminal.expect("Did you mean temperature?")
        terminal.say("/set max_tokens 5")
        terminal.expect("max_tokens +5")
        terminal.say("/regen")
        terminal.expect(r"\[cut off: max_tokens 5\]")
        terminal.say("/fil notes.txt")
        terminal.expect(r"There is no command /fil.\s+Did you mean /file\?")
        terminal.say("/file notes.txt")
        terminal.expect("notes.txt: [0-9]+ tokens go with your next message")
        terminal.say("Please.")
        terminal.expect(r"context \d+/4.0k")  # what it says to that depends on the seed
        terminal.say("/stats")
        terminal.expect("draft 1 +█* +[0-9]+ %")
        terminal.expect("since the start")
        terminal.expect(PROMPT)
        terminal.type("not sent" + CTRL_C + CTRL_C)
        terminal.expect("Ctrl-C again leaves")
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        terminal.expect("saved as .*; mlx-mtp chat --continue")
        assert terminal.end() == 0
    assert kept > 5
    messages = saved(tmp_path)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    assert messages[0]["content"] == "Multiplication table of 7.\nThank you."
    assert messages[2]["content"] == "Spell\nbanana."
    assert messages[3]["finish_reason"] == "length"
    assert messages[4]["content"].endswith("\nSort 5, 3, 9, 1.\n```\n\nPlease.")
    check_replies(messages, 40)
    history = tmp_path / "history"
    assert history.stat().st_mode & 0o077 == 0
    assert "+continue" in history.read_text()


def test_a_killed_conversation_goes_on(tmp_path: Path) -> None:
    options = ("chat", "pocket", "--temperature", "0", "--draft-depth", "1")
    with Terminal(*options, home=tmp_path) as terminal:
        terminal.say("/set ignore_eos on")  # so that it cannot end before it is killed
        terminal.expect("ignore_eos +on")
        terminal.say("Count from 1 to 300.")
        terminal.expect("3, 4, 5")
        time.sleep(0.5)
        for _ in range(100):  # the reply is on the disk after two seconds
            if len(saved(tmp_path)["messages"]) == 2:
                break
            time.sleep(0.1)
        terminal.kill(signal.SIGKILL)
        assert terminal.end() == -signal.SIGKILL
    partial = saved(tmp_path)["messages"][1]
    assert partial["finish_reason"] == "cancelled"
    assert partial["content"].startswith("1, 2, 3, 4, 5")
    with Terminal("chat", "pocket", "--continue", home=tmp_path) as terminal:
        terminal.expect("1 turn")
        terminal.expect(r"› Count from 1 to 300\.")  # noqa: RUF001
        terminal.expect(r"\[stopped: type to continue")
        terminal.say("/set")
        terminal.expect("temperature +0.0")
        terminal.say("/set ignore_eos off")
        terminal.expect("ignore_eos +off")
        terminal.say("Spell banana.")
        terminal.expect(r"context \d+/4.0k")
        terminal.say("Count from 1 to 300.")
        terminal.expect("2, 3, 4")
        terminal.kill(signal.SIGTERM)
        assert terminal.end() == 128 + signal.SIGTERM
    messages = saved(tmp_path)["messages"]
    assert messages[1] == partial
    assert len(messages) == 6
    assert messages[5]["content"].startswith("1, 2, 3, 4")


def test_two_interrupts_leave(tmp_path: Path) -> None:
    with Terminal("chat", "pocket", home=tmp_path, TERM="dumb") as terminal:
        terminal.say("Spell banana.")
        terminal.expect(r"context \d+/4.0k")
        terminal.expect(PROMPT)
        terminal.type(CTRL_C)
        terminal.expect("Ctrl-C again leaves")
        terminal.expect(PROMPT)
        terminal.type(CTRL_C)
        assert terminal.end() == 130


def test_a_conversation_goes_on_with_its_own_model(tmp_path: Path) -> None:
    """The environment names a default; a name on the command line wins."""
    Store(tmp_path).save(Saved("a", "pocket", [{"role": "user", "content": "Spell banana."}]))
    Store(tmp_path).path("b").write_text("{")
    options = ("chat", "--continue", "--drafter", "none")
    with Terminal(*options, home=tmp_path, MLX_MTP_MODEL="pocket-moe") as terminal:
        terminal.expect(r"warning: .*b\.json is not valid JSON")
        terminal.expect("mlx-mtp .* · pocket · .* · /help")
        terminal.expect("its reply is missing: /regen makes it")
        terminal.say(CTRL_D)
        assert terminal.end() == 0
    with Terminal("chat", "pocket-moe", *options[1:], home=tmp_path) as terminal:
        terminal.expect("· pocket-moe ·")
        terminal.expect(r"\[held with pocket so far\]")


def test_interrupts_at_any_moment_tear_nothing(tmp_path: Path) -> None:
    with Terminal("chat", "pocket", "--max-tokens", "40", home=tmp_path) as terminal:
        for seconds in (0.0, 0.01, 0.03, 0.1):
            terminal.expect(PROMPT)
            terminal.type("Count from 1 to 300.\r")
            time.sleep(seconds)
            for _ in range(2):
                terminal.kill(signal.SIGINT)
        terminal.say("/stats")
        terminal.say(CTRL_D)
        assert terminal.end() == 0
    assert b"Traceback" not in terminal.raw
    assert b"Warning" not in terminal.raw
    assert saved(tmp_path)["messages"]


def test_what_is_typed_during_a_reply_waits_for_the_prompt(tmp_path: Path) -> None:
    with Terminal("chat", "pocket", "--temperature", "0", home=tmp_path) as terminal:
        terminal.say("Count from 1 to 60.")
        terminal.expect("3, 4, 5")
        terminal.type("Spell cay\x7ft.\rnot ended")
        assert "60" in terminal.expect("6, 7[0-9, ]+\n")[0]
        terminal.expect(r"context \d+/4.0k")
        terminal.expect(r"› Spell cat\.")  # noqa: RUF001
        terminal.expect(r"context \d+/4.0k")
        terminal.expect("› not ended$")  # noqa: RUF001
        terminal.type(CTRL_C + CTRL_D)
        assert terminal.end() == 0
    said = [message["content"] for message in saved(tmp_path)["messages"]]
    assert said[0::2] == ["Count from 1 to 60.", "Spell cat."]


def test_what_is_typed_before_ctrl_c_is_kept_but_not_sent(tmp_path: Path) -> None:
    with Terminal("chat", "pocket", "--temperature", "0", home=tmp_path) as terminal:
        terminal.say("/set ignore_eos on")
        terminal.say("Count from 1 to 300.")
        terminal.expect("3, 4, 5")
        terminal.type("Spell\rcat.\r")
        time.sleep(0.2)
        terminal.type(CTRL_C)
        terminal.expect(r"\[stopped: kept")
        terminal.expect("› Spell\\s+cat[.]$")  # noqa: RUF001
        terminal.type(" Please.\r")
        terminal.expect("[a-z]-[a-z]")  # of the reply: Ctrl-C at the prompt would clear the line
        terminal.type(CTRL_C)
        terminal.expect(r"\[stopped")
        terminal.say(CTRL_D)
        assert terminal.end() == 0
    assert saved(tmp_path)["messages"][2]["content"] == "Spell\ncat. Please."
