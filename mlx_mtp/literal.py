"""What is said as text. Owns: which strings a tokenizer takes for control tokens, and how those
that stand in a message reach the model as the characters they are.

A tokenizer looks for its control tokens in all that a template has written, so a `<turn|>` that was
typed, or that came with a file, would end the turn of who said it. So each such string gets a cut
behind its first character before the template sees it, and what the template wrote is encoded piece
by piece from cut to cut. No piece holds a control token that the template did not write; the
characters are those that were said; a text without such strings keeps its ids.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any

from mlx_mtp.types import Message

CHANNEL_START, CHANNEL_END = "<|channel>", "<channel|>"
TOOL_MARKERS = ("<|tool_call>", "<tool_call|>", '<|"|>')
THINK = "<|think|>"

_OWN_WORDS = (CHANNEL_START, CHANNEL_END, *TOOL_MARKERS)
MEANT: dict[str, tuple[str, ...]] = {
    "assistant": _OWN_WORDS,
    "model": _OWN_WORDS,
    "system": (THINK,),
    "developer": (THINK,),
}
"""Control tokens that stay what they are in the content of a role: a reply holds its tool calls and
maybe its thinking, which templates strike out; a system prompt may switch thinking on, as Gemma's
guide has it."""

_CONTROL_LIKE = re.compile(r"<\|[^<>]+>|<[^<>]+\|>|<unused\d+>")


def is_control(text: str) -> bool:
    """Whether a token is one by its looks, also where a tokenizer does not call it special."""
    return _CONTROL_LIKE.fullmatch(text) is not None


class ControlTokens:
    """The control tokens of a tokenizer.

    Args:
        texts: how they are written.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first))
        # In a lookahead, so that those are found, too, that begin within another.
        self._found = re.compile(f"(?=({alternatives}))") if longest_first else None
        self._cut = f"\ue001{secrets.token_hex(8)}\ue001"

    def cut(self, message: Message) -> Message:
        """A message whose texts hold no control tokens but those that its role may mean."""
        meant = {"role": (), "content": MEANT.get(str(message.get("role")), ())}
        return {key: self._within(value, meant.get(key, ())) for key, value in message.items()}

    def pieces(self, text: str) -> list[str]:
        """What a template wrote of such messages, from cut to cut."""
        return text.split(self._cut)

    def _within(self, value: Any, meant: tuple[str, ...]) -> Any:
        if isinstance(value, str):
            return self._in_text(value, meant)
        if isinstance(value, dict):
            return {self._within(k, ()): self._within(v, ()) for k, v in value.items()}
        return [self._within(one, ()) for one in value] if isinstance(value, list) else value

    def _in_text(self, text: str, meant: tuple[str, ...]) -> str:
        starts = () if self._found is None else self._found.finditer(text)
        places = [found.start() + 1 for found in starts if found[1] not in meant]
        if not places:
            return text
        return self._cut.join(
            text[begin:end] for begin, end in zip([0, *places], [*places, None], strict=True)
        )
