"""Settings and commands as they are typed, what is said of wrong ones, and the disk."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import fields
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from mlx_mtp.chat.commands import COMMANDS, completions, find
from mlx_mtp.chat.figures import chart, gigabytes, idle_drafter, long_stats_line, thousands
from mlx_mtp.chat.input import ChatCompleter, edit, is_open, unquoted
from mlx_mtp.chat.settings import SETTINGS, Settings
from mlx_mtp.chat.store import Saved, Store, read, save_copy
from mlx_mtp.errors import ResourceError, UsageError
from mlx_mtp.types import RequestStats, SamplingParams


def test_every_sampling_parameter_can_be_set() -> None:
    own = {item.name for item in fields(SamplingParams)}
    assert {one.name for one in SETTINGS} == own | {"draft_depth", "thinking"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.5", 0.5),
        ("top_k", "0", 0),
        ("top_p", "1", 1.0),
        ("seed", "4294967295", 2**32 - 1),
        ("stop", "'two words' \\n", ("two words", "\n")),
        ("stop_token_ids", "1, 2", (1, 2)),
        ("ignore_eos", "on", True),
        ("draft_depth", "7", 7),
        ("draft_depth", "auto", "auto"),
        ("thinking", "hide", "hide"),
    ],
)
def test_a_setting_is_set_kept_and_taken_back(name: str, text: str, value: object) -> None:
    settings = Settings().with_value(name, text)
    assert settings.value(name) == value
    assert Settings.from_changed(json.loads(json.dumps(settings.changed()))) == settings
    assert settings.with_value(name, "default") == Settings()


@pytest.mark.parametrize("name", [one.name for one in SETTINGS])
@pytest.mark.parametrize("text", ["", "-1", "much", "1e99999", '"'])
def test_a_wrong_value_says_the_valid_range(name: str, text: str) -> None:
    if name in ("stop", "stop_token_ids") and text in ("-1", "much", "1e99999", ""):
        return
    with pytest.raises(UsageError) as caught:
        Settings().with_value(name, text)
    assert caught.value.message.startswith(f"{name} is ")
    assert caught.value.hint.startswith("Give ")


def test_an_unknown_name_suggests_the_nearest() -> None:
    for wrong, right in (("temp", "temperature"), ("maxtokens", "max_tokens")):
        with pytest.raises(UsageError, match=f"Did you mean {right}?"):
            Settings().with_value(wrong, "1")
    for wrong, right in (("/hepl", "/help"), ("/re", "/regen"), ("/sytem", "/system")):
        with pytest.raises(UsageError, match=f"Did you mean {right}?"):
            find(wrong)
    with pytest.raises(UsageError, match="/help lists them"):
        find("/xyzzy")


def test_completion() -> None:
    assert completions("/s") == ["/system", "/set", "/save", "/stats"]
    assert completions("/set top") == ["top_k", "top_p"]
    assert completions("/think h") == ["hide"]
    assert completions("/exit now") == []
    assert all(command.usage.startswith(command.name) for command in COMMANDS)


def test_load_offers_conversations_before_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "20-notes.json").write_text("")
    store = Store(tmp_path / "home")
    for number in range(25):
        store.save(Saved(f"20-{number:02}"))
        os.utime(store.path(f"20-{number:02}"), (number, number))
    completer = ChatCompleter(store.latest_ids)

    def offered(text: str) -> list[str]:
        document = Document(text)
        found = completer.get_completions(document, CompleteEvent(completion_requested=True))
        return [text[: len(text) + one.start_position] + one.text for one in found]

    newest_first = [f"/load 20-{number:02}" for number in range(24, 4, -1)]
    assert offered("/load 20") == [*newest_first, "/load 20-notes.json"]
    assert offered("/load 20-2") == newest_first[:5]
    assert offered("/file 20") == ["/file 20-notes.json"]


def test_three_quotation_marks_hold_lines_together() -> None:
    assert is_open('"""')
    assert is_open('"""two\nlines')
    assert is_open('"""""')
    assert not is_open('"""two\nlines"""')
    assert not is_open('plain """')
    assert not is_open('"""Doc."""\nimport os')
    assert is_open('"""Doc."""\ndef f():\n    """')
    code = '"""Doc."""\ndef f():\n    """x"""'
    assert unquoted(code) == (code, False)
    assert unquoted(f'"""\n{code}\n"""') == (code, True)
    assert unquoted('"""\n/not a command\n"""') == ("/not a command", True)
    assert unquoted("plain") == ("plain", False)


def test_a_message_is_written_in_the_users_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'two\\nlines\\n' >> \"$2\"\n")
    editor.chmod(0o700)
    monkeypatch.setenv("EDITOR", f"{editor} --wait")
    assert edit("One, ") == "One, two\nlines"
    monkeypatch.setenv("EDITOR", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="cannot be run"):
        edit("")
    monkeypatch.setenv("EDITOR", "false")
    with pytest.raises(UsageError, match="ended with 1; nothing was sent"):
        edit("")


def test_figures() -> None:
    stats = RequestStats(
        tokens=41,
        rounds=10,
        drafted=40,
        accepted=30,
        accepted_by_position=(10, 10, 6, 4),
        first_token_seconds=0.31,
        decode_seconds=2.0,
    )
    line = "41 tok · 20.0 tok/s · first 0.31 s · drafts 75 % (3.0/round) · depth 4"
    assert long_stats_line(stats, 1946, 131072) == f"{line} · context 1.9k/128k"
    assert chart(stats)[2] == f"draft 3  {'█' * 14:<24}   60 %"
    assert [thousands(n) for n in (950, 4096)] == ["950", "4.0k"]
    assert [gigabytes(n) for n in (6 * 10**6, 8_100_000_000, 36 * 10**9)] == [
        "6 MB",
        "8.1 GB",
        "36 GB",
    ]


def test_a_drafter_that_does_nothing_is_worth_a_warning() -> None:
    few = RequestStats(rounds=30, drafted=100, accepted=4)
    for must_draft in (True, False):  # parked or not: it may be another model's
        assert "only 4 of 100 drafts" in str(idle_drafter(few, must_draft=must_draft))
    assert "nothing was drafted" in str(idle_drafter(RequestStats(rounds=9), must_draft=True))
    assert idle_drafter(RequestStats(rounds=3), must_draft=True) is None
    assert idle_drafter(RequestStats(rounds=9), must_draft=False) is None
    assert idle_drafter(RequestStats(rounds=9, drafted=30), must_draft=True) is None


# On the disk


def talk(name: str = "a", said: str = "Hi") -> Saved:
    reply = {"role": "assistant", "content": "Ho", "token_ids": [1, 2]}
    return Saved(name, "pocket", [{"role": "user", "content": said}, reply], {"top_k": 3})


def test_what_is_saved_is_loaded_and_private(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(talk("a"))
    store.save(talk("b", "Last \ud800"))
    os.utime(store.path("a"), (1, 1))
    assert Store(tmp_path).load("a") == talk("a")
    assert Store(tmp_path).latest().messages == talk("b", "Last \ud800").messages
    assert [saved.id for saved, _ in Store(tmp_path).all()] == ["b", "a"]
    assert store.path("a").stat().st_mode & 0o777 == 0o600
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in store.folder.iterdir()) == ["a.json", "b.json"]


def test_nobody_writes_over_what_another_wrote(tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path)
    first.save(talk("a"))
    ours, theirs = first.load("a"), second.load("a")
    theirs.messages = theirs.messages * 2
    second.save(theirs)
    first.save(ours)
    assert ours.id != "a"
    assert len(first.load("a").messages) == 4
    assert len(first.load(ours.id).messages) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is no conversation"),
        ('{"mlx_mtp_chat": 1, "messages": [{"role": "user"}]}', "is damaged"),
        ('{"mlx_mtp_chat": 1, "messages": [{"role": "x", "content": "y"}]}', "is damaged"),
        ('{"mlx_mtp_chat": 1, "messages": [], "settings": 3}', "is damaged"),
        ('{"mlx_mtp_chat": 1, "messages": [], "settings": {"top_p": 2}}', "is damaged: top_p is"),
        ('{"mlx_mtp_chat": 1, "messages": [], "settings": {"nope": 2}}', "is damaged: Unknown"),
    ],
)
def test_a_damaged_file_is_said_and_passed_over(tmp_path: Path, text: str, message: str) -> None:
    store = Store(tmp_path)
    store.save(talk("good"))
    store.path("bad").write_text(text)
    with pytest.raises(UsageError, match=message):
        read(store.path("bad"))
    assert store.latest().id == "good"
    assert [saved.id for saved, _ in store.all()] == ["good"]
    assert len(store.passed_over) == 2
    assert all(message in one for one in store.passed_over)


def test_a_copied_file_has_the_name_of_its_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(talk("a"))
    store.path("b").write_bytes(store.path("a").read_bytes())
    assert {saved.id for saved, _ in store.all()} == {"a", "b"}
    assert store.load("b").id == "b"


def test_what_a_killed_process_left_is_swept_and_what_is_written_is_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(talk())
    names = {kind: store.folder / f".{kind}.json.0123abcd" for kind in ("left", "new", "locked")}
    for path in (*names.values(), store.folder / ".other"):
        path.write_text("{")
        os.utime(path, (1, 1))
    os.utime(names["new"])
    with names["locked"].open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Store(tmp_path).save(talk("b"))
    found = {path.name for path in store.folder.iterdir()}
    assert found == {"a.json", "b.json", ".other", names["new"].name, names["locked"].name}


def test_a_copy_is_markdown_where_its_name_says_so(tmp_path: Path) -> None:
    save_copy(talk(), tmp_path / "talk.md")
    assert (tmp_path / "talk.md").read_text() == "## You\n\nHi\n\n## pocket\n\nHo\n"
    save_copy(talk(), tmp_path / "talk.json")
    loaded = Store(tmp_path).load(str(tmp_path / "talk.json"))
    assert loaded.messages == talk().messages
    with pytest.raises(ResourceError, match="cannot be written"):
        save_copy(talk(), tmp_path / "none" / "talk.json")
    with pytest.raises(UsageError, match="There is no conversation"):
        Store(tmp_path).load("nowhere")
