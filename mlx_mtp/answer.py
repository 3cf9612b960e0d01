"""Requests as text. Owns: their resolved parameters, jobs for the engine, texts and results."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from mlx_mtp.decode.request import Job, Progress
from mlx_mtp.decode.sampling import RowSampling
from mlx_mtp.errors import MlxMtpError, UsageError
from mlx_mtp.generation_config import GenerationDefaults
from mlx_mtp.tokenizer import TextDelta, TextStream, Tokenizer
from mlx_mtp.types import Chunk, Message, Request, RequestStats, Result, SamplingParams

_T = TypeVar("_T")
Prompt = str | list[Message] | Request
"""What a user may ask: one user message, a conversation, or either with parameters of its own."""


class Answer:
    """One request being answered.

    Args:
        request: what to answer.
        params: sampling parameters; the request's own win over them, both over the model's.
        defaults: the model's.
        context: tokens that prompt and answer may have together.
        tokenizer: the model's; None leaves the text empty and takes token ids only.
        thinking: let the model think first.

    Attributes:
        job: for the engine.
        seed: the request's, drawn here where none is given.

    Raises:
        UsageError: a conversation that does not fit the template, or text without a tokenizer.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams | None,
        defaults: GenerationDefaults,
        context: int,
        tokenizer: Callable[[], Tokenizer] | None,
        thinking: bool = False,
    ) -> None:
        self.request = request
        resolved = _merged(request.params, params)
        self.seed = secrets.randbelow(2**32) if resolved.seed is None else resolved.seed
        self._text = ""
        self._thinking = ""
        self._token_ids: list[int] = []
        self._last: Progress | None = None
        self._stream: TextStream | None = None
        self._pending: deque[TextDelta] = deque()
        ids = request.token_ids
        if tokenizer is not None:
            if ids is None:
                ids = tokenizer().encode_chat(_messages(request), thinking=thinking)
            self._stream = TextStream(tokenizer(), resolved.stop)
        elif ids is None or resolved.stop:
            raise UsageError("Prompts and stop strings need text.", "Use `generate`.")
        room = context - len(ids)
        own_stops = () if resolved.ignore_eos else defaults.eos_token_ids
        self.job = Job(
            token_ids=tuple(ids),
            max_tokens=max(1, min(room, resolved.max_tokens or room)),
            sampling=RowSampling(
                temperature=_first(resolved.temperature, defaults.temperature),
                top_k=_first(resolved.top_k, defaults.top_k),
                top_p=_first(resolved.top_p, defaults.top_p),
                min_p=_first(resolved.min_p, defaults.min_p),
                seed=self.seed,
            ),
            stop_ids=frozenset((*own_stops, *resolved.stop_token_ids)),
            watch=None if self._stream is None else self._watch,
        )

    def _watch(self, token: int) -> bool:
        assert self._stream is not None
        delta = self._stream.add(token)
        self._pending.append(delta)
        return delta.stopped

    def advance(self, progress: Progress) -> list[Chunk]:
        """Take in what a step brought; the chunks to stream, one per token.

        The last chunk of a finished answer also carries what was held back.
        """
        self._last = progress
        chunks = []
        for token in progress.token_ids:
            delta = self._pending.popleft() if self._pending else TextDelta()
            chunks.append(Chunk(delta.text, (token,), delta.thinking))
        if progress.finish_reason is not None:
            rest = TextDelta() if self._stream is None else self._stream.finish()
            last = chunks.pop() if chunks else Chunk()
            chunks.append(
                replace(
                    last,
                    text=last.text + rest.text,
                    thinking=last.thinking + rest.thinking,
                    finish_reason=progress.finish_reason,
                    stats=progress.stats,
                )
            )
        self._token_ids += progress.token_ids
        self._text += "".join(chunk.text for chunk in chunks)
        self._thinking += "".join(chunk.thinking for chunk in chunks)
        return chunks

    def result(self) -> Result:
        """The finished answer."""
        last = self._last
        assert last is not None
        assert last.finish_reason is not None
        assert last.stats is not None
        return Result(
            text=self._text,
            token_ids=self._token_ids,
            finish_reason=last.finish_reason,
            seed=self.seed,
            stats=last.stats,
            thinking=self._thinking,
            error=None if last.error is None else str(last.error),
            id=self.request.id,
        )


def as_request(prompt: Prompt) -> Request:
    """A prompt in any of its forms as a request."""
    if isinstance(prompt, Request):
        return prompt
    if isinstance(prompt, list):
        return Request(messages=prompt)
    return Request(prompt=prompt)  # refuses what is no text


def numbered(index: int, prompt: Prompt) -> Request:
    """The same with its number as its id where it has none."""
    request = as_request(prompt)
    return request if request.id is not None else replace(request, id=str(index))


def failed(request: Request, error: MlxMtpError) -> Result:
    """The result of a request that could not be started."""
    stats = RequestStats()
    return Result("", [], "error", None, stats, error=str(error), id=request.id)


def _messages(request: Request) -> list[Message]:
    if request.messages is not None:
        return request.messages
    return [{"role": "user", "content": request.prompt}]


def _merged(own: SamplingParams | None, call: SamplingParams | None) -> SamplingParams:
    """A request's own parameters over those of the call, field by field."""
    own, call = own or SamplingParams(), call or SamplingParams()
    return replace(
        call,
        **{
            name: value
            for name, value in vars(own).items()
            if value is not None and value != () and value is not False
        },
    )


def _first(value: _T | None, default: _T) -> _T:
    return default if value is None else value
