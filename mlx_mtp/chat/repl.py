"""The loop of a conversation: read, answer, say how it went. Owns: who is asked in which order, and
what Ctrl-C does while a reply comes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

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
from mlx_mtp.chat.input import Reader, edit, is_command, unquoted
from mlx_mtp.chat.interrupts import Interrupts
from mlx_mtp.chat.render import PROMPT, ReplyView, Screen
from mlx_mtp.chat.session import ChatSession
from mlx_mtp.errors import MlxMtpError
from mlx_mtp.transcript import TOKEN_IDS
from mlx_mtp.types import Chunk, Message

INTERRUPTED = 130
MOST_LINES, MOST_CHARACTERS = 12, 1000
"""Of a message that is shown again when a conversation goes on."""
SAME_HINT = "At temperature 0 the reply is always the same; /set temperature 1 draws others."
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
        self._interrupts = Interrupts()
        self._said: set[str] = set()

    def run(self) -> int:
        """Talk until the user leaves; the exit code."""
        with self._interrupts:
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
                with self._interrupts.calling(self.reader.interrupt):
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
            if is_quoted or not is_command(text):
                self._show(lambda: self.chat.ask(text))
                return True
            with self._interrupts.raising():
                outcome = self._commands.run(text)
            if outcome == "leave":
                return False
            if outcome == "edit":
                self._edit(text.removeprefix("/edit").strip())
            elif outcome is not None:
                self._show(lambda: outcome)
        except MlxMtpError as error:
            self.screen.error(error.message, error.hint)
        except KeyboardInterrupt:
            self.screen.end_line()
        return True

    def _edit(self, text: str) -> None:
        """Send what the user writes in the editor; it can be brought back with the up key, too."""
        written = edit(text)
        if not written.strip():
            self.screen.note("nothing was written, so nothing was sent")
            return
        self.reader.remember(written)
        self.screen.line(written)
        self._show(lambda: self.chat.ask(written))

    # A reply.

    def _show(self, begin: Callable[[], Generator[Chunk]]) -> None:
        """Show a reply; what is typed meanwhile is sent next if the reply came to its end.

        Raises MlxMtpError as `_stream`.
        """
        is_over = False
        with self.reader.quiet():
            try:
                is_over = self._stream(begin)
            finally:
                if not is_over:
                    self.reader.hold()

    def _stream(self, begin: Callable[[], Generator[Chunk]]) -> bool:
        """Stream a reply and say how it went; False: it was stopped. Raises MlxMtpError as it
        does."""
        before = list(self.chat.messages)
        view = ReplyView(self.screen, self.chat.settings.thinking == "show")
        name = self.chat.saved.id
        chunks: Generator[Chunk] | None = None
        was_stopped = False
        try:
            with self._interrupts.stopping(self.chat.stop) as stopping:
                chunks = begin()
                stopping.repeat()
                for chunk in chunks:
                    view.feed(chunk.text, chunk.thinking)
                was_stopped = stopping.is_asked
        except KeyboardInterrupt:  # the second one: it does not wait for the round
            was_stopped = True
            if chunks is None:
                return False
        finally:
            view.finish()
            if chunks is not None:
                chunks.close()
        self._say_how_it_went()
        if self.chat.saved.id != name:  # a summary, or another process wrote to the same one
            stays = "" if self.chat.save_error else f"; {name} stays as it is"
            self.screen.note(f"[goes on as {self.chat.saved.id}{stays}]")
        is_greedy = self.chat.settings.params.temperature == 0
        if is_greedy and is_repeated(before, self.chat.messages) and self._is_news("same", "same"):
            self.screen.note(SAME_HINT)
        return not was_stopped

    def _say_how_it_went(self) -> None:
        chat, stats = self.chat, self.chat.stats
        if stats.tokens:
            self.screen.note(long_stats_line(stats, chat.used, chat.llm.context))
        if how := ending(chat):
            self.screen.note(f"[{how}]")
        could_draft = chat.llm.drafter is not None and chat.settings.draft_depth != 0
        parked = chat.llm.parked if could_draft and chat.settings.draft_depth == "auto" else None
        came_to_an_end = chat.finish_reason != "cancelled"
        must_draft = could_draft and not parked and came_to_an_end
        idle = idle_drafter(stats, must_draft=must_draft)
        if self._is_news("parked", parked):
            self.screen.note(parked_note(str(parked)))
        if self._is_news("idle", idle):
            self.screen.warn(str(idle))
        if self._is_news("full", "full" if chat.is_nearly_full else None):
            self.screen.warn(
                f"the context is nearly full ({thousands(chat.used)} of "
                f"{thousands(chat.llm.context)}): /compact summarises what was said, "
                "/drop N leaves out the N oldest turns."
            )
        if self._is_news("unsaved", str(chat.save_error) if chat.save_error else None):
            self.screen.warn(f"the conversation is not saved: {chat.save_error}")

    def _is_news(self, what: str, state: str | None) -> bool:
        """Whether a state has begun; it is said once, and once more after it was over."""
        was_said = what in self._said
        (self._said.discard if state is None else self._said.add)(what)
        return state is not None and not was_said

    # The beginning and the end.

    def _greet(self) -> None:
        llm, chat = self.chat.llm, self.chat
        pair = llm.model_name if llm.drafter is None else f"{llm.model_name} + drafter"
        memory = f"{gigabytes(llm.memory.weights)} of {gigabytes(llm.memory.limit)}"
        self.screen.line(f"mlx-mtp {__version__} · {pair} · {memory} · /help", "dim")
        if not chat.turns:
            return
        self.screen.note(f"{chat.saved.id}: {turns(chat.turns)}")
        if chat.other_model:
            self.screen.note(f"[held with {chat.other_model} so far]")
        last = chat.messages[-1]
        if last["role"] == "user":
            self.screen.line(f"{PROMPT}{_shortened(str(last['content']))}")
            self.screen.note("[its reply is missing: /regen makes it]")
            return
        self.screen.line(f"{PROMPT}{_shortened(str(chat.messages[-2]['content']))}")
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


def ending(chat: ChatSession) -> str | None:
    """What became of a reply that did not come to its end."""
    is_summary, kept = chat.kept is None, chat.kept or 0
    if chat.finish_reason == "cancelled":
        if is_summary:
            return "stopped: nothing was summarised, and the conversation stays as it is"
        if kept:
            return f"stopped: kept {kept} tok, type to continue, /regen to retry"
        if chat.messages[-1]["role"] == "assistant":
            return "stopped: the reply before stays"
        return (
            "stopped before the reply began: /regen makes it, /undo takes the message back, and "
            "what you say next goes with it"
        )
    if chat.finish_reason == "length":
        if chat.is_full:
            why = "the context is full"
        else:
            why = f"max_tokens {chat.settings.params.max_tokens}"
        return f"cut off: {why}" + ("; nothing was summarised" if is_summary else "")
    return None


def is_repeated(before: list[Message], after: list[Message]) -> bool:
    """Whether another reply to the same message came out as the one before."""
    if len(before) != len(after) or not after or before[-1] is after[-1]:
        return False
    ids = after[-1].get(TOKEN_IDS)
    return bool(ids) and ids == before[-1].get(TOKEN_IDS)


def _shortened(text: str) -> str:
    """A message to remember it by: files may go with it."""
    lines = text.splitlines()
    if len(lines) <= MOST_LINES and len(text) <= MOST_CHARACTERS:
        return text
    return "\n".join(lines[:MOST_LINES])[:MOST_CHARACTERS] + " ..."
