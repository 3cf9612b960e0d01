"""A conversation. Owns: its messages and settings, turns through the model's kept row, going back,
making room in the context, and keeping it all on the disk. Knows no terminal.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from mlx_mtp.chat.settings import Settings
from mlx_mtp.chat.store import Saved, Store, new_id
from mlx_mtp.errors import MlxMtpError, UsageError
from mlx_mtp.transcript import TOKEN_IDS
from mlx_mtp.types import Chunk, FinishReason, Message, RequestStats

if TYPE_CHECKING:  # loads mlx, which takes seconds
    from mlx_mtp.llm import LLM

SAVE_SECONDS = 2.0
"""While a reply streams, it is on the disk at most this late."""
NEARLY_FULL = 0.85
"""Share of the context from which on its end is announced."""
LEAST_ROOM = 16
"""Tokens that a reply has room for at least, or it is not begun."""
SUMMARY = (
    "Summarise our conversation so far, so that it can go on from the summary alone: what was "
    "asked, what was found and decided, and what is open. Be brief."
)
SUMMARISED = "Summary of our conversation so far:\n\n"


class ChatSession:
    """One conversation with one model.

    Args:
        llm: the model.
        store: where conversations are kept; None keeps nothing.
        saved: one to go on with; None begins one.
        settings: to begin with.

    Attributes:
        messages: system, user and assistant, the oldest first.
        settings: they may be replaced at any time.
        stats, finish_reason: of the last reply.
        kept: tokens of it that are in the conversation; None: it was a summary.
        used: tokens of the context that the conversation takes, as far as that is known.
        other_model: the model that a conversation was held with before, or None.
        attached: texts of files that go with the next message.
        save_error: why the conversation could not be saved last time, or None.
    """

    def __init__(
        self,
        llm: LLM,
        store: Store | None,
        settings: Settings,
        saved: Saved | None = None,
    ) -> None:
        self.llm = llm
        self.store = store
        self.settings = settings
        self.stats = RequestStats()
        self.finish_reason: FinishReason | None = None
        self.kept: int | None = 0
        self.used = 0
        self.attached: list[str] = []
        self.save_error: MlxMtpError | None = None
        self.other_model: str | None = None
        self.saved = Saved(new_id(), llm.model_name)
        if saved is not None:
            self._hold(saved)
        self._row = llm.session()
        self._saved_at = 0.0

    @property
    def messages(self) -> list[Message]:
        return self.saved.messages

    @property
    def system(self) -> str | None:
        """The system prompt."""
        first = self.messages[:1]
        return str(first[0]["content"]) if first and first[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        own = [{"role": "system", "content": text}] if text else []
        self.saved.messages = own + [m for m in self.messages if m["role"] != "system"]
        self.save()

    @property
    def turns(self) -> int:
        """User messages."""
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def prefilled(self) -> int:
        """Prompt tokens of the last turn that were not in memory yet."""
        return self._row.turn.prefilled_tokens

    @property
    def is_nearly_full(self) -> bool:
        return self.used >= NEARLY_FULL * self.llm.context

    @property
    def is_full(self) -> bool:
        """Whether the context had no room for more of the last reply."""
        return self._row.turn.prompt_tokens + self.stats.tokens >= self.llm.context

    # Turns.

    def ask(self, text: str) -> Generator[Chunk]:
        """Say something and stream the reply. Raises as `reply`; then nothing was said."""
        before, said = self.messages, "".join(self.attached) + text
        head = before
        if before and before[-1]["role"] == "user":  # its reply never began
            head, said = before[:-1], f"{before[-1]['content']}\n\n{said}"
        messages = [*head, {"role": "user", "content": said}]
        if not self._has_room(messages):
            raise UsageError(
                f"With this message the conversation has {self._count(messages)} tokens, and the "
                f"context holds {self.llm.context}.",
                "/compact summarises what was said, /drop N leaves out the N oldest turns"
                + (", /file none the files" if self.attached else "")
                + "; then say it again.",
            )
        self.saved.messages = messages
        try:
            chunks = self.reply()
        except UsageError:
            self.saved.messages = before
            raise
        self.attached = []
        return chunks

    def reply(self) -> Generator[Chunk]:
        """Stream a reply to the last message; it becomes part of the conversation as it comes.

        Raises:
            UsageError: there is nothing to reply to, or the context has no room for a reply.
            MlxMtpError: while streaming, as `Session.send`.
        """
        return self._reply_to(len(self.messages))

    def _reply_to(self, place: int, *, new_seed: bool = False) -> Generator[Chunk]:
        """Stream a reply that takes the place of all messages from `place` on, once it begins."""
        asked = self.messages[:place]
        if not asked or asked[-1]["role"] != "user":
            raise UsageError("There is nothing to reply to.", "Ask something.")
        params = self.settings.params
        if new_seed or params.seed is None:
            params = replace(params, seed=secrets.randbelow(2**32))
        chunks = self._row.send(
            [as_said(message) for message in asked],
            params,
            draft_depth=self.settings.draft_depth,
            thinking=self.settings.thinks,
        )
        self.save()
        return self._receive(chunks, place, params.seed)

    def stop(self) -> None:
        """End the reply under way after its present round; a signal handler may call it."""
        self._row.stop()

    def regenerate(self) -> Generator[Chunk]:
        """Another reply to the last message. Raises as `reply`."""
        place = len(self.messages)
        if self.messages and self.messages[-1]["role"] == "assistant":
            place -= 1
        return self._reply_to(place, new_seed=self.settings.params.temperature != 0)

    def undo(self) -> str:
        """Take the last turn back; what the user had said. Raises UsageError: there is none."""
        for place in range(len(self.messages) - 1, -1, -1):
            if self.messages[place]["role"] == "user":
                said = str(self.messages[place]["content"])
                self.saved.messages = self.messages[:place]
                self.save()
                return said
        raise UsageError("There is no turn to take back.", "Ask something first.")

    def clear(self) -> None:
        """Begin a new conversation with the same system prompt; the old one stays saved."""
        system = [message for message in self.messages if message["role"] == "system"]
        self.saved = Saved(new_id(), self.llm.model_name, system)
        self._begin()

    def take_up(self, saved: Saved) -> None:
        """Go on with a saved conversation and its settings. Raises UsageError: bad settings."""
        self.settings = Settings.from_changed(saved.settings)
        self._hold(saved)
        self._begin()

    def _hold(self, saved: Saved) -> None:
        self.other_model = saved.model if saved.model != self.llm.model_name else None
        self.saved = saved
        self.saved.model = self.llm.model_name

    def _begin(self) -> None:
        self.attached, self.used, self.kept = [], 0, 0
        self.stats, self.finish_reason = RequestStats(), None

    # The context.

    def drop(self, turns: int) -> int:
        """Leave out the oldest turns; how many that were. The saved conversation keeps them: this
        one goes on under a new id. Raises UsageError: there are not more than one."""
        places = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        if len(places) < 2:
            raise UsageError("There is no older turn to drop.", "/clear begins anew.")
        if not 1 <= turns < len(places):
            raise UsageError(
                f"{turns} of {len(places)} turns cannot be dropped.",
                f"Drop from 1 to {len(places) - 1}.",
            )
        head = [message for message in self.messages[:1] if message["role"] == "system"]
        self._branch(head + self.messages[places[turns] :])
        return turns

    def compact(self) -> Generator[Chunk]:
        """Have the model summarise the conversation; streams the summary, which then stands in
        its place. The saved conversation stays; this one goes on under a new id.

        Raises UsageError: nothing was said yet, or there is no room for a summary.
        """
        if not self.turns:
            raise UsageError("There is nothing to summarise.", "Ask something first.")
        asked = [*self.messages, {"role": "user", "content": SUMMARY}]
        if not self._has_room(asked):
            raise UsageError(
                "There is no room for a summary in the context.",
                "/drop N leaves out the N oldest turns.",
            )
        params = replace(self.settings.params, temperature=0.0, stop=(), max_tokens=None)
        said = [as_said(message) for message in asked]
        return self._summarise(self._row.send(said, params, draft_depth=self.settings.draft_depth))

    def _summarise(self, chunks: Generator[Chunk]) -> Generator[Chunk]:
        text = ""
        self.stats, self.finish_reason, self.kept = RequestStats(), "cancelled", None
        for chunk in chunks:
            text += chunk.text
            self.finish_reason = chunk.finish_reason or "cancelled"
            self.stats = chunk.stats or self.stats
            yield chunk
        if self.finish_reason == "stop" and text.strip():
            head = [message for message in self.messages[:1] if message["role"] == "system"]
            said = {"role": "user", "content": SUMMARISED + text.strip()}
            self._branch([*head, said, {"role": "assistant", "content": "Understood."}])

    def _branch(self, messages: list[Message]) -> None:
        self.save()
        self.saved = Saved(new_id(), self.llm.model_name, messages)
        self.used = self._count(messages)
        self.save()

    def _count(self, messages: list[Message]) -> int:
        said = [as_said(message) for message in messages]
        return self._row.count(said, thinking=self.settings.thinks)

    def _has_room(self, messages: list[Message]) -> bool:
        return self._count(messages) + LEAST_ROOM <= self.llm.context

    # Keeping.

    def save(self) -> None:
        """Bring the conversation to the disk, if anything was said; `save_error` says how it went:
        a full disk must not end a conversation."""
        if self.store is None or not self.turns:
            return
        self.saved.settings = self.settings.changed()
        self._saved_at = monotonic()
        try:
            self.store.save(self.saved)
            self.save_error = None
        except MlxMtpError as error:
            self.save_error = error

    def close(self) -> None:
        """End the reply under way, save, and give the memory back."""
        self._row.close()
        self.save()

    def _receive(self, chunks: Generator[Chunk], place: int, seed: int | None) -> Generator[Chunk]:
        messages, thinking = self.messages, ""
        self.stats, self.finish_reason, self.kept = RequestStats(), None, 0
        try:
            for chunk in chunks:
                thinking += chunk.thinking
                self.kept += len(chunk.token_ids)
                self.finish_reason = chunk.finish_reason
                self.stats = chunk.stats or self.stats
                if monotonic() - self._saved_at > SAVE_SECONDS:
                    messages[place:] = [self._message(thinking, seed)]
                    self.save()
                yield chunk
        finally:
            self.finish_reason = self.finish_reason or "cancelled"
            self.used = self._row.turn.prompt_tokens + self.kept
            if self._row.has_reply:
                messages[place:] = [self._message(thinking, seed)]
            self.save()

    def _message(self, thinking: str, seed: int | None) -> Message:
        about: dict[str, Any] = {"seed": seed, "finish_reason": self.finish_reason or "cancelled"}
        if thinking:
            about["thinking"] = thinking
        return {**self._row.reply(), **about}


def as_said(message: Message) -> Message:
    """A message without what is kept about it: a template might know such names, too."""
    return {key: message[key] for key in ("role", "content", TOKEN_IDS) if key in message}
