"""Conversations before a chat template sees them. Owns: which roles there are, and the check that
each message has one of them and a plain text. Knows no template and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_mtp.errors import UsageError, nearest_hint
from mlx_mtp.types import Message

ROLES = ("system", "developer", "user", "assistant", "model", "tool")


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages with plain text contents. Raises UsageError that names the first bad one."""
    if not messages:
        raise UsageError("The conversation is empty.", "Give at least one message.")
    return [_checked_message(message, n) for n, message in enumerate(messages, start=1)]


def _checked_message(message: Message, n: int) -> Message:
    if not isinstance(message, dict):
        raise UsageError(
            f"Message {n} is not a mapping.", 'Give messages as {"role": ..., "content": ...}.'
        )
    role = message.get("role")
    if role is None:
        raise UsageError(f"Message {n} has no role.", f"Known: {', '.join(ROLES)}.")
    if role not in ROLES:
        hint = nearest_hint(str(role), ROLES)
        raise UsageError(f"Message {n} has the unknown role {role!r}.", hint)
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if content is None:
        raise UsageError(f"Message {n} has no content.", "Give its text as content.")
    if not isinstance(content, list) or not content:
        raise UsageError(f"The content of message {n} is not text.", "Give a string.")
    # Some templates read the first part only, so all of them get one string.
    return {**message, "content": "".join(_part_text(part, n) for part in content)}


def _part_text(part: Any, n: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise UsageError(
        f"Message {n} has a part of type {kind!r}, and only text can be read.",
        "Leave images, audio and video out.",
    )
