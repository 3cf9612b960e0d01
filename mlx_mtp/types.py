"""Plain data of the public API. Owns: parameters, requests, results and counters; computes nothing.

All classes are frozen except `RunStats`, which the engine adds to as it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from mlx_mtp.errors import UsageError, nearest_hint

MAX_DEPTH = 7
"""Most tokens drafted in one round (a verify of 8 tokens stays on MLX's fused attention)."""

EXACT_DEPTH = 4
"""Most tokens drafted in one round where kernels must not change: a verify of 5 tokens is one pass
over the weights in MLX's quantized kernels for few rows, and below the size from which they differ
on all chips."""

EXACT_TOKENS = EXACT_DEPTH + 1
"""Tokens of each forward of a round there, in plain decoding, too."""

MAX_ROWS = 8
"""Most requests that decode together."""

MAX_TEMPERATURE = 1_000_000
"""More than any use: the logits of Gemma 4 lie between -30 and 30."""

FinishReason = Literal["stop", "length", "cancelled", "error"]
Message = dict[str, Any]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops. None means the model's own default.

    Attributes:
        max_tokens: most tokens to produce, at least 1; None: what is left of the context.
        temperature: 0 is greedy; sampling divides the logits by it. At least 0.
        top_k: keep tokens whose logit reaches that of the k-th best; 0 keeps all.
        top_p: keep the smallest set of best tokens whose probability reaches top_p; 1 keeps all.
        min_p: keep tokens at least min_p times as probable as the best; 0 keeps all.
        seed: 0 <= seed < 2**32. None: drawn once per request and reported in the result.
        stop: strings that end the answer; the text is cut before the first one found.
        stop_token_ids: ids that end the answer, besides the model's own.
        ignore_eos: go on past the model's own stop ids (stop and stop_token_ids still hold).
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        _check_range("max_tokens", self.max_tokens, int, 1, None)
        _check_range("temperature", self.temperature, float, 0, MAX_TEMPERATURE)
        _check_range("top_k", self.top_k, int, 0, None)
        _check_range("top_p", self.top_p, float, 0, 1)
        _check_range("min_p", self.min_p, float, 0, 1)
        _check_range("seed", self.seed, int, 0, 2**32 - 1)
        if self.top_p == 0:
            raise UsageError("top_p is 0, which keeps no token.", "Give a top_p in (0, 1].")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise UsageError("A stop string is empty or not text.", "Give non-empty stop strings.")
        if any(not _is_int(token) or token < 0 for token in self.stop_token_ids):
            raise UsageError("A stop token id is not a whole number >= 0.", "Give token ids.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from a mapping. Raises UsageError that names the nearest key for an unknown one."""
        known = [item.name for item in fields(cls)]
        for key in values:
            if key not in known:
                raise UsageError(
                    f"Unknown sampling parameter {key!r}.", nearest_hint(str(key), known)
                )
        return cls(**values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    if not isinstance(values, Iterable):
        raise UsageError(f"{name} is {values!r}.", "Give a list.")
    return tuple(values)


def _check_range(name: str, value: Any, kind: type, low: int, high: int | None) -> None:
    if value is None:
        return
    number = _is_int(value) or (kind is float and isinstance(value, float))
    if not number or not low <= value <= (float("inf") if high is None else high):
        wanted = "a whole number" if kind is int else "a number"
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise UsageError(f"{name} is {value!r}.", f"Give {wanted} {span}.")


@dataclass(frozen=True)
class Request:
    """One thing to generate; exactly one of prompt, messages and token_ids is given.

    Attributes:
        prompt: one user message; rendered with the model's chat template.
        messages: a conversation as ``{"role", "content"}`` mappings, rendered likewise.
        token_ids: ids that go to the model as they are.
        params: its own sampling parameters; they win over those of the call.
        id: a name that comes back with the result.
    """

    prompt: str | None = None
    messages: list[Message] | None = None
    token_ids: list[int] | None = None
    params: SamplingParams | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        given = [part for part in (self.prompt, self.messages, self.token_ids) if part is not None]
        if len(given) != 1:
            raise UsageError(
                "A request needs exactly one of prompt, messages and token_ids.",
                "Give one of them.",
            )
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise UsageError(f"The prompt is {self.prompt!r}, not text.", "Give a text.")
        if self.messages is not None and not isinstance(self.messages, list):
            raise UsageError("The messages are not a list.", "Give a list of messages.")
        ids = [] if self.token_ids is None else self.token_ids
        if not isinstance(ids, list) or not all(map(_is_int, ids)):
            raise UsageError("The token ids are not a list of whole numbers.", "Give ids.")
        if self.params is not None and not isinstance(self.params, SamplingParams):
            raise UsageError("The request's params are no SamplingParams.", "Build them first.")


@dataclass(frozen=True)
class RequestStats:
    """What one request took.

    Attributes:
        prompt_tokens: ids of the rendered prompt.
        tokens: ids produced, the one that completed a stop included.
        rounds: target forwards it took part in after its prefill.
        drafted: tokens drafted for it.
        accepted: drafted tokens that are part of its output.
        accepted_by_position: the same by position in the block: index 0 is the first draft.
        first_token_seconds: from its admission to its first token.
        prefill_seconds, decode_seconds: time spent on its prompt, and from first to last token.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    first_token_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer.

    Attributes:
        text: what the answer grew by; thinking and special tokens are not part of it.
        token_ids: the ids this piece came from (text may lag behind them).
        thinking: what the thinking channel grew by.
        finish_reason: set on the last chunk only.
        stats: set on the last chunk only.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    thinking: str = ""
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True)
class Result:
    """A finished answer.

    Attributes:
        text: the answer, cut before a stop string, without thinking and special tokens.
        token_ids: all ids produced; the last is the one that completed the stop.
        finish_reason: "stop", "length", "cancelled" or "error".
        thinking: the text of the thinking channel.
        error: why, where finish_reason is "error".
        seed: the seed that reproduces it; None where it was never begun.
        id: the request's id.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    seed: int | None
    stats: RequestStats
    thinking: str = ""
    error: str | None = None
    id: str | None = None


@dataclass
class RunStats:
    """Counts of everything an engine did since load or the last reset.

    Attributes:
        target_forwards: verify passes (a round is one).
        target_tokens: tokens put through the target in them, over all rows, padding included.
        drafter_forwards: draft steps, each for all rows at once.
        host_reads: device-to-host reads of rounds.
        prefill_reads: device-to-host reads of finished prefills.
        rounds, row_rounds: rounds, and rows summed over them.
        tokens, drafted, accepted: over all requests, as in RequestStats.
        prefill_forwards, prefill_tokens: prefill passes, each for one chunk or several short
            prompts, and prompt tokens put through the target in them, padding left out.
        shared_tokens: prompt tokens whose K/V were copied from another prompt with the same
            beginning, or were still in a session's row.
        preemptions: times a request gave its row back for lack of memory, to go on later.
        row_copies, bytes_copied: cache rows moved or grown, and their bytes.
        expert_pairs: (token, expert) pairs computed in rounds, over all layers.
        distinct_experts: experts read at least once, summed over layers and rounds; 0 unless
            ``llm.target.experts.count_distinct`` was set, as counting them takes a read per round.
        peak_bytes: peak of MLX's allocator.
    """

    target_forwards: int = 0
    target_tokens: int = 0
    drafter_forwards: int = 0
    host_reads: int = 0
    prefill_reads: int = 0
    rounds: int = 0
    row_rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_forwards: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    row_copies: int = 0
    bytes_copied: int = 0
    expert_pairs: int = 0
    distinct_experts: int = 0
    peak_bytes: int = 0
