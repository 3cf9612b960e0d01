"""Rows as OpenAI's batch API writes them, in and out. Owns: which keys of a chat completion request
are served, ignored or refused, and the shape of an output line. Knows nothing of files.

Source: OpenAI's API reference, "Batch" (request input and output objects) and "Chat completions".
What would change the answer and cannot be done is refused by name: a row that silently loses its
tools or its schema would be found out only after the night.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_mtp.batch.rows import Row, RowOptions, checked_messages, make_row
from mlx_mtp.batch.unserved import UNSERVED, unserved
from mlx_mtp.errors import UsageError, nearest_hint

URL = "/v1/chat/completions"

_ROW_KEYS = ("custom_id", "method", "url", "body")
_PARAMS = ("temperature", "top_p", "top_k", "min_p", "stop")
_SERVED = ("messages", "max_tokens", "max_completion_tokens", "seed", "n", *_PARAMS)
_IGNORED = (
    "model", "user", "metadata", "store", "service_tier",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls",
)  # fmt: skip
"""What an answer's text does not depend on (parallel_tool_calls: without tools)."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none",),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
}
"""Values that ask for what happens anyway, besides null, false, 0 and empty ones."""


def is_openai(record: Mapping[str, Any]) -> bool:
    """Whether a JSON object is meant as a row of OpenAI's batch API."""
    return "custom_id" in record or "body" in record


def openai_row(record: Mapping[str, Any], index: int, place: str, options: RowOptions) -> Row:
    """A row of ``{"custom_id", "method"?, "url"?, "body": {...}}``.

    Raises:
        UsageError: what is missing, unknown, not served or out of range, by its name.
    """
    for key in record:
        if key not in _ROW_KEYS:
            raise UsageError(f"Unknown key {key!r}.", nearest_hint(key, _ROW_KEYS))
    if record.get("custom_id") is None:
        raise UsageError("The row has no custom_id.", "Give each row a custom_id of its own.")
    for key, wanted in (("method", "POST"), ("url", URL)):
        if record.get(key) not in (None, wanted):
            raise UsageError(f"The {key} is {record[key]!r}.", f"Only {wanted} is served.")
    body = record.get("body")
    if not isinstance(body, dict):
        raise UsageError("The body is not an object.", f"Give a request to {URL}.")
    _check_keys(body)
    messages = checked_messages(body.get("messages"))
    return make_row(
        index, place, record["custom_id"], messages, _own_params(body), options, is_openai=True
    )


def openai_record(record: Mapping[str, Any], key: str, model: str) -> dict[str, Any]:
    """An output line: the batch API's object, with ``response`` or ``error`` null.

    Args:
        record: a stored record (`mlx_mtp.batch.output`); its id is the custom_id.
        key: the row's key, hex; the ids of the answer are made of it, so they can be repeated.
        model: the name of the model.
    """
    number = key[:24]
    line: dict[str, Any] = {"id": f"batch_req_{number}", "custom_id": record["id"]}
    if record["error"] is not None:
        # a row that was never begun has no seed
        code = "invalid_request" if record["seed"] is None else "generation_failed"
        error = {"code": code, "message": record["error"]["message"]}
        return {**line, "response": None, "error": error}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": record["text"], "refusal": None},
        "logprobs": None,
        "finish_reason": record["finish_reason"],
    }
    body = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": record["created"],
        "model": model,
        "choices": [choice],
        "usage": record["usage"],
    }
    response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
    return {**line, "response": response, "error": None}


def _check_keys(body: Mapping[str, Any]) -> None:
    for key, value in body.items():
        if key in _SERVED or key in _IGNORED:
            continue
        if key not in UNSERVED:
            known = (*_SERVED, *_IGNORED)
            raise UsageError(f"Unknown key {key!r} in the body.", nearest_hint(key, known))
        if value and value not in _NEUTRAL.get(key, ()):
            raise unserved("body", key)
    choices = body.get("n")
    if choices is not None and (choices != 1 or isinstance(choices, bool)):
        raise UsageError(f"n is {choices!r}.", "Each row has one answer: write n rows.")


def _own_params(body: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: body[name] for name in _PARAMS if name in body}
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    if None not in limits and limits[0] != limits[1]:
        raise UsageError(
            "max_completion_tokens and max_tokens differ.", "Give one of them: they mean the same."
        )
    own["max_tokens"] = limits[1] if limits[0] is None else limits[0]
    seed = body.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool):
        seed %= 2**32  # OpenAI takes any 64-bit integer
    own["seed"] = seed
    return own
