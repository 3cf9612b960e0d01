"""What is typed. Owns: the line editor, its keys, history and completion, and the user's editor.

Enter sends; Alt-Enter begins a new line, and so does Enter while three quotation marks that a text
began with are open. What is pasted comes as it is, with all its lines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.application.current import get_app_or_none
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.shortcuts import CompleteStyle

from mlx_mtp.chat.commands import completions
from mlx_mtp.chat.keyboard import hold, quiet
from mlx_mtp.chat.render import PROMPT
from mlx_mtp.chat.store import make_private
from mlx_mtp.errors import UsageError

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output

QUOTES = '"""'
_COMMAND = re.compile(r"\s*/[\w?]*(\s|$)")
_FILE_COMMANDS = ("/file ", "/load ", "/save ")


class Reader:
    """Reads messages and commands from the terminal.

    Args:
        history: file of what was typed before; None keeps none.
        input, output: other than the process's own terminal.
        saved_ids: finds the saved conversations to offer, the last one first.
    """

    def __init__(
        self,
        history: Path | None,
        input: Input | None = None,
        output: Output | None = None,
        saved_ids: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            multiline=True,
            key_bindings=_keys(),
            completer=ChatCompleter(saved_ids),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            enable_suspend=True,
            prompt_continuation="  ",
            input=input,
            output=output,
        )

    def read(self, default: str = "") -> str:
        """The next entry, three quotation marks around it left where they are.

        Raises:
            EOFError: Ctrl-D on an empty line.
            KeyboardInterrupt: Ctrl-C on an empty line; any other is cleared.
        """
        return self._session.prompt(PROMPT, default=default, handle_sigint=False)

    def interrupt(self) -> None:
        """Do what Ctrl-C does; a signal handler may call it at any time."""
        app = get_app_or_none()
        if app is not None and app.is_running and app.loop is not None:
            with suppress(RuntimeError):  # it has just ended
                app.loop.call_soon_threadsafe(app.key_processor.send_sigint)
        else:  # it has not begun yet
            store_typeahead(self._session.input, [KeyPress(Keys.SIGINT)])

    def quiet(self) -> AbstractContextManager[None]:
        """Keep what is typed meanwhile unseen, for the next `read`."""
        return quiet(self._session.input)

    def hold(self) -> None:
        """Let nothing that was typed so far be sent by itself; it stands at the prompt."""
        hold(self._session.input)

    def remember(self, entry: str) -> None:
        """Let the up key bring back what was not typed here."""
        self._session.history.append_string(entry)


def unquoted(entry: str) -> tuple[str, bool]:
    """An entry without three quotation marks around it, and whether it had them."""
    text = entry.strip()
    lines = text.splitlines()
    is_block = len(lines) > 1 and lines[0].strip() == lines[-1].strip() == QUOTES
    is_one = text.count(QUOTES) == 2 and text.startswith(QUOTES) and text.endswith(QUOTES)
    if is_block or is_one:
        return text[len(QUOTES) : -len(QUOTES)].strip("\n"), True
    return entry, False


def is_open(entry: str) -> bool:
    """Whether three quotation marks at the beginning of an entry are not closed yet. Code may begin
    with some that are."""
    return entry.lstrip().startswith(QUOTES) and entry.count(QUOTES) % 2 == 1


def is_command(entry: str) -> bool:
    """Whether an entry is meant as a command: a path or a comment begins with a slash, too."""
    return _COMMAND.match(entry) is not None


def edit(text: str) -> str:
    """Let the user edit a text in $VISUAL or $EDITOR. Raises UsageError: that failed."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        with tempfile.TemporaryDirectory(prefix="mlx-mtp-") as folder:
            path = Path(folder) / "message.md"
            path.write_text(text, encoding="utf-8", errors="replace")
            code = subprocess.call([*shlex.split(editor), str(path)])
            edited = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("What was written is not UTF-8 text.", "Nothing was sent.") from error
    except (OSError, ValueError) as error:
        message = f"The editor {editor} cannot be run: {error}."
        raise UsageError(message, "Name another in EDITOR.") from error
    if code:
        raise UsageError(
            f"The editor {editor} ended with {code}; nothing was sent.",
            "Leave it without an error, or name another in EDITOR.",
        )
    return edited.strip("\n")


def _history(path: Path | None) -> History:
    """A history that only this user can read; one in memory where there is no place for it."""
    if path is None:
        return InMemoryHistory()
    try:
        make_private(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.fchmod(descriptor, 0o600)  # it may have been copied from elsewhere
        os.close(descriptor)
    except OSError:
        return InMemoryHistory()
    return _Forgiving(str(path))


class _Forgiving(FileHistory):
    """A history that a full disk does not turn into an error."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        elif not event.app.is_done:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @keys.add(Keys.Vt100MouseEvent)
    def ignore(event: KeyPressEvent) -> None:
        """A colour code that is pasted key by key looks like a mouse; there is none."""

    return keys


class ChatCompleter(Completer):
    """Commands, their words, saved conversations and file names.

    Args:
        saved_ids: finds the conversations, the last one first.
    """

    def __init__(self, saved_ids: Callable[[], Iterable[str]]) -> None:
        self._saved_ids = saved_ids
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        for command in _FILE_COMMANDS:
            if text.startswith(command):
                rest = text[len(command) :]
                if command == "/load ":
                    for name in self._saved_ids():
                        if name.startswith(rest):
                            yield Completion(name, start_position=-len(rest))
                yield from self._paths.get_completions(Document(rest), complete_event)
                return
        if text.startswith("/") and "\n" not in text:
            for choice in completions(text):
                yield Completion(choice, start_position=-len(text.split(" ")[-1]))
