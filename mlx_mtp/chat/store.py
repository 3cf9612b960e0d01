"""Conversations on the disk. Owns: where they lie, their format, writing them whole and private.

One JSON file per conversation::

    {"mlx_mtp_chat": 1, "id": ..., "model": ..., "settings": {...}, "messages": [...]}

A reply's message carries its token ids, so that it can be taken up again as the model wrote it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mlx_mtp.chat.paths import expanded, read_bytes, typed_path
from mlx_mtp.chat.settings import Settings
from mlx_mtp.errors import ResourceError, UsageError
from mlx_mtp.files import MAX_NESTING, is_nested_deeper
from mlx_mtp.types import Message
from mlx_mtp.whole_files import replace_text, sweep

HOME_VARIABLE = "MLX_MTP_HOME"
"""Environment variable that names the folder of conversations; the user's own by default."""
FORMAT = "mlx_mtp_chat"
MOST_BYTES = 500_000_000
"""More than any conversation takes."""
MOST_OFFERED = 20
"""Conversations to choose from while a command is typed."""
ELSEWHERE = f"Free some space, or name another folder in {HOME_VARIABLE}."
ROLES = ("system", "user", "assistant")


@dataclass
class Saved:
    """A conversation as it is kept.

    Attributes:
        id: names it and its file.
        model: it was held with.
        messages: system, user and assistant; a reply may carry "token_ids", "thinking", "seed"
            and "finish_reason".
        settings: by their names, those that were set.
    """

    id: str
    model: str = ""
    messages: list[Message] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The first words of the user."""
        said = (str(m["content"]) for m in self.messages if m["role"] == "user")
        return " ".join(next(said, "").split())[:60]


def home() -> Path:
    """The folder of everything that chats keep. Raises UsageError as `expanded`."""
    if own := os.environ.get(HOME_VARIABLE):
        return expanded(own)
    from platformdirs import user_data_path

    return user_data_path("mlx-mtp", appauthor=False)


def make_private(folder: Path) -> None:
    """Make a folder, where it is not there, that only this user can enter. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def new_id() -> str:
    """A name for a conversation that begins now."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


class Store:
    """The user's conversations.

    Args:
        folder: None: the user's own.

    Attributes:
        passed_over: what is wrong with conversations that could not be read.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (home() if folder is None else folder) / "chats"
        self._written: dict[str, tuple[int, int]] = {}
        self._is_swept = False
        self.passed_over: list[str] = []

    def path(self, name: str) -> Path:
        """The file of a conversation."""
        return self.folder / f"{name}.json"

    def save(self, saved: Saved) -> None:
        """Write a conversation in the place of what is there, as a whole, for this user alone.

        Where another process has written to it since, this one goes on under a new id, which is
        set: nobody's turns are lost.

        Raises ResourceError: it cannot be written.
        """
        path = self.path(saved.id)
        if _stamp(path) not in (None, self._written.get(saved.id)):
            saved.id = new_id()
            path = self.path(saved.id)
        try:
            make_private(self.folder.parent)
            make_private(self.folder)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        if not self._is_swept:
            self._is_swept = True
            sweep(self.folder)
        try:
            replace_text(path, _document(saved), private=True)
        except OSError as error:
            raise _unwritable(path, error) from error
        stamp = _stamp(path)
        assert stamp is not None
        self._written[saved.id] = stamp

    def load(self, name: str) -> Saved:
        """A conversation by its id, or from a file. Raises UsageError: there is none."""
        path = self.path(name)
        is_own = path.parent == self.folder and os.path.isfile(path)
        if not is_own:
            path = typed_path(name)
        if not os.path.isfile(path):
            raise UsageError(
                f"There is no conversation {name!r}.", "See `mlx-mtp chat --list` for their names."
            )
        saved = read(path)
        if is_own:
            saved.id = name
            stamp = _stamp(path)
            assert stamp is not None
            self._written[name] = stamp
        else:
            saved.id = new_id()  # a copy: the file stays as it is
        return saved

    def latest(self) -> Saved:
        """The conversation that was written to last, of those that can be read. Raises UsageError:
        there is none."""
        for path in self._paths():
            with self._passing_over():
                return self.load(path.stem)
        raise UsageError("There is no conversation yet.", "Begin one: mlx-mtp chat")

    def all(self) -> list[tuple[Saved, datetime]]:
        """All conversations that can be read, the last one first, and when they were written."""
        found = []
        for path in self._paths():
            with self._passing_over(), suppress(OSError):
                saved, written = read(path), datetime.fromtimestamp(path.stat().st_mtime)
                found.append((replace(saved, id=path.stem), written))
        return found

    def latest_ids(self) -> list[str]:
        """Names of the conversations that were written to last, the last one first."""
        return [path.stem for path in self._paths()[:MOST_OFFERED]]

    @contextmanager
    def _passing_over(self) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            self.passed_over.append(error.message)

    def _paths(self) -> list[Path]:
        try:
            return sorted(self.folder.glob("*.json"), key=lambda path: -path.stat().st_mtime_ns)
        except OSError:
            return []


def read(path: Path) -> Saved:
    """A conversation from a file. Raises UsageError: it is none, or damaged."""
    try:
        document = json.loads(read_bytes(path, MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON.", "Name another conversation.") from error
    if not isinstance(document, dict) or document.get(FORMAT) != 1:
        raise UsageError(f"{path} is no conversation.", "Name one that was saved by this program.")
    messages = document.get("messages")
    settings = document.get("settings", {})
    if (
        is_nested_deeper(document, MAX_NESTING)
        or not isinstance(messages, list)
        or not all(map(_is_message, messages))
        or not isinstance(settings, dict)
    ):
        raise UsageError(f"{path} is damaged.", "Name another conversation.")
    try:
        Settings.from_changed(settings)
    except UsageError as error:
        message = f"{path} is damaged: {error.message}"
        raise UsageError(message, "Name another conversation.") from error
    model, name = str(document.get("model", "")), str(document.get("id", path.stem))
    return Saved(name, model, messages, settings)


def as_markdown(saved: Saved) -> str:
    """A conversation to read, without what only this program needs."""
    names = {"system": "System", "user": "You", "assistant": saved.model or "Model"}
    parts = [f"## {names[str(m['role'])]}\n\n{m['content']}\n" for m in saved.messages]
    return "\n".join(parts)


def save_copy(saved: Saved, path: Path) -> None:
    """Write a copy: Markdown where the name ends in .md, else JSON. Raises ResourceError."""
    text = as_markdown(saved) if path.suffix == ".md" else _document(saved)
    try:
        replace_text(path, text, private=True)
    except OSError as error:
        raise _unwritable(path, error, "Name another place.") from error


def _document(saved: Saved) -> str:
    document = {
        FORMAT: 1,
        "id": saved.id,
        "model": saved.model,
        "settings": saved.settings,
        "messages": saved.messages,
    }
    return json.dumps(document, ensure_ascii=True) + "\n"


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    """What tells whether a file is the one that was written; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _unwritable(path: Path, error: OSError, hint: str = ELSEWHERE) -> ResourceError:
    return ResourceError(f"{path} cannot be written: {error.strerror or error}.", hint)
