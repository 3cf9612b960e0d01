"""The Python API. Owns: loading a pair, text in and text out, defaults, results in input order.

Everything below works on token ids; everything a user or a command needs is here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import index
from pathlib import Path
from typing import Literal, get_args

import mlx.core as mx

from mlx_mtp.answer import Answer, Prompt, answer_all, as_request, numbered
from mlx_mtp.decode.engine import Engine
from mlx_mtp.errors import UsageError
from mlx_mtp.files import read_json, read_optional_json
from mlx_mtp.generation_config import GenerationDefaults
from mlx_mtp.hub import choose_drafter, resolve
from mlx_mtp.model.drafter import Drafter, DraftPosition
from mlx_mtp.model.load import load_drafter, load_target
from mlx_mtp.model.target import Target
from mlx_mtp.pair import DrafterConfig, TargetConfig, check_pair
from mlx_mtp.tokenizer import Tokenizer
from mlx_mtp.types import (
    MAX_DEPTH,
    MAX_ROWS,
    Chunk,
    Request,
    Result,
    RunStats,
    SamplingParams,
)

log = logging.getLogger("mlx_mtp")

DEFAULT_DEPTH = 4
"""Tokens drafted per round where the assistant's generation_config proposes nothing."""

Depth = int | Literal["auto"]


def load(
    name: str | Path,
    drafter: str | Path | None = "auto",
    dtype: str | None = None,
    *,
    draft_position: DraftPosition = "bonus",
) -> LLM:
    """Load a target and its drafter.

    Args:
        name: a folder, a hub id, "pocket" or "pocket-moe"; Hugging Face layout or MLX conversion.
        drafter: "auto" looks for the target's own (and decodes plainly where there is none),
            None decodes plainly, a folder or hub id must be a drafter of this target.
        dtype: of the activations ("float32", "bfloat16", "float16"); None: as stored.
        draft_position: see model.drafter.Drafter.

    Raises:
        ModelNotFoundError: not found, gated, incomplete or damaged.
        IncompatibleError: not a Gemma 4 target, or a drafter of another target.
    """
    if draft_position not in get_args(DraftPosition):
        raise UsageError(
            f"draft_position is {draft_position!r}.",
            f"Give one of {', '.join(get_args(DraftPosition))}.",
        )
    files = resolve(str(name))
    raw = read_json(files.path / "config.json")
    config = TargetConfig.from_dict(raw, files.name)
    warnings: list[str] = []
    drafter_path, drafter_name = choose_drafter(files, drafter)
    drafter_config = None
    if drafter_path is not None:
        label = drafter_name or drafter_path.name
        drafter_config = DrafterConfig.from_dict(read_json(drafter_path / "config.json"), label)
        warnings += check_pair(config, drafter_config, files.name, label)
    elif drafter == "auto":
        warnings.append(f"No drafter was found for {files.name}; it decodes plainly.")
    _wire_memory()
    target = Target(load_target(files.path, config, dtype), config)
    defaults = GenerationDefaults.from_dict(
        read_optional_json(files.path / "generation_config.json"), raw
    )
    defaults.check_vocabulary(config.vocab_size)
    llm = LLM(target, files.path, files.name, defaults)
    llm.warnings += warnings
    if drafter_path is not None and drafter_config is not None:
        llm.drafter = Drafter(
            load_drafter(drafter_path, drafter_config, target.dtype),
            drafter_config,
            draft_position,
        )
        llm.drafter_name = drafter_name
        own = GenerationDefaults.from_dict(
            read_optional_json(drafter_path / "generation_config.json")
        )
        llm.default_depth = min(own.num_assistant_tokens or DEFAULT_DEPTH, MAX_DEPTH)
    return llm


def _wire_memory() -> None:
    """Keep the weights resident on macOS; a no-op elsewhere."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if mx.metal.is_available() and limit is not None:
        mx.set_wired_limit(int(limit))


class LLM:
    """A loaded target and its drafter; made by `load`.

    Attributes:
        model_name, drafter_name: as they were found; drafter_name is None without a drafter.
        defaults: what the model's generation_config asks for.
        default_depth: tokens drafted per round at draft_depth "auto".
        warnings: what the user should know about this pair, one sentence each.
        run_stats: counts since load or `reset_run_stats`.
    """

    def __init__(
        self, target: Target, path: Path, model_name: str, defaults: GenerationDefaults
    ) -> None:
        self.target = target
        self.drafter: Drafter | None = None
        self.model_name = model_name
        self.drafter_name: str | None = None
        self.defaults = defaults
        self.default_depth = DEFAULT_DEPTH
        self.warnings: list[str] = []
        self.run_stats = RunStats()
        self._path = path
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded at first use. Raises ModelNotFoundError without one."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self._path, self.defaults.eos_token_ids)
        return self._tokenizer

    def reset_run_stats(self) -> None:
        """Start counting anew."""
        self.run_stats = RunStats()
        mx.reset_peak_memory()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        draft_depth: Depth = "auto",
        thinking: bool = False,
    ) -> Iterator[Chunk]:
        """Answer one prompt as it is produced; closing the iterator stops it.

        Args:
            prompt: one user message, a conversation, or a Request.
            params: sampling parameters; a Request's own win.
            draft_depth: tokens drafted per round, 0..MAX_DEPTH; it never changes the text.
            thinking: let the model think first, where its template knows how to.

        Yields:
            Chunks, one per token; the last one carries finish_reason and stats.

        Raises:
            UsageError: the prompt or a parameter cannot be served.
            VerificationError: the model computes no numbers; raised while streaming.
        """
        request = as_request(prompt)
        answer = self._answering(params, thinking)(request)
        engine = self._engine(draft_depth, rows=1)
        engine.add(answer.job)
        return self._run_stream(engine, answer)

    def _run_stream(self, engine: Engine, answer: Answer) -> Iterator[Chunk]:
        while engine.has_work:
            for progress in engine.step():
                if progress.error is not None:
                    raise progress.error
                yield from answer.advance(progress)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        batch_size: int = MAX_ROWS,
        draft_depth: Depth = "auto",
        thinking: bool = False,
    ) -> list[Result]:
        """Answer many prompts, up to batch_size of them decoding together.

        A request that can't be served ends with finish_reason "error"; the others go on.

        Args:
            prompts: user messages, conversations or Requests in any mix.
            params: sampling parameters; a Request's own win.
            batch_size: 1..MAX_ROWS.
            draft_depth: as in `stream`.
            thinking: as in `stream`.

        Returns:
            Results in input order.

        Raises:
            UsageError: a parameter of the call itself.
        """
        results = dict(
            self._run(prompts, self._answering(params, thinking), batch_size, draft_depth)
        )
        return [results[number] for number in range(len(results))]

    def as_completed(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        batch_size: int = MAX_ROWS,
        draft_depth: Depth = "auto",
        thinking: bool = False,
    ) -> Iterator[Result]:
        """As `generate`, but give each result when it is finished.

        Prompts are taken as rows become free, a few ahead, so there may be more than memory holds.
        A request without an id gets its number, counted from 0.

        Raises:
            UsageError: a parameter of the call itself.
        """
        requests = (numbered(number, prompt) for number, prompt in enumerate(prompts))
        running = self._run(requests, self._answering(params, thinking), batch_size, draft_depth)
        return (result for _, result in running)

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        batch_size: int = MAX_ROWS,
        draft_depth: Depth = "auto",
    ) -> list[Result]:
        """As `generate`, from token ids to token ids; needs no tokenizer, leaves text empty.

        Raises UsageError: a parameter of the call itself, or stop strings, which need text.
        """
        if params is not None and params.stop:
            raise UsageError("Stop strings need text.", "Use stop_token_ids, or `generate`.")
        try:
            requests = [Request(token_ids=list(map(index, ids))) for ids in prompts]
        except TypeError as error:
            raise UsageError("A prompt is not a list of token ids.", "Give ids.") from error

        def answering(request: Request) -> Answer:
            return Answer(request, params, self.defaults, self._context, None)

        results = dict(self._run(requests, answering, batch_size, draft_depth))
        return [results[number] for number in range(len(results))]

    def _run(
        self,
        prompts: Iterable[Prompt],
        answering: Callable[[Request], Answer],
        batch_size: int,
        draft_depth: Depth,
    ) -> Iterator[tuple[int, Result]]:
        """Number and result of each request, in the order in which they finish."""
        if isinstance(prompts, str):
            raise UsageError("The prompts are one text.", "Give a list of prompts.")
        source = iter(prompts)
        first = list(islice(source, MAX_ROWS + 1))  # enough to know how many rows are needed
        engine = self._engine(draft_depth, rows=batch_size, work=len(first))
        requests = enumerate(map(as_request, chain(first, source)))
        return answer_all(engine, requests, answering)

    @property
    def _context(self) -> int:
        return self.target.config.max_position_embeddings

    def _answering(
        self, params: SamplingParams | None, thinking: bool
    ) -> Callable[[Request], Answer]:
        if params is not None and not isinstance(params, SamplingParams):
            raise UsageError("The parameters are no SamplingParams.", "Build them first.")

        def answering(request: Request) -> Answer:
            return Answer(
                request, params, self.defaults, self._context, lambda: self.tokenizer, thinking
            )

        return answering

    def _engine(self, draft_depth: Depth, rows: int, work: int = 1) -> Engine:
        """An engine of at most `rows` rows, and no more than there is work for."""
        if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= MAX_ROWS:
            raise UsageError(
                f"batch_size is {rows!r}.", f"Give a whole number from 1 to {MAX_ROWS}."
            )
        depth = self.default_depth if draft_depth == "auto" else draft_depth
        if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= MAX_DEPTH:
            raise UsageError(
                f"draft_depth is {draft_depth!r}.",
                f'Give "auto" or a whole number from 0 to {MAX_DEPTH}.',
            )
        if self.drafter is None and draft_depth not in ("auto", 0):
            raise UsageError(
                f"draft_depth is {draft_depth}, but no drafter is loaded.",
                "Load one, or leave draft_depth out.",
            )
        return Engine(
            self.target,
            self.drafter,
            lambda _: depth,
            rows=max(1, min(rows, work)),
            prefill_ahead=work > rows,
            suppress=self.defaults.suppress_tokens,
            stats=self.run_stats,
        )
