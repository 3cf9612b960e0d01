"""Conversations as token ids. Owns: putting replies back as the ids they were made of.

A reply's text encoded anew need not give the ids that the model produced, and then all K/V behind
it are lost. So a message of the assistant may carry its `token_ids`: they take the place of its
text, as long as they still spell it. What the template writes around them is its own affair.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mlx_mtp.decode.prefix import common
from mlx_mtp.errors import UsageError
from mlx_mtp.tokenizer import Tokenizer
from mlx_mtp.types import Message

TOKEN_IDS = "token_ids"
"""Key of an assistant message's ids: those of its content, without thinking and stop ids."""
_USER: Message = {"role": "user", "content": "."}
_SPEAKERS = ("assistant", "model")


class Rendered(NamedTuple):
    """A conversation as the model gets it.

    Attributes:
        ids: up to where the model answers.
        asked: how many of them come before the last message: a turn that is taken back, or asked
            otherwise, goes on from there.
        lasting: how many of them stay as they are once the answer is part of the conversation: a
            template may strike out thinking, or an empty thought that it ends the prompt with.
            Less the last one, whose hidden state is always computed.
    """

    ids: tuple[int, ...]
    asked: int
    lasting: int


class Transcript:
    """Renders one growing conversation; remembers what it encoded last time.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encoded: dict[str, list[int]] = {}
        self._spelled: dict[tuple[str, int], bool] = {}

    def render(self, messages: Sequence[Message], *, thinking: bool = False) -> Rendered:
        """A conversation's ids. Raises as `Tokenizer.render_chat`, and for ids that are none."""
        before, self._encoded = self._encoded, {}
        ids = self._ids(messages, thinking, before)
        asked = self._before(messages, len(messages) - 1, thinking, before)
        goes_on = [*messages, {"role": "assistant", "content": "."}, _USER]
        lasting = self._before(goes_on, len(messages), thinking, before)
        most = len(ids) - 1
        return Rendered(tuple(ids), common(ids[:most], asked), common(ids[:most], lasting))

    def reply_ids(self, ids: Iterable[int]) -> list[int]:
        """Of all ids that the model produced, those of its answer: the thinking and what ended
        the turn left out."""
        start, end = self._tokenizer.channel_start, self._tokenizer.channel_end
        answer, in_channel = [], False
        for token in ids:
            if token == start:
                in_channel = True
            elif token == end and in_channel:
                in_channel = False
            elif not in_channel:
                answer.append(token)
        while answer and answer[-1] in self._tokenizer.eos_token_ids:
            answer.pop()
        return answer

    def _ids(
        self, messages: Sequence[Message], thinking: bool, before: dict[str, list[int]]
    ) -> list[int]:
        marked, replies = self._marked(messages)
        text = self._tokenizer.render_chat(marked, thinking=thinking)
        ids: list[int] = []
        for marker, reply in replies:
            piece, found, text = text.partition(marker)
            if not found or marker in text:  # the template does something else with it
                plain = [_plain(message) for message in messages]
                return self._tokenizer.encode_chat(plain, thinking=thinking)
            ids += [*self._encode(piece, before), *reply]
        return [*ids, *self._encode(text, before)]

    def _before(
        self,
        messages: Sequence[Message],
        index: int,
        thinking: bool,
        before: dict[str, list[int]],
    ) -> list[int]:
        """Ids of what comes before the content of a message; none where that cannot be told."""
        marker = _marker()
        rest = messages[index + 1 :]
        marked = [*messages[:index], {**_plain(messages[index]), "content": marker}, *rest]
        marked, replies = self._marked(marked)
        try:
            text = self._tokenizer.render_chat(marked, thinking=thinking)
        except UsageError:  # the template knows no conversation that goes on like this
            return []
        text, found, _ = text.partition(marker)
        if not found:
            return []
        ids: list[int] = []
        for inner, reply in replies:
            piece, _, text = text.partition(inner)
            ids += [*self._encode(piece, before), *reply]
        return [*ids, *self._encode(text, before)]

    def _marked(
        self, messages: Sequence[Message]
    ) -> tuple[list[Message], list[tuple[str, list[int]]]]:
        """Messages with a marker in the place of each reply that stands there as ids."""
        marked, replies = [], []
        for message in messages:
            ids = message.get(TOKEN_IDS) if isinstance(message, dict) else None
            message = _plain(message)
            speaks = isinstance(ids, list) and message.get("role") in _SPEAKERS
            if ids and speaks and self._spells(ids, message.get("content")):
                replies.append((_marker(), list(ids)))
                message = {**message, "content": replies[-1][0]}
            marked.append(message)
        return marked, replies

    def _spells(self, ids: Sequence[int], content: object) -> bool:
        """Whether ids are the ids of a text."""
        size = self._tokenizer.vocab_size
        if not isinstance(content, str) or not all(
            isinstance(token, int) and 0 <= token < size for token in ids
        ):
            return False
        key = (content, hash(tuple(ids)))
        if key not in self._spelled:
            self._spelled[key] = self._tokenizer.decode(ids) == content
        return self._spelled[key]

    def _encode(self, piece: str, before: dict[str, list[int]]) -> list[int]:
        ids = before.get(piece)
        if ids is None:
            ids = self._encoded.get(piece) or self._tokenizer.encode_rendered(piece)
        self._encoded[piece] = ids
        return ids


def _plain(message: Message) -> Message:
    """A message as templates know it."""
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if key != TOKEN_IDS}


def _marker() -> str:
    """A text that is nowhere else; no template trims it."""
    return f"\ue000{secrets.token_hex(12)}\ue000"
