"""One prompt in, one answer out. Owns: where the prompt comes from, streaming the answer to stdout,
and what is said about it on stderr.
"""

from __future__ import annotations

import os
import secrets
import select
import stat
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

from mlx_mtp.chat.figures import idle_drafter, parked_note, stats_line
from mlx_mtp.chat.interrupts import Interrupts
from mlx_mtp.chat.settings import Settings
from mlx_mtp.cli.console import Console
from mlx_mtp.errors import UsageError
from mlx_mtp.plain import json_line, without_controls
from mlx_mtp.types import Chunk, FinishReason, Message, RequestStats

if TYPE_CHECKING:  # loads mlx, which takes seconds
    from mlx_mtp.llm import LLM


@dataclass
class Reply:
    """What arrived of an answer."""

    texts: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: RequestStats = field(default_factory=RequestStats)

    def add(self, chunk: Chunk) -> None:
        """Take in what came."""
        self.texts.append(chunk.text)
        self.thinking.append(chunk.thinking)
        self.token_ids += chunk.token_ids
        self.finish_reason = chunk.finish_reason
        # The engine's own figures come with the last chunk.
        self.stats = chunk.stats or replace(self.stats, tokens=len(self.token_ids))


def answer(
    llm: LLM, messages: list[Message], settings: Settings, console: Console, *, as_json: bool
) -> bool:
    """Answer a conversation on stdout; False: it was interrupted."""
    params, depth = settings.params, settings.draft_depth
    if params.seed is None:
        params = replace(params, seed=secrets.randbelow(2**32))
    chunks = llm.stream(messages, params, draft_depth=depth, thinking=settings.thinks)
    show_thinking = settings.thinking == "show" and not as_json and not console.quiet
    reply = receive(chunks, chunks.stop, show=not as_json, show_thinking=show_thinking)
    if as_json:
        _write_json(
            {
                "text": "".join(reply.texts),
                "token_ids": reply.token_ids,
                "finish_reason": reply.finish_reason,
                "thinking": "".join(reply.thinking),
                "seed": params.seed,
                "stats": asdict(reply.stats),
                "run": asdict(llm.run_stats),
                "model": llm.model_name,
                "drafter": llm.drafter_name,
                "parked": llm.parked,
                "exact": llm.exact,
            }
        )
    console.note("  " + stats_line(reply.stats))
    is_whole = reply.finish_reason != "cancelled"
    parked = llm.parked if depth == "auto" else None
    if parked:
        console.note(f"  {parked_note(parked)}")
    must_draft = llm.drafter is not None and depth != 0 and not parked and is_whole
    if warning := idle_drafter(reply.stats, must_draft=must_draft):
        console.warn(warning)
    return is_whole


def read_prompt(option: str | None) -> str:
    """The prompt from -p, or from stdin where that is asked for or piped. Raises UsageError."""
    text = option or ""
    if option == "-" or (option is None and not sys.stdin.isatty()):
        text = _read_stdin()
    if not text.strip():
        raise UsageError(
            "No prompt was given.", 'For example: mlx-mtp chat -p "Multiplication table of 7."'
        )
    return text


def leaves_stdin(option: str | None) -> bool:
    """Whether a prompt is given and text waits in a pipe, which nobody will read: a loop around the
    program may be reading it."""
    if option in (None, "-"):
        return False
    with suppress(OSError, ValueError):
        if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
            poll = select.poll()
            poll.register(sys.stdin, select.POLLIN)
            return any(event & select.POLLIN for _, event in poll.poll(0))
    return False


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UsageError("The prompt on stdin is not UTF-8 text.", "Convert it first.") from error


def receive(
    chunks: Iterable[Chunk],
    stop: Callable[[], None],
    *,
    show: bool,
    show_thinking: bool = False,
) -> Reply:
    """Collect an answer, writing it to stdout as it comes, and its thinking to stderr. Ctrl-C calls
    `stop`, which ends it after its round; a second one ends it at once."""
    reply = Reply()
    try:
        with Interrupts() as interrupts, interrupts.stopping(stop):
            for chunk in chunks:
                reply.add(chunk)
                if show_thinking:
                    _show(sys.stderr, chunk.thinking)
                if show:
                    _show(sys.stdout, chunk.text)
    except KeyboardInterrupt:
        reply.finish_reason = "cancelled"
    if show and not "".join(reply.texts[-8:]).endswith("\n"):
        _show(sys.stdout, "\n")
    return reply


def _show(stream: TextIO, text: str) -> None:
    """Write at once what a model wrote: a pipe gets every character, a terminal none that it
    would obey."""
    if text:
        stream.write(without_controls(text) if stream.isatty() else text)
        stream.flush()


def _write_json(document: dict[str, Any]) -> None:
    """One JSON document, in UTF-8 whatever the locale says."""
    sys.stdout.buffer.write(json_line(document).encode() + b"\n")
    sys.stdout.flush()
