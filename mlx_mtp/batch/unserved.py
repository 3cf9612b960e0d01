"""What rows ask for elsewhere and cannot have here. Owns: the names, and why.

A row that silently lost its tools, its schema or its penalties would be found out only after the
night, so each of them is refused by name.
"""

from __future__ import annotations

from mlx_mtp.errors import UsageError

_TOOLS = "tools cannot be called in a batch"
_TEXT_IN = "only text can be read"
_TEXT_OUT = "only text can be written"
_PENALTIES = "penalties are not computed"
_LOGPROBS = "log probabilities are not reported"
_FORMAT = "the output cannot be held to a format"
_WHOLE = "a batch writes whole answers"
_ONE = "each row has one answer"
UNSERVED = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "web_search_options": _TOOLS,
    "response_format": _FORMAT,
    "json_schema": _FORMAT,
    "grammar": _FORMAT,
    "guided_json": _FORMAT,
    "guided_regex": _FORMAT,
    "guided_choice": _FORMAT,
    "guided_grammar": _FORMAT,
    "structured_outputs": _FORMAT,
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "presence_penalty": _PENALTIES,
    "frequency_penalty": _PENALTIES,
    "repetition_penalty": _PENALTIES,
    "length_penalty": _PENALTIES,
    "logit_bias": "tokens cannot be biased",
    "n": _ONE,
    "best_of": _ONE,
    "images": _TEXT_IN,
    "image_url": _TEXT_IN,
    "input_audio": _TEXT_IN,
    "videos": _TEXT_IN,
    "modalities": _TEXT_OUT,
    "audio": _TEXT_OUT,
    "stream": _WHOLE,
    "stream_options": _WHOLE,
    "prediction": "predicted outputs are not used",
    "reasoning_effort": "thinking is switched for the whole batch",
    "verbosity": "the model has no such setting",
}


def unserved(where: str, key: str) -> UsageError:
    """What to raise for one of UNSERVED; ``where`` is what holds the key."""
    return UsageError(
        f"The {where} has {key}, but {UNSERVED[key]}.", "Take it out if you can do without."
    )
