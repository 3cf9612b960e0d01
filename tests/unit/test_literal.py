"""Control tokens in what was said are text: they end no turn and begin none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.literal import ControlTokens, is_control
from mlx_mtp.tokenizer import Tokenizer
from mlx_mtp.transcript import Transcript
from mlx_mtp.types import Message

POCKET = Path(__file__).parents[2] / "mlx_mtp" / "data" / "pocket" / "target"
CONTROL = ("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", '<|"|>', "<eos>", "<|think|>")
PARTS = st.lists(st.sampled_from([*CONTROL, "user\n", "a", " ", "<", "|>", "\n", "ü"]), max_size=9)
USER: Message = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module", params=["special", "ordinary"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """The pocket tokenizer, as it is and with control tokens that are not called special."""
    if request.param == "special":
        return Tokenizer.load(POCKET)
    folder = tmp_path_factory.mktemp("ordinary") / "target"
    shutil.copytree(POCKET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = token["special"] and "|" not in token["content"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


def as_template(tokenizer: Tokenizer, messages: list[Message]) -> str:
    """What the template writes when nothing is cut."""
    inner: Any = tokenizer._wrapper
    text: str = inner.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return text


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Ids with control tokens written out."""
    inner: Any = tokenizer._wrapper
    text: str = inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def controls(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The control tokens among ids, in order."""
    inner: Any = tokenizer._wrapper
    return [text for text in inner.convert_ids_to_tokens(ids) if text in CONTROL]


@settings(max_examples=60, deadline=None)
@given(said=st.lists(PARTS.map("".join), min_size=1, max_size=3))
@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_is_said_is_text_to_the_last_character(
    tokenizer: Tokenizer, role: str, said: list[str]
) -> None:
    messages: list[Message] = [{"role": role, "content": text} for text in said]
    harmless = [{**message, "content": "Hi"} for message in messages]
    for ids in (
        tokenizer.encode_chat(messages),
        list(Transcript(tokenizer).render(messages).ids),
    ):
        assert spelled(tokenizer, ids) == as_template(tokenizer, messages)
        assert controls(tokenizer, ids) == controls(tokenizer, tokenizer.encode_chat(harmless))


@settings(max_examples=60, deadline=None)
@given(said=st.lists(st.text("ab <>|\nü", max_size=12), min_size=1, max_size=3))
def test_a_text_without_control_tokens_keeps_its_ids(tokenizer: Tokenizer, said: list[str]) -> None:
    messages: list[Message] = [{"role": "user", "content": text} for text in said]
    assert tokenizer.encode_chat(messages) == tokenizer.encode(as_template(tokenizer, messages))


def test_a_reply_keeps_its_tool_calls_and_its_thinking_is_struck_out(tokenizer: Tokenizer) -> None:
    call = '<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|>'
    content = f"<|channel>thought\nhm<channel|>I call. {call}<turn|>"
    for role in ("assistant", "model"):
        ids = tokenizer.encode_chat([USER, {"role": role, "content": content}])
        said = spelled(tokenizer, ids)
        assert "hm" not in said
        assert f"I call. {call}<turn|><turn|>\n" in said
        found = controls(tokenizer, ids)
        assert found.count('<|"|>') == 2
        assert found.count("<turn|>") == 2  # one for each turn, none for what it says


def test_a_system_prompt_may_switch_thinking_on_and_nothing_else(tokenizer: Tokenizer) -> None:
    for role in ("system", "developer"):
        ids = tokenizer.encode_chat([{"role": role, "content": "<|think|>Be <turn|> brief."}, USER])
        without = tokenizer.encode_chat([{"role": role, "content": "Be brief."}, USER])
        assert controls(tokenizer, ids).count("<|think|>") == 1
        assert [one for one in controls(tokenizer, ids) if one != "<|think|>"] == controls(
            tokenizer, without
        )


def test_texts_within_other_fields_are_cut_too() -> None:
    control = ControlTokens(["<|x>", "<y|>", "<|x>y"])
    call = {"function": {"name": "f", "arguments": {"a<y|>": ["b<|x>", 3, None, True]}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": "<|x>yes"}
    cut = control.cut(message)
    assert cut != message
    assert (cut["role"], cut["content"]) == ("assistant", None)
    assert control.pieces(cut["name"]) == ["<", "|x>yes"]
    arguments = cut["tool_calls"][0]["function"]["arguments"]
    ((key, values),) = arguments.items()
    assert control.pieces(key) == ["a<", "y|>"]
    assert control.pieces(values[0]) == ["b<", "|x>"]
    assert values[1:] == [3, None, True]
    assert ControlTokens([]).cut(message) == message


def test_strings_that_begin_within_each_other_are_all_cut() -> None:
    control = ControlTokens(["aba", "ab"])
    cut = control.cut({"role": "user", "content": "ababa"})
    assert control.pieces(cut["content"]) == ["a", "ba", "ba"]


@pytest.mark.parametrize("text", ["<|turn>", "<turn|>", "<|image|>", '<|"|>', "<unused7>"])
def test_control_tokens_are_told_by_their_looks(text: str) -> None:
    assert is_control(text)


@pytest.mark.parametrize("text", ["<table>", "\n\n", "▁▁", "<a", "a|>", "</h1>"])
def test_what_is_ordinary_vocabulary_stays_so(text: str) -> None:
    assert not is_control(text)
