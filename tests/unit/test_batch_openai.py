"""OpenAI's batch rows: what is served, what is ignored, what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_mtp.batch.openai_rows import is_openai, openai_record, openai_row
from mlx_mtp.batch.output import error_record, make_record
from mlx_mtp.batch.rows import Row, RowOptions, row_seed
from mlx_mtp.errors import UsageError
from mlx_mtp.types import RequestStats, Result, SamplingParams

HI = [{"role": "user", "content": "hi"}]


def row(body: Any, options: RowOptions | None = None, **record: Any) -> Row:
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return openai_row({**line, **record}, 2, "line 3", options or RowOptions())


def body_row(**body: Any) -> Row:
    return row({"messages": HI, **body})


def test_a_row_is_told_by_its_keys() -> None:
    assert is_openai({"custom_id": "a"})
    assert is_openai({"body": {}})
    assert not is_openai({"id": "a", "prompt": "hi"})


def test_a_request_becomes_a_row() -> None:
    made = body_row(
        model="gpt-4o", max_completion_tokens=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1,
        seed=3, stop=["a", "b"], user="u", metadata={"a": "b"}, store=True, service_tier="flex",
        stream_options=None, n=1, stream=False,
    )  # fmt: skip
    params = SamplingParams(9, 0.5, 4, 0.9, 0.1, 3, ("a", "b"))
    assert made == Row(2, "line 3", "r1", HI, params, is_openai=True)


def test_what_is_left_out_or_null_is_the_calls() -> None:
    options = RowOptions(SamplingParams(max_tokens=7, stop=("x",)), seed=5, system="s")
    made = openai_row({"custom_id": 8, "body": {"messages": HI, "stop": None}}, 0, "", options)
    assert made.id == "8"
    assert made.params == SamplingParams(max_tokens=7, stop=("x",), seed=row_seed(5, "8"))
    assert made.messages == [{"role": "system", "content": "s"}, *HI]
    developer = [{"role": "developer", "content": "d"}, *HI]
    assert row({"messages": developer}, options).messages == developer


def test_limits_by_either_name() -> None:
    assert body_row(max_tokens=4).params.max_tokens == 4
    assert body_row(max_tokens=4, max_completion_tokens=4).params.max_tokens == 4
    assert body_row(max_tokens=None, max_completion_tokens=4).params.max_tokens == 4


@pytest.mark.parametrize(
    ("seed", "ours"), [(2**32 + 5, 5), (-1, 2**32 - 1), (2**63, 0), (None, None)]
)
def test_any_integer_is_a_seed(seed: int | None, ours: int | None) -> None:
    assert body_row(seed=seed).params.seed == ours


@pytest.mark.parametrize(
    "body",
    [
        {"tools": []},
        {"tools": None},
        {"tool_choice": "none"},
        {"functions": []},
        {"function_call": "none"},
        {"parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"presence_penalty": 0.0},
        {"frequency_penalty": 0},
        {"logit_bias": {}},
        {"modalities": ["text"]},
        {"reasoning_effort": None},
        {"n": None},
    ],
)
def test_neutral_values_pass(body: dict[str, Any]) -> None:
    assert body_row(**body) == body_row()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"tools": [{}]}, "The body has tools, but tools cannot be called in a batch. Take it out"),
        ({"tool_choice": "auto"}, "The body has tool_choice, but tools cannot be called"),
        ({"functions": [{}]}, "The body has functions, but tools cannot be called"),
        ({"function_call": "auto"}, "The body has function_call, but tools cannot be called"),
        ({"response_format": {"type": "json_object"}}, "The body has response_format, but the"),
        ({"logprobs": True}, "The body has logprobs, but log probabilities are not reported."),
        ({"top_logprobs": 2}, "The body has top_logprobs, but log probabilities"),
        ({"presence_penalty": 0.1}, "The body has presence_penalty, but penalties are not"),
        ({"frequency_penalty": -1}, "The body has frequency_penalty, but penalties are not"),
        ({"logit_bias": {"5": 1}}, "The body has logit_bias, but tokens cannot be biased."),
        ({"modalities": ["text", "audio"]}, "The body has modalities, but only text can be"),
        ({"audio": {"voice": "a"}}, "The body has audio, but only text can be written."),
        ({"stream": True}, "The body has stream, but a batch writes whole answers."),
        ({"stream_options": {"a": 1}}, "The body has stream_options, but a batch writes whole"),
        ({"reasoning_effort": "high"}, "The body has reasoning_effort, but thinking is switched"),
        ({"n": 2}, "n is 2. Each row has one answer: write n rows."),
        ({"n": True}, "n is True. Each row has one answer: write n rows."),
        ({"n": 0}, "n is 0. Each row has one answer: write n rows."),
        ({"temprature": 1}, "Unknown key 'temprature' in the body. Did you mean temperature?"),
        ({"guided_json": {"type": "object"}}, "The body has guided_json, but the output cannot"),
        ({"repetition_penalty": 1.1}, "The body has repetition_penalty, but penalties are not"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens and max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0. Give a whole number at least 1."),
        ({"max_completion_tokens": "9"}, "max_tokens is '9'. Give a whole number at least 1."),
        ({"temperature": "hot"}, "temperature is 'hot'. Give a number from 0 to"),
        ({"seed": 1.5}, "seed is 1.5. Give a whole number from 0 to"),
        ({"seed": True}, "seed is True. Give a whole number from 0 to"),
        ({"stop": [""]}, "A stop string is empty or not text."),
        ({"messages": None}, "The messages are not a list with at least one message."),
        ({"messages": [{"role": "function", "content": "a"}]}, "Message 1 has the unknown role"),
    ],
)
def test_what_is_refused_in_a_body(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        body_row(**body)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"method": "GET"}, "The method is 'GET'. Only POST is served."),
        ({"url": "/v1/embeddings"}, "The url is '/v1/embeddings'. Only /v1/chat/completions is"),
        ({"url": ["x"]}, "The url is ['x']. Only /v1/chat/completions is served."),
        ({"custom_id": None}, "The row has no custom_id. Give each row a custom_id of its own."),
        ({"custom_id": ["a"]}, "The id is neither text nor a whole number. Give a text."),
        ({"boddy": {}}, "Unknown key 'boddy'. Did you mean body?"),
        ({"body": None}, "The body is not an object. Give a request to /v1/chat/completions."),
    ],
)
def test_what_is_refused_around_a_body(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        row(**{"body": {"messages": HI}, **record})
    assert str(caught.value).startswith(sentence)


def test_an_answer_as_the_api_writes_it() -> None:
    result = Result("Hello.", [5, 6], "stop", 1, RequestStats(prompt_tokens=22, tokens=2))
    key = "0123456789abcdef" * 2
    assert openai_record(make_record("r1", result, 1711652795), key, "gemma") == {
        "id": "batch_req_0123456789abcdef01234567",
        "custom_id": "r1",
        "response": {
            "status_code": 200,
            "request_id": "req_0123456789abcdef01234567",
            "body": {
                "id": "chatcmpl-0123456789abcdef01234567",
                "object": "chat.completion",
                "created": 1711652795,
                "model": "gemma",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hello.", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 22, "completion_tokens": 2, "total_tokens": 24},
            },
        },
        "error": None,
    }


def test_failures_have_no_response() -> None:
    refused = openai_record(error_record("r1", "No prompt.", 5), "a" * 32, "gemma")
    assert refused == {
        "id": f"batch_req_{'a' * 24}",
        "custom_id": "r1",
        "response": None,
        "error": {"code": "invalid_request", "message": "No prompt."},
    }
    failed = Result("He", [5], "error", 1, RequestStats(), error="It broke.")
    line = openai_record(make_record("r1", failed, 5), "a" * 32, "gemma")
    assert line["response"] is None
    assert line["error"] == {"code": "generation_failed", "message": "It broke."}
    json.dumps(line)
