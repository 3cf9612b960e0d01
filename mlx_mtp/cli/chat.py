"""`mlx-mtp chat`: one prompt in, one answer out. Owns: where the prompt comes from, streaming the
answer to stdout, and what is said about it on stderr.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Annotated, Any

import typer

from mlx_mtp.cli.console import Console
from mlx_mtp.cli.options import (
    DEFAULT_MODEL,
    DEMONSTRATION,
    EXAMPLE_MODEL,
    INTERRUPTED,
    DebugFlag,
    DepthOption,
    DrafterOption,
    JsonFlag,
    MaxTokensOption,
    MinPOption,
    ModelArgument,
    QuietFlag,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    VerboseFlag,
    console_of,
    depth_choice,
    drafter_choice,
)
from mlx_mtp.errors import UsageError
from mlx_mtp.types import Chunk, FinishReason, Message, RequestStats, SamplingParams

FEW_DRAFTS = 40
"""Drafts after which hardly any accepted one is no bad luck."""

CHAT_EXAMPLES = """Examples:

\b
  mlx-mtp chat -p "Multiplication table of 7."
  mlx-mtp chat google/gemma-4-E4B-it -p "Why is the sky blue?" --temperature 0
  cat question.txt | mlx-mtp chat ./gemma-4-12B-it-4bit --max-tokens 500
  mlx-mtp chat -p "A list of three fruits." --json | jq .stats
"""

PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt", "-p", metavar="TEXT", help="The prompt; - reads it from stdin. [default: stdin]"
    ),
]


def chat(
    context: typer.Context,
    model: ModelArgument = None,
    prompt: PromptOption = None,
    drafter: DrafterOption = "auto",
    draft_depth: DepthOption = "auto",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    stop: StopOption = None,
    seed: SeedOption = None,
    system: SystemOption = None,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Answer one prompt.

    The answer goes to stdout, everything else to stderr.
    """
    console = console_of(context)
    console.start_logging()
    depth = depth_choice(draft_depth)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=tuple(stop or ()),
        seed=secrets.randbelow(2**32) if seed is None else seed,
    )
    messages = _messages(system, _read_prompt(prompt))
    if not model:
        model = DEFAULT_MODEL
        console.note(DEMONSTRATION.format(command=f"chat {EXAMPLE_MODEL}"))

    from mlx_mtp import load

    llm = load(model, drafter=drafter_choice(drafter))
    for warning in llm.warnings:
        console.warn(warning)
    reply = _receive(llm.stream(messages, params, draft_depth=depth), show=not as_json)
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
            }
        )
    console.note("  " + _stats_line(reply.stats))
    if depth == "auto" and llm.parked:
        console.note(f"  decoding plainly, as drafting does not pay here: {llm.parked}")
    else:
        _warn_of_idle_drafter(console, reply, llm.drafter_name, depth)
    if reply.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


@dataclass
class Reply:
    """What arrived of an answer."""

    texts: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: RequestStats = field(default_factory=RequestStats)


def _read_prompt(option: str | None) -> str:
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


def _messages(system: str | None, prompt: str) -> list[Message]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]


def _receive(chunks: Iterator[Chunk], *, show: bool) -> Reply:
    """Collect an answer, writing it to stdout as it comes. Ctrl-C ends it as "cancelled"."""
    reply, clock = Reply(), _Clock()
    try:
        for chunk in chunks:
            clock.tick(len(chunk.token_ids))
            reply.texts.append(chunk.text)
            reply.thinking.append(chunk.thinking)
            reply.token_ids += chunk.token_ids
            reply.finish_reason = chunk.finish_reason
            reply.stats = chunk.stats or reply.stats
            if show and chunk.text:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        # The engine's own figures come with the last chunk, which will not come any more.
        reply.finish_reason, reply.stats = "cancelled", clock.stats()
    if show and not "".join(reply.texts[-8:]).endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return reply


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


def _stats_line(stats: RequestStats) -> str:
    """For example ``412 tok · 71.3 tok/s · first 0.31 s · drafts 68 % (2.7/round)``."""
    parts = [f"{stats.tokens} tok"]
    if stats.tokens > 1 and stats.decode_seconds > 0:
        parts.append(f"{(stats.tokens - 1) / stats.decode_seconds:.1f} tok/s")
    if stats.tokens:
        parts.append(f"first {stats.first_token_seconds:.2f} s")
    if stats.drafted and stats.rounds:
        share, per_round = stats.accepted / stats.drafted, stats.accepted / stats.rounds
        parts.append(f"drafts {share:.0%}".replace("%", " %") + f" ({per_round:.1f}/round)")
    return " · ".join(parts)


def _warn_of_idle_drafter(
    console: Console, reply: Reply, drafter: str | None, depth: int | str
) -> None:
    """A draft path that never runs looks like one that works, only slower: say it."""
    could_draft = drafter is not None and depth != 0 and reply.stats.rounds > 0
    if could_draft and not reply.stats.drafted and reply.finish_reason != "cancelled":
        console.warn("the drafter was loaded, but nothing was drafted.")
    elif reply.stats.drafted >= FEW_DRAFTS and reply.stats.accepted < 0.05 * reply.stats.drafted:
        console.warn(
            f"only {reply.stats.accepted} of {reply.stats.drafted} drafts were accepted: is this "
            "the model's own drafter? Without it the same text comes sooner."
        )


def _write_json(document: dict[str, Any]) -> None:
    """One JSON document, in UTF-8 whatever the locale says."""
    text = json.dumps(document, ensure_ascii=False)
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.flush()
