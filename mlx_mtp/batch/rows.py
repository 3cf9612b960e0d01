"""Rows of a batch: what one line, record or file of the input asks for. Owns: the check of
messages, the merge of a row's settings over the call's, and each row's seed and key. Knows nothing
of files or of the model.

A row that cannot be served raises UsageError here; the source turns it into a `BadRow`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any

from mlx_mtp.batch.template import parse_template
from mlx_mtp.batch.unserved import UNSERVED, unserved
from mlx_mtp.errors import UsageError, nearest_hint
from mlx_mtp.messages import ROLES
from mlx_mtp.plain import printable, quoted
from mlx_mtp.types import Message, SamplingParams

PARAM_NAMES = tuple(item.name for item in fields(SamplingParams))
MAX_SENTENCE = 300
"""Most characters of a bad row's sentence: it may quote a value of any length."""

_MODEL_DEFAULTS = SamplingParams()
_ROW_KEYS = ("id", "prompt", "messages", *PARAM_NAMES)


@dataclass(frozen=True)
class Row:
    """One thing to generate.

    Attributes:
        index: its number among the rows of the input, from 0.
        place: where it stands, as messages say it: "line 12", "file notes/a.txt".
        id: its name in the output.
        messages: the conversation, the call's system message included.
        params: its own settings over the call's; the seed is set where the call or the row has one.
        is_openai: it was written as OpenAI's batch API wants it.
    """

    index: int
    place: str
    id: str
    messages: list[Message]
    params: SamplingParams
    is_openai: bool = False


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be served.

    Attributes:
        index, place: as in `Row`.
        id: its name, None where it could not be read.
        error: one sentence of what is wrong and one of what to do; printable Unicode, not long.
    """

    index: int
    place: str
    id: str | None
    error: str


@dataclass(frozen=True)
class RowOptions:
    """What the call says for all rows.

    Attributes:
        params: settings of a row that has none of its own.
        seed: rows without a seed get one made of this and their id.
        system: a system message for rows that have none.
        template: a prompt with ``{field}`` placeholders.
        prompt_column: the CSV column that is the prompt.
    """

    params: SamplingParams = _MODEL_DEFAULTS
    seed: int | None = None
    system: str | None = None
    template: str | None = None
    prompt_column: str | None = None


def make_row(
    index: int,
    place: str,
    row_id: object,
    messages: list[Message],
    own: Mapping[str, Any],
    options: RowOptions,
    is_openai: bool = False,
) -> Row:
    """A row of checked messages and of settings by their SamplingParams names.

    Raises:
        UsageError: the id is no name, or a setting is out of range.
    """
    name = checked_id(row_id, index)
    has_system = any(message["role"] in ("system", "developer") for message in messages)
    if options.system is not None and not has_system:
        messages = [{"role": "system", "content": options.system}, *messages]
    return Row(index, place, name, messages, _merged_params(own, name, options), is_openai)


def prompt_row(index: int, place: str, row_id: object, prompt: Any, options: RowOptions) -> Row:
    """A row of one prompt without settings of its own. Raises UsageError: blank or no text."""
    return make_row(index, place, row_id, _user_message(prompt), {}, options)


def simple_row(record: Mapping[str, Any], index: int, place: str, options: RowOptions) -> Row:
    """A row of ``{"id"?, "prompt" | "messages", ...settings}``, or of any fields with a template.

    Raises:
        UsageError: what is missing, unknown, of the wrong type or out of range, by its name.
    """
    own = {name: record[name] for name in PARAM_NAMES if name in record}
    if options.template is not None:
        messages = _user_message(parse_template(options.template).fill(record))
        return make_row(index, place, record.get("id"), messages, own, options)
    for key in record:
        if key in UNSERVED:
            raise unserved("row", key)
        if key not in _ROW_KEYS:
            raise UsageError(f"Unknown key {quoted(key)}.", nearest_hint(key, _ROW_KEYS))
    prompt, given = record.get("prompt"), record.get("messages")
    if (prompt is None) == (given is None):
        which = "neither prompt nor messages" if prompt is None else "both prompt and messages"
        raise UsageError(f"The row has {which}.", "Give one of them.")
    messages = _user_message(prompt) if given is None else checked_messages(given)
    return make_row(index, place, record.get("id"), messages, own, options)


def bad_row(index: int, place: str, error: UsageError, row_id: object = None) -> BadRow:
    """The row that an error is about; an id of the wrong type is dropped."""
    text = f"{_cut(error.message)} {_cut(error.hint)}".rstrip()
    try:
        name = None if row_id is None else checked_id(row_id, index)
    except UsageError:
        name = None
    return BadRow(index, place, name, printable(text))


def row_key(row: Row, model: str, thinking: bool, *, exact: bool = False) -> str:
    """32 hex digits that change with anything that could change the row's answer."""
    asked = {
        "model": model,
        "thinking": thinking,
        "id": row.id,
        "messages": row.messages,
        "params": vars(row.params),  # asdict copies, which takes longer than all the rest
        **({"exact": True} if exact else {}),  # older journals have no such key
    }
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:32]


def row_seed(seed: int, row_id: str) -> int:
    """The seed of a row, 0 <= seed < 2**32: the same in whatever order the rows are served."""
    digest = sha256(f"{seed}:".encode() + row_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big")


def checked_id(value: object, index: int) -> str:
    """A row's name: its number where it has none. Raises UsageError for other than text or int."""
    if value is None:
        return str(index)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UsageError("The id is neither text nor a whole number.", "Give a text.")
    if value == "":
        raise UsageError("The id is empty.", "Give one or leave it out.")
    return _checked_unicode(str(value), "The id")


def checked_messages(messages: Any) -> list[Message]:
    """Messages as the chat template can take them; it checks their order. Raises UsageError."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(
            "The messages are not a list with at least one message.",
            'Give [{"role": "user", "content": "..."}].',
        )
    for n, message in enumerate(messages, start=1):
        _check_message(message, n)
    return messages


def _merged_params(own: Mapping[str, Any], row_id: str, options: RowOptions) -> SamplingParams:
    given = {name: value for name, value in own.items() if value is not None}
    for name in ("stop", "stop_token_ids"):
        if isinstance(given.get(name), dict):
            raise UsageError(f"{name} is an object.", "Give a list.")
    if not isinstance(given.get("ignore_eos", False), bool):
        raise UsageError(f"ignore_eos is {given['ignore_eos']!r}.", "Give true or false.")
    if "seed" not in given and options.seed is not None:
        given["seed"] = row_seed(options.seed, row_id)
    return replace(options.params, **given) if given else options.params


def _user_message(prompt: Any) -> list[Message]:
    if not isinstance(prompt, str):
        raise UsageError("The prompt is not text.", "Give a string, or a list as messages.")
    if not prompt.strip():
        raise UsageError("The prompt is blank.", "Write one or leave the row out.")
    return [{"role": "user", "content": _checked_unicode(prompt, "The prompt")}]


def _check_message(message: Any, n: int) -> None:
    if not isinstance(message, dict):
        raise UsageError(f"Message {n} is not an object.", "Give its role and content.")
    role, content = message.get("role"), message.get("content")
    if role is None:
        raise UsageError(f"Message {n} has no role.", f"Known: {', '.join(ROLES)}.")
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(
            f"Message {n} has the unknown role {role!r}.", nearest_hint(str(role), ROLES)
        )
    if content is None and message.get("tool_calls"):
        return
    texts = [_part_text(part) for part in content] if isinstance(content, list) else [content]
    for text in texts or [None]:
        if not isinstance(text, str):
            raise UsageError(
                f"The content of message {n} is not text.",
                "Give a string or a list of text parts; images and audio cannot be read.",
            )
        _checked_unicode(text, f"Message {n}")


def _part_text(part: Any) -> Any:
    return part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None


def _checked_unicode(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{what} has half of a surrogate pair at character {error.start + 1}.",
            "Write the whole character.",
        ) from error
    return text


def _cut(sentence: str) -> str:
    return sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[:MAX_SENTENCE]}..."
