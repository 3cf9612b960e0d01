"""The loop of a conversation: read, answer, say how it went. Owns: who is asked in which order, and
what Ctrl-C does while a reply comes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from mlx_mtp import __version__
from mlx_mtp.chat.commands import Commands
from mlx_mtp.chat.figures import (
    gigabytes,
    idle_drafter,
    long_stats_line,
    parked_note,
    thousands,
    turns,
)
from mlx_mtp.chat.input import Reader, edit, unquoted
from mlx_mtp.chat.render import PROMPT, ReplyView, Screen
from mlx_mtp.chat.session import ChatSession
from mlx_mtp.errors import MlxMtpError
from mlx_mtp.types import Chunk

INTERRUPTED = 130
LEAVE_HINT = "Ctrl-C again leaves, and so does Ctrl-D; the conversation is saved."


class Repl:
    """A conversation at a terminal.

    Args:
        chat: the conversation.
        screen: where everything is said.
        reader: where it comes from.
    """

    def __init__(self, chat: ChatSession, screen: Screen, reader: Reader) -> None:
        self.chat = chat
        self.screen = screen
        self.reader = reader
        self._commands = Commands(chat, screen)
        self._warned_of: set[str] = set()

    def run(self) -> int:
        """Talk until the user leaves; the exit code."""
        try:
            self._greet()
            code = self._talk()
        finally:
            self.chat.close()
        self._say_where()
        return code

    def _talk(self) -> int:
        was_interrupted = False
        while True:
            try:
                entry = self.reader.read()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if was_interrupted:
                    return INTERRUPTED
                was_interrupted = True
                self.screen.note(LEAVE_HINT)
                continue
            was_interrupted = False
            if not self._take(entry):
                return 0

    def _take(self, entry: str) -> bool:
        """Do what an entry asks for; False: leave."""
        text, is_quoted = unquoted(entry)
        if not text.strip():
            return True
        try:
            if not text.startswith("/") or is_quoted:
                self._show(lambda: self.chat.ask(text))
                return True
            outcome = self._commands.run(text)
            if outcome == "leave":
                return False
            if outcome == "edit":
                written = edit(text.removeprefix("/edit").strip())
                if written.strip():
                    self.screen.line(written)
                    self._show(lambda: self.chat.ask(written))
            elif outcome is not None:
                self._show(lambda: outcome)
        except MlxMtpError as error:
            self.screen.error(error.message, error.hint)
        except KeyboardInterrupt:
            self.screen.end_line()
        return True

    # A reply.

    def _show(self, begin: Callable[[], Generator[Chunk]]) -> None:
        """Stream a reply and say how it went. Raises MlxMtpError as it does."""
        view = ReplyView(self.screen, self.chat.settings.thinking == "show")
        name = self.chat.saved.id
        with _stopping(self.chat.stop):
            chunks = begin()
            try:
                for chunk in chunks:
                    view.feed(chunk.text, chunk.thinking)
            except KeyboardInterrupt:  # the second one: it does not wait for the round
                pass
            finally:
                view.finish()
                chunks.close()
        self._say_how_it_went()
        if self.chat.saved.id != name:  # a summary, or another process wrote to the same one
            self.screen.note(f"[goes on as {self.chat.saved.id}; {name} stays as it is]")

    def _say_how_it_went(self) -> None:
        chat, stats = self.chat, self.chat.stats
        if stats.tokens:
            self.screen.note(long_stats_line(stats, chat.used, chat.llm.context))
        if chat.finish_reason == "cancelled":
            self.screen.note(
                f"[stopped: kept {stats.tokens} tok, type to continue, /regen to retry]"
            )
        elif chat.finish_reason == "length":
            why = (
                "the context is full"
                if chat.used >= chat.llm.context
                else f"max_tokens {chat.settings.params.max_tokens}"
            )
            self.screen.note(f"[cut off: {why}]")
        could_draft = chat.llm.drafter is not None and chat.settings.draft_depth != 0
        if could_draft and chat.settings.draft_depth == "auto" and chat.llm.parked:
            self.screen.note(parked_note(chat.llm.parked))
        elif chat.finish_reason != "cancelled" and (
            warning := idle_drafter(stats, could_draft=could_draft)
        ):
            self.screen.warn(warning)
        if chat.is_nearly_full:
            self.screen.warn(
                f"the context is nearly full ({thousands(chat.used)} of "
                f"{thousands(chat.llm.context)}): /compact summarises what was said, "
                "/drop N leaves out the N oldest turns."
            )
        if chat.save_error is not None:
            self._warn_once(f"the conversation is not saved: {chat.save_error}")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned_of:
            self._warned_of.add(text)
            self.screen.warn(text)

    # The beginning and the end.

    def _greet(self) -> None:
        llm, chat = self.chat.llm, self.chat
        pair = llm.model_name if llm.drafter is None else f"{llm.model_name} + drafter"
        memory = f"{gigabytes(llm.memory.weights)} of {gigabytes(llm.memory.limit)}"
        self.screen.line(f"mlx-mtp {__version__} · {pair} · {memory} · /help", "dim")
        if not chat.turns:
            return
        self.screen.note(f"{chat.saved.id}: {turns(chat.turns)}")
        last = chat.messages[-1]
        if last["role"] == "user":
            self.screen.line(f"{PROMPT}{last['content']}")
            self.screen.note("[its reply is missing: /regen makes it]")
            return
        self.screen.line(f"{PROMPT}{chat.messages[-2]['content']}")
        view = ReplyView(self.screen, show_thinking=False)
        view.feed(str(last["content"]), "")
        view.finish()
        if last.get("finish_reason") == "cancelled":
            self.screen.note("[stopped: type to continue, /regen to retry]")

    def _say_where(self) -> None:
        chat = self.chat
        if chat.turns and chat.store is not None and chat.save_error is None:
            self.screen.note(f"saved as {chat.saved.id}; mlx-mtp chat --continue goes on with it")
        elif chat.save_error is not None:
            self.screen.warn(f"the conversation is not saved: {chat.save_error}")


@contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call `stop`; a second one interrupts at once."""
    asked = False

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
