"""One prompt in, one answer out. Owns: where the prompt comes from, streaming the answer to stdout,
and what is said about it on stderr.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

from mlx_mtp.chat.figures import idle_drafter, parked_note, stats_line
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


def answer(
    llm: LLM, messages: list[Message], settings: Settings, console: Console, *, as_json: bool
) -> bool:
    """Answer a conversation on stdout; False: it was interrupted."""
    params, depth = settings.params, settings.draft_depth
    if params.seed is None:
        params = replace(params, seed=secrets.randbelow(2**32))
    chunks = llm.stream(messages, params, draft_depth=depth, thinking=settings.thinks)
    show_thinking = settings.thinking == "show" and not as_json and not console.quiet
    reply = receive(chunks, show=not as_json, show_thinking=show_thinking)
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
    could_draft = llm.drafter is not None and depth != 0 and reply.finish_reason != "cancelled"
    if depth == "auto" and llm.parked:
        console.note(f"  {parked_note(llm.parked)}")
    elif warning := idle_drafter(reply.stats, could_draft=could_draft):
        console.warn(warning)
    return reply.finish_reason != "cancelled"


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


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UsageError("The prompt on stdin is not UTF-8 text.", "Convert it first.") from error


def receive(chunks: Iterator[Chunk], *, show: bool, show_thinking: bool = False) -> Reply:
    """Collect an answer, writing it to stdout as it comes, and its thinking to stderr. Ctrl-C ends
    it as "cancelled"."""
    reply, clock = Reply(), _Clock()
    try:
        for chunk in chunks:
            clock.tick(len(chunk.token_ids))
            reply.texts.append(chunk.text)
            reply.thinking.append(chunk.thinking)
            reply.token_ids += chunk.token_ids
            reply.finish_reason = chunk.finish_reason
            reply.stats = chunk.stats or reply.stats
            if show_thinking:
                _show(sys.stderr, chunk.thinking)
            if show:
                _show(sys.stdout, chunk.text)
    except KeyboardInterrupt:
        # The engine's own figures come with the last chunk, which will not come any more.
        reply.finish_reason, reply.stats = "cancelled", clock.stats()
    if show and not "".join(reply.texts[-8:]).endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return reply


def _show(stream: TextIO, text: str) -> None:
    """Write at once what a model wrote: a pipe gets every character, a terminal none that it
    would obey."""
    if text:
        stream.write(without_controls(text) if stream.isatty() else text)
        stream.flush()


class _Clock:
    """Times an answer from outside, for the case that it is interrupted."""

    def __init__(self) -> None:
        self.tokens = 0
        self.started = self.first = self.last = perf_counter()

    def tick(self, new_tokens: int) -> None:
        self.last = perf_counter()
        if not self.tokens:
            self.first = self.last
        self.tokens += new_tokens

    def stats(self) -> RequestStats:
        return RequestStats(
            tokens=self.tokens,
            first_token_seconds=self.first - self.started,
            decode_seconds=self.last - self.first,
        )


def _write_json(document: dict[str, Any]) -> None:
    """One JSON document, in UTF-8 whatever the locale says."""
    sys.stdout.buffer.write(json_line(document).encode() + b"\n")
    sys.stdout.flush()
