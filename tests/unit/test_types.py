"""Parameters and requests refuse what cannot be served, with a sentence."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from mlx_mtp.errors import UsageError
from mlx_mtp.types import Request, SamplingParams


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0. Give a whole number at least 1."),
        ({"max_tokens": 1.5}, "max_tokens is 1.5. Give a whole number at least 1."),
        ({"max_tokens": True}, "max_tokens is True. Give a whole number at least 1."),
        ({"temperature": -1}, "temperature is -1. Give a number from 0 to 1000000."),
        ({"temperature": float("nan")}, "temperature is nan. Give a number from 0 to 1000000."),
        (
            {"temperature": 10**400},
            f"temperature is {10**400}. Give a number from 0 to 1000000.",
        ),
        ({"top_p": 1.1}, "top_p is 1.1. Give a number from 0 to 1."),
        ({"top_p": 0}, "top_p is 0, which keeps no token. Give a top_p in (0, 1]."),
        ({"top_k": -1}, "top_k is -1. Give a whole number at least 0."),
        ({"min_p": "x"}, "min_p is 'x'. Give a number from 0 to 1."),
        ({"seed": 2**32}, f"seed is {2**32}. Give a whole number from 0 to {2**32 - 1}."),
        ({"stop": ("",)}, "A stop string is empty or not text. Give non-empty stop strings."),
        ({"stop": 5}, "stop is 5. Give a list."),
        ({"stop_token_ids": (-1,)}, "A stop token id is not a whole number >= 0. Give token ids."),
    ],
)
def test_bad_parameters(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == sentence
    assert caught.value.exit_code == 2


def test_unknown_parameters_name_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Unknown sampling parameter 'top_q'. Did you mean top_p"):
        SamplingParams.from_dict({"top_q": 0.5})
    with pytest.raises(UsageError, match="Known: max_tokens, temperature"):
        SamplingParams.from_dict({"logit_bias": {}})
    assert SamplingParams.from_dict({"top_k": 3}) == SamplingParams(top_k=3)


def test_parameters_are_frozen_and_normal() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    with pytest.raises(FrozenInstanceError):
        params.top_k = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "given",
    [
        {"token_ids": ["a"]},
        {"token_ids": [1.5]},
        {"token_ids": 5},
        {"prompt": 5},
        {"messages": "hi"},
        {"prompt": "x", "params": {"temperature": 0}},
    ],
)
def test_a_request_of_the_wrong_type_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Request(**given)


@pytest.mark.parametrize(
    "given", [{}, {"prompt": "a", "messages": []}, {"token_ids": [], "prompt": ""}]
)
def test_a_request_is_one_thing(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="exactly one of prompt, messages and token_ids"):
        Request(**given)
