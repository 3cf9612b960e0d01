"""Rows merge settings, fill templates and refuse what cannot be served, with a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.batch.rows import (
    Row,
    RowOptions,
    bad_row,
    prompt_row,
    row_key,
    row_seed,
    simple_row,
)
from mlx_mtp.batch.template import parse_template
from mlx_mtp.errors import UsageError
from mlx_mtp.types import SamplingParams

HI = [{"role": "user", "content": "hi"}]


def row(record: dict[str, Any], options: RowOptions | None = None, index: int = 3) -> Row:
    return simple_row(record, index, "line 4", options or RowOptions())


def test_a_prompt_is_one_user_message() -> None:
    made = row({"prompt": "hi"})
    assert made == Row(3, "line 4", "3", HI, SamplingParams())
    assert row({"messages": HI, "id": 7}).id == "7"
    assert prompt_row(3, "line 4", "a", "hi", RowOptions()).messages == HI


def test_the_rows_settings_win_and_null_is_not_given() -> None:
    options = RowOptions(SamplingParams(temperature=0.5, top_k=9, stop=("A",), ignore_eos=True))
    made = row(
        {"prompt": "hi", "temperature": 0, "top_k": None, "stop": "B", "stop_token_ids": [1]},
        options,
    )
    assert made.params == SamplingParams(
        temperature=0, top_k=9, stop=("B",), stop_token_ids=(1,), ignore_eos=True
    )
    assert row({"prompt": "hi", "stop": [], "ignore_eos": False}, options).params.stop == ()


def test_a_call_seed_gives_each_row_its_own_but_a_rows_seed_wins() -> None:
    seeded = RowOptions(seed=7)
    assert row({"prompt": "hi", "id": "a"}, seeded).params.seed == row_seed(7, "a")
    assert row({"prompt": "other", "id": "a"}, seeded, 9).params.seed == row_seed(7, "a")
    assert row({"prompt": "hi", "seed": 0}, seeded).params.seed == 0
    assert row({"prompt": "hi"}).params.seed is None


def test_row_seeds_are_fixed_and_spread() -> None:
    assert row_seed(7, "a") == 2_195_314_219  # a change would break every repeated run
    seeds = {row_seed(seed, str(n)) for seed in range(20) for n in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_system_message_is_added_where_there_is_none() -> None:
    options = RowOptions(system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert row({"prompt": "hi"}, options).messages == [system, *HI]
    for role in ("system", "developer"):
        own = [{"role": role, "content": "Be long."}, *HI]
        assert row({"messages": own}, options).messages == own


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({}, "The row has neither prompt nor messages. Give one of them."),
        ({"prompt": None}, "The row has neither prompt nor messages. Give one of them."),
        (
            {"prompt": "a", "messages": HI},
            "The row has both prompt and messages. Give one of them.",
        ),
        ({"promt": "a"}, "Unknown key 'promt'. Did you mean prompt?"),
        ({"prompt": "a", "zzz": 1}, "Unknown key 'zzz'. Known: id, prompt, messages, max_tokens,"),
        ({"prompt": 5}, "The prompt is not text. Give a string, or a list as messages."),
        ({"prompt": " \n"}, "The prompt is blank. Write one or leave the row out."),
        ({"prompt": "a\ud800"}, "The prompt has half of a surrogate pair at character 2."),
        ({"prompt": "a", "id": 1.5}, "The id is neither text nor a whole number. Give a text."),
        ({"prompt": "a", "id": True}, "The id is neither text nor a whole number. Give a text."),
        ({"prompt": "a", "id": ""}, "The id is empty. Give one or leave it out."),
        ({"prompt": "a", "id": "\udfff"}, "The id has half of a surrogate pair at character 1."),
        ({"prompt": "a", "top_p": 2}, "top_p is 2. Give a number from 0 to 1."),
        ({"prompt": "a", "seed": 2**32}, f"seed is {2**32}. Give a whole number from 0 to"),
        ({"prompt": "a", "stop": {"a": 1}}, "stop is an object. Give a list."),
        ({"prompt": "a", "ignore_eos": "no"}, "ignore_eos is 'no'. Give true or false."),
        ({"messages": []}, "The messages are not a list with at least one message. Give ["),
        ({"messages": "hi"}, "The messages are not a list with at least one message. Give ["),
        ({"messages": ["hi"]}, "Message 1 is not an object. Give its role and content."),
        ({"messages": [{"content": "a"}]}, "Message 1 has no role. Known: system,"),
        (
            {"messages": [*HI, {"role": "asistant", "content": "a"}]},
            "Message 2 has the unknown role 'asistant'. Did you mean assistant?",
        ),
        ({"messages": [{"role": "user"}]}, "The content of message 1 is not text. Give a string"),
        ({"messages": [{"role": "user", "content": []}]}, "The content of message 1 is not text."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "The content of message 1 is not text. Give a string or a list of text parts;",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud83d"}]},
            "Message 1 has half of a surrogate pair at character 1. Write the whole character.",
        ),
    ],
)
def test_what_a_row_may_not_be(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        row(record)
    assert str(caught.value).startswith(sentence)


def test_text_parts_and_tool_calls_are_messages() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "tool_calls": [{"id": "x"}]},
        {"role": "tool", "content": "5"},
    ]
    assert row({"messages": messages}).messages == messages


def test_a_bad_row_is_short_and_printable() -> None:
    error = UsageError(f"Unknown key {'x' * 10**6 + chr(0xD800)!r}.", "Did you mean \udfff?")
    bad = bad_row(5, "line 6", error, ["no", "name"])
    assert (bad.index, bad.place, bad.id) == (5, "line 6", None)
    assert len(bad.error) < 400
    assert bad.error.endswith("... Did you mean \\udfff?")
    assert bad_row(5, "line 6", error, 12).id == "12"
    control = UsageError("No \x1b[31mred\u2028 é 漢\u3000.", "a\nb")
    assert bad_row(5, "line 6", control).error == "No \\x1b[31mred\\u2028 é 漢\u3000. a\\nb"


def test_templates_take_fields_of_any_name() -> None:
    options = RowOptions(template="{{{product name}}}: {stars}/5, {a.b[0]}")
    record = {"product name": "{tea}", "stars": 4, "a.b[0]": "x", "other": None, "top_k": 3}
    made = row(record, options)
    assert made.messages[0]["content"] == "{{tea}}: 4/5, x"
    assert made.params.top_k == 3
    assert row({"prompt": "a", "messages": "b"}, RowOptions(template="{messages}")).id == "3"


@pytest.mark.parametrize(
    ("template", "record", "sentence"),
    [
        ("{titel}", {"title": "a"}, "The template's {titel} is not a field. Did you mean title?"),
        ("{zzz}", {"a": 1, "b": 2}, "The template's {zzz} is not a field. Known: a, b."),
        ("{a.real}", {"a": 1}, "The template's {a.real} is not a field. Known: a."),
        ("{a}", {"a": [1]}, "The field 'a' is neither text nor a number. Leave it out of the"),
        ("{a}", {"a": True}, "The field 'a' is neither text nor a number. Leave it out of the"),
        ("{a}", {"a": None}, "The field 'a' is neither text nor a number. Leave it out of the"),
        ("{a}", {"a": float("inf")}, "The field 'a' is neither text nor a number."),
        ("{a}", {"a": " "}, "The prompt is blank. Write one or leave the row out."),
        ("a { b", {}, "The template has a lone { at character 3. Write {name} for a field and"),
        ("{{a} b", {}, "The template has a lone } at character 4. Write {name} for a field and"),
        ("a {}", {}, "The template has no name in {} at character 3. Write {name} for a field"),
        ("{a{b}}", {"b": 1}, "The template has a lone { at character 1."),
    ],
)
def test_what_a_template_may_not_be(template: str, record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        row(record, RowOptions(template=template))
    assert str(caught.value).startswith(sentence)


def test_a_template_takes_numbers_of_any_size() -> None:
    assert row({"a": 10**400}, RowOptions(template="{a}")).messages[0]["content"] == f"1{'0' * 400}"


@given(st.text(), st.text())
def test_escaped_text_and_values_come_through_as_they_are(text: str, value: str) -> None:
    escaped = text.replace("{", "{{").replace("}", "}}")
    assert parse_template(escaped).fill({}) == text
    assert parse_template(f"{escaped}{{x}}{escaped}").fill({"x": value}) == text + value + text


def test_the_key_changes_with_whatever_changes_the_answer() -> None:
    record = {"prompt": "hi", "id": "a"}
    base = row(record)
    key = row_key(base, "model", thinking=False)
    assert key == row_key(row(record, index=9), "model", thinking=False)
    assert len(key) == 32
    assert int(key, 16) >= 0
    others = [
        row_key(base, "other", thinking=False),
        row_key(base, "model", thinking=True),
        row_key(base, "model", thinking=False, exact=True),
        row_key(row({**record, "id": "b"}), "model", thinking=False),
        row_key(row({**record, "prompt": "ho"}), "model", thinking=False),
        row_key(row(record, RowOptions(system="s")), "model", thinking=False),
        *(
            row_key(row({**record, name: value}), "model", thinking=False)
            for name, value in {
                "max_tokens": 5, "temperature": 1, "top_k": 1, "top_p": 0.5, "min_p": 0.1,
                "seed": 1, "stop": "a", "stop_token_ids": [1], "ignore_eos": True,
            }.items()
        ),
    ]  # fmt: skip
    assert len({key, *others}) == len(others) + 1


def test_the_key_does_not_depend_on_the_order_of_keys() -> None:
    ways = ['{"role": "user", "content": "hi"}', '{"content": "hi", "role": "user"}']
    keys = {row_key(row({"messages": [json.loads(way)]}), "m", thinking=False) for way in ways}
    assert len(keys) == 1
