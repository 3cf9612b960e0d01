"""Rows of a batch that cannot be served: the line, and the warning that names it."""

from __future__ import annotations

import json
from typing import Any


def row(**keys: Any) -> str:
    return json.dumps(keys)


def asked(**keys: Any) -> str:
    """A row of a prompt and more."""
    return row(prompt="x", **keys)


def body(**keys: Any) -> str:
    """A row as OpenAI's batch API has it."""
    return row(custom_id="a", body={"messages": [user("x")], **keys})


def said(*messages: Any) -> str:
    return row(messages=list(messages))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


ROWS: dict[str, tuple[str | bytes, str]] = {
    "no JSON": (
        "{nope",
        "The line is not valid JSON at column 2: expecting property name enclosed in double quotes. Write one object per line.",
    ),
    "half a row": (
        '{"prompt": "x"',
        "The line is not valid JSON at column 15: expecting ',' delimiter. Write one object per line.",
    ),
    "a list": ("[1, 2]", 'The line is not a JSON object. Write {"prompt": "..."}.'),
    "not a number": (
        '{"prompt": "x", "top_p": NaN}',
        "The line has NaN, which is not JSON. Leave it out or write null.",
    ),
    "a number without end": (
        '{"prompt": "x", "seed": ' + "9" * 5000 + "}",
        "The line has a number that is too long. Write it as text.",
    ),
    "nested too deeply": (
        '{"prompt": ' + "[" * 200 + "]" * 200 + "}",
        "The line is nested deeper than 100. Flatten it.",
    ),
    "a key twice": (
        '{"prompt": "x", "prompt": "y"}',
        "The key 'prompt' occurs twice in one object. Keep one of them.",
    ),
    "NUL bytes": ('{"prompt": "a\0b"}', "The line has NUL bytes. Save it as UTF-8 text."),
    "not UTF-8": (
        b'{"prompt": "\xff"}',
        "The line is not valid UTF-8 at byte 13. Save it as UTF-8 text.",
    ),
    "half a character": (
        '{"prompt": "\\ud800"}',
        "The prompt has half of a surrogate pair at character 1. Write the whole character.",
    ),
    "nothing asked": (row(id="x"), "The row has neither prompt nor messages. Give one of them."),
    "asked twice": (
        asked(messages=[user("x")]),
        "The row has both prompt and messages. Give one of them.",
    ),
    "a prompt that is a number": (
        row(prompt=7),
        "The prompt is not text. Give a string, or a list as messages.",
    ),
    "a blank prompt": (row(prompt=" \n"), "The prompt is blank. Write one or leave the row out."),
    "a key that is nearly right": (row(promt="x"), "Unknown key 'promt'. Did you mean prompt?"),
    "a setting that is nearly right": (
        asked(temprature=1),
        "Unknown key 'temprature'. Did you mean temperature?",
    ),
    "a key like none": (
        asked(zzz=1),
        "Unknown key 'zzz'. Known: id, prompt, messages, max_tokens, temperature, top_k, top_p, min_p, seed, stop, stop_token_ids, ignore_eos.",
    ),
    "an id that is a list": (
        asked(id=["a"]),
        "The id is neither text nor a whole number. Give a text.",
    ),
    "an empty id": (asked(id=""), "The id is empty. Give one or leave it out."),
    "no messages": (
        said(),
        'The messages are not a list with at least one message. Give [{"role": "user", "content": "..."}].',
    ),
    "messages that are text": (
        row(messages="x"),
        'The messages are not a list with at least one message. Give [{"role": "user", "content": "..."}].',
    ),
    "a message that is text": (said("x"), "Message 1 is not an object. Give its role and content."),
    "an unknown role": (
        said({"role": "usr", "content": "x"}),
        "Message 1 has the unknown role 'usr'. Did you mean user?",
    ),
    "a message without a role": (
        said({"content": "x"}),
        "Message 1 has no role. Known: system, developer, user, assistant, model, tool.",
    ),
    "a message without content": (
        said({"role": "user"}),
        "The content of message 1 is not text. Give a string or a list of text parts; images and audio cannot be read.",
    ),
    "an image": (
        said(user([{"type": "image_url", "image_url": {"url": "x.png"}}])),
        "The content of message 1 is not text. Give a string or a list of text parts; images and audio cannot be read.",
    ),
    "sound": (
        said(user([{"type": "input_audio", "input_audio": {}}])),
        "The content of message 1 is not text. Give a string or a list of text parts; images and audio cannot be read.",
    ),
    "tokens as text": (asked(max_tokens="9"), "max_tokens is '9'. Give a whole number at least 1."),
    "no tokens": (asked(max_tokens=0), "max_tokens is 0. Give a whole number at least 1."),
    "a temperature in words": (
        asked(temperature="hot"),
        "temperature is 'hot'. Give a number from 0 to 1000000.",
    ),
    "a top_p of 0": (asked(top_p=0), "top_p is 0, which keeps no token. Give a top_p in (0, 1]."),
    "a seed that is true": (
        asked(seed=True),
        "seed is True. Give a whole number from 0 to 4294967295.",
    ),
    "an empty stop": (
        asked(stop=[""]),
        "A stop string is empty or not text. Give non-empty stop strings.",
    ),
    "a stop that is an object": (asked(stop={"a": 1}), "stop is an object. Give a list."),
    "an end that is ignored by half": (
        asked(ignore_eos="yes"),
        "ignore_eos is 'yes'. Give true or false.",
    ),
    "a stop id below 0": (
        asked(stop_token_ids=[-1]),
        "A stop token id is not a whole number >= 0. Give token ids.",
    ),
    "frequency_penalty": (
        asked(frequency_penalty=0.5),
        "The row has frequency_penalty, but penalties are not computed. Take it out if you can do without.",
    ),
    "presence_penalty": (
        asked(presence_penalty=0.5),
        "The row has presence_penalty, but penalties are not computed. Take it out if you can do without.",
    ),
    "repetition_penalty": (
        asked(repetition_penalty=1.1),
        "The row has repetition_penalty, but penalties are not computed. Take it out if you can do without.",
    ),
    "logit_bias": (
        asked(logit_bias={"5": 1}),
        "The row has logit_bias, but tokens cannot be biased. Take it out if you can do without.",
    ),
    "logprobs": (
        asked(logprobs=True),
        "The row has logprobs, but log probabilities are not reported. Take it out if you can do without.",
    ),
    "n": (
        asked(n=2),
        "The row has n, but each row has one answer. Take it out if you can do without.",
    ),
    "tools": (
        asked(tools=[{}]),
        "The row has tools, but tools cannot be called in a batch. Take it out if you can do without.",
    ),
    "response_format": (
        asked(response_format={"type": "json_object"}),
        "The row has response_format, but the output cannot be held to a format. Take it out if you can do without.",
    ),
    "grammar": (
        asked(grammar="root ::= x"),
        "The row has grammar, but the output cannot be held to a format. Take it out if you can do without.",
    ),
    "images": (
        asked(images=["x.png"]),
        "The row has images, but only text can be read. Take it out if you can do without.",
    ),
    "audio": (
        asked(audio="x.wav"),
        "The row has audio, but only text can be written. Take it out if you can do without.",
    ),
    "stream": (
        asked(stream=True),
        "The row has stream, but a batch writes whole answers. Take it out if you can do without.",
    ),
    "OpenAI: no custom_id": (
        row(body={}),
        "The row has no custom_id. Give each row a custom_id of its own.",
    ),
    "OpenAI: no body": (
        row(custom_id="a"),
        "The body is not an object. Give a request to /v1/chat/completions.",
    ),
    "OpenAI: another method": (
        row(custom_id="a", method="GET", body={}),
        "The method is 'GET'. Only POST is served.",
    ),
    "OpenAI: another url": (
        row(custom_id="a", url="/v1/embeddings", body={}),
        "The url is '/v1/embeddings'. Only /v1/chat/completions is served.",
    ),
    "OpenAI: a key beside the body": (
        row(custom_id="a", bodi={}),
        "Unknown key 'bodi'. Did you mean body?",
    ),
    "OpenAI: an unknown key": (
        body(temprature=1),
        "Unknown key 'temprature' in the body. Did you mean temperature?",
    ),
    "OpenAI: frequency_penalty": (
        body(frequency_penalty=0.5),
        "The body has frequency_penalty, but penalties are not computed. Take it out if you can do without.",
    ),
    "OpenAI: presence_penalty": (
        body(presence_penalty=0.5),
        "The body has presence_penalty, but penalties are not computed. Take it out if you can do without.",
    ),
    "OpenAI: repetition_penalty": (
        body(repetition_penalty=1.1),
        "The body has repetition_penalty, but penalties are not computed. Take it out if you can do without.",
    ),
    "OpenAI: logit_bias": (
        body(logit_bias={"5": 1}),
        "The body has logit_bias, but tokens cannot be biased. Take it out if you can do without.",
    ),
    "OpenAI: logprobs": (
        body(logprobs=True),
        "The body has logprobs, but log probabilities are not reported. Take it out if you can do without.",
    ),
    "OpenAI: n": (body(n=2), "n is 2. Each row has one answer: write n rows."),
    "OpenAI: tools": (
        body(tools=[{}]),
        "The body has tools, but tools cannot be called in a batch. Take it out if you can do without.",
    ),
    "OpenAI: response_format": (
        body(response_format={"type": "json_object"}),
        "The body has response_format, but the output cannot be held to a format. Take it out if you can do without.",
    ),
    "OpenAI: grammar": (
        body(guided_grammar="root ::= x"),
        "The body has guided_grammar, but the output cannot be held to a format. Take it out if you can do without.",
    ),
    "OpenAI: audio": (
        body(modalities=["text", "audio"]),
        "The body has modalities, but only text can be written. Take it out if you can do without.",
    ),
    "OpenAI: stream": (
        body(stream=True),
        "The body has stream, but a batch writes whole answers. Take it out if you can do without.",
    ),
    "OpenAI: two limits": (
        body(max_tokens=3, max_completion_tokens=4),
        "max_completion_tokens and max_tokens differ. Give one of them: they mean the same.",
    ),
}
