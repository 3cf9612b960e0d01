"""What `mlx-mtp chat` does with its options. Run in this process: each start of the program takes
seconds to import; that it starts and ends well is test_cli's business.
"""

from __future__ import annotations

import io
import json
import logging
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from mlx_mtp import LLM, Chunk
from mlx_mtp.chat.store import Saved, Store
from mlx_mtp.cli.app import run
from mlx_mtp.completions import Stream
from mlx_mtp.types import RequestStats, RunStats

POCKET = Path(__file__).parents[2] / "mlx_mtp" / "data" / "pocket"
TABLE = "Multiplication table of 7."
SEVENS = "".join(f"7 x {n} = {7 * n}\n" for n in range(1, 11))
STATS = r"  \d+ tok · [\d.]+ tok/s · first [\d.]+ s"


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        loaded: dict[str, Any] = json.loads(self.out)
        return loaded


class Chat(Protocol):
    def __call__(self, *arguments: str, prompt: str = TABLE, model: str | None = "pocket") -> Done:
        """Run `mlx-mtp chat`."""


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Chat]:
    for name in ("MLX_MTP_MODEL", "MLX_MTP_DRAFTER"):
        monkeypatch.delenv(name, raising=False)
    log = logging.getLogger("mlx_mtp")
    level, handlers = log.level, list(log.handlers)

    def call(*arguments: str, prompt: str = TABLE, model: str | None = "pocket") -> Done:
        named = [] if model is None else [model]
        code = run(["chat", *named, "-p", prompt, *arguments])
        return Done(code, *capsys.readouterr())

    yield call
    log.setLevel(level)
    log.handlers[:] = handlers


def test_quiet_leaves_only_the_answer(chat: Chat) -> None:
    assert chat("--temperature", "0", "-q", model=None) == (0, SEVENS, "")


def test_a_dash_reads_the_prompt_from_stdin(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TABLE.encode() + b"\r\n")))
    assert chat("--temperature", "0", "--max-tokens", "7", prompt="-").out == SEVENS[:10]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    done = chat(prompt="-")
    assert done == (2, "", "error: The prompt on stdin is not UTF-8 text.\n  Convert it first.\n")


def test_a_stop_string_ends_the_answer_before_itself(chat: Chat) -> None:
    done = chat("--temperature", "0", "--stop", "x 3", "--stop", "zzz")
    assert done.out == "7 x 1 = 7\n7 x 2 = 14\n7 \n"


def test_max_tokens_is_a_limit(chat: Chat) -> None:
    found = chat("--temperature", "0", "--max-tokens", "5", "--json").json
    assert found["finish_reason"] == "length"
    assert len(found["token_ids"]) == 5


def test_json_has_the_names_of_the_api(chat: Chat) -> None:
    found = chat("--temperature", "0", "--draft-depth", "4", "--json").json
    assert list(found) == [
        "text",
        "token_ids",
        "finish_reason",
        "thinking",
        "seed",
        "stats",
        "run",
        "model",
        "drafter",
        "parked",
        "exact",
    ]
    assert found["text"] == SEVENS.rstrip("\n")
    assert found["finish_reason"] == "stop"
    assert found["model"] == "pocket"
    assert found["drafter"]
    assert list(found["stats"]) == [field.name for field in fields(RequestStats)]
    assert list(found["run"]) == [field.name for field in fields(RunStats)]
    assert found["stats"]["tokens"] == len(found["token_ids"])
    assert 0 < found["stats"]["accepted"] <= found["stats"]["drafted"]
    assert found["run"]["host_reads"] == found["run"]["rounds"] == found["stats"]["rounds"]


def test_the_seed_that_is_reported_reproduces_the_answer_with_and_without_drafter(
    chat: Chat,
) -> None:
    common = ["--temperature", "1.5", "--max-tokens", "30", "--json"]
    drawn = chat(*common).json
    seed = [*common, "--seed", str(drawn["seed"])]
    again = chat(*seed, "--draft-depth", "2").json
    plain = chat(*seed, "--drafter", "none").json
    assert drawn["token_ids"] == again["token_ids"] == plain["token_ids"]
    assert plain["drafter"] is None
    assert plain["stats"]["drafted"] == plain["run"]["drafter_forwards"] == 0


def test_exact_is_said_and_bounds_the_depth(chat: Chat) -> None:
    found = chat("--temperature", "0", "--exact", "--draft-depth", "4", "--json").json
    assert found["exact"]
    assert found["text"] == SEVENS.rstrip("\n")
    assert found["run"]["target_tokens"] == 5 * found["run"]["rounds"]
    refused = chat("--exact", "--draft-depth", "5")
    assert refused.code == 2
    assert "The draft depth is '5'." in refused.err
    assert "from 0 to 4 with --exact" in refused.err


def test_a_system_prompt_comes_first(chat: Chat) -> None:
    without = chat("--max-tokens", "1", "--json").json["stats"]["prompt_tokens"]
    found = chat("--max-tokens", "1", "--json", "--system", "Be brief.").json
    assert found["stats"]["prompt_tokens"] > without


def test_the_environment_names_the_defaults(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MTP_MODEL", "pocket")
    monkeypatch.setenv("MLX_MTP_DRAFTER", "none")
    done = chat("--max-tokens", "3", "--json", model=None)
    assert (done.json["model"], done.json["drafter"]) == ("pocket", None)
    assert "no model was named" not in done.err


def test_plain_decoding_because_no_drafter_was_found_is_said(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "alone").symlink_to(POCKET / "target")
    done = chat("--temperature", "0", "--max-tokens", "7", model=str(tmp_path / "alone"))
    assert (done.code, done.out) == (0, SEVENS[:10])
    assert re.fullmatch(r"warning: No drafter was found.*\n" + STATS + r"\n", done.err)


def test_a_drafter_that_never_drafts_is_said(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LLM.stream

    def undrafted(self: LLM, *arguments: Any, **options: Any) -> Stream:
        return stream(self, *arguments, draft_depth=0)

    assert chat("--max-tokens", "9", "--draft-depth", "0").err.count("\n") == 1
    monkeypatch.setattr(LLM, "stream", undrafted)
    done = chat("--max-tokens", "9")
    assert done.err.endswith("warning: the drafter was loaded, but nothing was drafted.\n")


def test_a_drafter_that_is_asked_for_and_missing_is_an_error(chat: Chat, tmp_path: Path) -> None:
    done = chat("--drafter", str(tmp_path / "none"))
    assert (done.code, done.out) == (3, "")
    assert re.fullmatch(r"error: .*\n  .*\n", done.err)


def test_an_interrupt_within_an_import_is_one(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of a compiled module makes an ImportError of it."""

    def interrupted(*_: Any, **__: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("Encountered an error while initializing the extension.") from error

    monkeypatch.setattr("mlx_mtp.load", interrupted)
    done = chat()
    assert (done.code, done.out, done.err) == (130, "", "")


def test_a_model_that_is_not_there_is_not_found(chat: Chat, tmp_path: Path) -> None:
    done = chat(model=str(tmp_path / "none"))
    assert (done.code, done.out) == (3, "")
    assert re.fullmatch(r"error: There is no folder .*\n  .*\n", done.err)


def test_a_folder_of_another_kind_is_incompatible(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = chat(model=str(tmp_path))
    assert (done.code, done.out) == (4, "")
    assert re.fullmatch(r"error: .*\n  .*\n", done.err)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have Ctrl-C pressed so often when four tokens have come."""

    def press(times: int) -> None:
        following, seen = Stream.__next__, 0

        def pressing(self: Stream) -> Chunk:
            nonlocal seen
            seen += 1
            for _ in range(times if seen == 5 else 0):
                signal.raise_signal(signal.SIGINT)
            return following(self)

        monkeypatch.setattr(Stream, "__next__", pressing)

    return press


def test_an_interrupted_answer_is_still_a_document(
    chat: Chat, interrupted: Callable[[int], None]
) -> None:
    interrupted(1)
    done = chat("--temperature", "0", "--json", "--draft-depth", "2")
    assert done.code == 130
    found = json.loads(done.out)
    assert found["finish_reason"] == "cancelled"
    assert SEVENS.startswith(found["text"])
    assert found["stats"]["tokens"] == len(found["token_ids"]) > 0
    assert found["stats"]["drafted"] > 0
    assert re.fullmatch(STATS + r" · drafts \d+ % \(.*\)\n", done.err)


def test_a_second_interrupt_does_not_wait_for_the_round(
    chat: Chat, interrupted: Callable[[int], None]
) -> None:
    interrupted(2)
    done = chat("--temperature", "0", "--draft-depth", "2")
    assert (done.code, done.err) == (130, "  4 tok\n")
    assert SEVENS.startswith(done.out.rstrip("\n"))


def test_conversations_are_listed_and_go_on_at_a_terminal_only(
    chat: Chat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_MTP_HOME", str(tmp_path))
    assert run(["chat", "--list"]) == 0
    assert capsys.readouterr() == ("", "There is no conversation yet.\n")
    user = {"role": "user", "content": "Spell\nbanana."}
    Store().save(Saved("20261130-120000-abcd", "pocket", [user]))
    assert run(["chat", "--list"]) == 0
    listed = r"20261130-120000-abcd  \d{4}-\d\d-\d\d \d\d:\d\d     1 turn  pocket  Spell banana\.\n"
    assert re.fullmatch(listed, capsys.readouterr().out)
    done = chat("--continue")
    assert (done.code, done.out) == (2, "")
    assert "at a terminal only" in done.err
    done = chat("--thinking", "loud")
    assert done.err == "error: thinking is 'loud'.\n  Give show, hide or off.\n"


def test_the_list_names_files_and_sends_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_MTP_HOME", str(tmp_path))
    store = Store()
    store.save(Saved("a", "po\x1b]0;cket", [{"role": "user", "content": "\x1b[31mred\x07"}]))
    store.path("broken").write_text("{")
    assert run(["chat", "--list"]) == 0
    shown = capsys.readouterr()
    assert r"1 turn  po\x1b]0;cket  \x1b[31mred\x07" in shown.out
    assert re.fullmatch(r"warning: .*broken\.json is not valid JSON\.\n", shown.err)
