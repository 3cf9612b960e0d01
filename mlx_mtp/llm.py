"""The Python API. Owns: text in and text out, defaults, results in input order.

Everything below works on token ids; everything a user or a command needs is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import index
from pathlib import Path
from threading import Lock

import mlx.core as mx

from mlx_mtp.answer import Answer, Prompt, as_request, numbered
from mlx_mtp.completions import BatchSize, Completions, Stream, rows_asked
from mlx_mtp.decode.depth import DepthController
from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.policy import Depth, DepthPolicy, policy_for
from mlx_mtp.decode.prefix import Prefixes
from mlx_mtp.depth_table import DepthTable
from mlx_mtp.errors import UsageError
from mlx_mtp.generation_config import GenerationDefaults
from mlx_mtp.model.drafter import Drafter
from mlx_mtp.model.memory import MemoryBudget
from mlx_mtp.model.target import Target
from mlx_mtp.session import Session
from mlx_mtp.tokenizer import Tokenizer
from mlx_mtp.types import EXACT_DEPTH, MAX_ROWS, Request, Result, RunStats, SamplingParams
from mlx_mtp.worker import Handle, Worker


class LLM:
    """A loaded target and its drafter; made by `load`.

    Attributes:
        drafter: None decodes plainly.
        path: the target's folder.
        model_name, drafter_name: as they were found; drafter_name is None without a drafter.
        defaults: what the model's generation_config asks for.
        memory: what rows and contexts are admitted within.
        controller, exact_controller: choose the depth at draft_depth "auto"; the second one where
            decoding is exact.
        exact: calls from now on make exact rounds (decode/round.py); a session, and what `submit`
            began, go on as they were made.
        warnings: what the user should know about this pair, one sentence each.
        run_stats: counts since load or `reset_run_stats`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        path: Path,
        model_name: str,
        drafter_name: str | None,
        defaults: GenerationDefaults,
        memory: MemoryBudget,
        warnings: Sequence[str] = (),
        depth_table: DepthTable | None = None,
        exact: bool = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.path = path
        self.model_name = model_name
        self.drafter_name = drafter_name
        self.defaults = defaults
        self.memory = memory
        self._depth_table = depth_table
        self.exact = exact
        known = None if depth_table is None else depth_table.read()
        family, own = target.config.family, known.get("exact") if isinstance(known, dict) else None
        self.controller = DepthController.from_json(family, known)
        self.exact_controller = DepthController.from_json(family, own, EXACT_DEPTH)
        self.warnings = list(warnings)
        self.run_stats = RunStats()
        self._tokenizer: Tokenizer | None = None
        self._worker: Worker | None = None
        self._starting = Lock()

    def __repr__(self) -> str:
        return f"LLM({self.model_name!r}, drafter={self.drafter_name!r})"

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded at first use. Raises ModelNotFoundError without one."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self.path, self.defaults.eos_token_ids)
        return self._tokenizer

    @property
    def parked(self) -> str | None:
        """Why drafts do not pay at present, in words; None while they do or nothing drafts."""
        return None if self.drafter is None else self._controller(self.exact).parked

    def keep_costs(self) -> None:
        """Write down round costs and how experts are run, for the next time this pair is loaded
        on this machine; done after every call that decodes."""
        if self._depth_table is not None:
            strategy, exact = list(self.target.experts.strategy), self.exact_controller.to_json()
            more = {"experts": strategy, "exact": exact}
            self._depth_table.write({**self.controller.to_json(), **more})

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
    ) -> Stream:
        """Answer one prompt as it is produced; `stop()` of the iterator ends it after the present
        round, with its figures, and `close()` where it is.

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
        answer = self._answering(params, thinking)(as_request(prompt))
        return Stream(self._engine(draft_depth, rows=1), answer, self.keep_costs)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        batch_size: BatchSize = "auto",
        draft_depth: Depth = "auto",
        thinking: bool = False,
    ) -> list[Result]:
        """Answer many prompts, up to batch_size of them decoding together.

        A request that can't be served ends with finish_reason "error"; the others go on.

        Args:
            prompts: user messages, conversations or Requests in any mix.
            params: sampling parameters; a Request's own win.
            batch_size: 1..MAX_ROWS; "auto": MAX_ROWS, as far as memory goes.
            draft_depth: as in `stream`.
            thinking: as in `stream`.

        Returns:
            Results in input order.

        Raises:
            UsageError: a parameter of the call itself.
        """
        completions = self._run(prompts, self._answering(params, thinking), batch_size, draft_depth)
        return completions.in_order()

    def as_completed(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        batch_size: BatchSize = "auto",
        draft_depth: Depth = "auto",
        thinking: bool = False,
    ) -> Completions:
        """As `generate`, but give each result when it is finished.

        Prompts are taken as rows become free, a few ahead, so there may be more than memory holds.
        A request without an id gets its number, counted from 0. `stop()` of the iterator begins no
        more of them.

        Raises:
            UsageError: a parameter of the call itself.
        """
        requests = (numbered(number, prompt) for number, prompt in enumerate(prompts))
        return self._run(requests, self._answering(params, thinking), batch_size, draft_depth)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        thinking: bool = False,
    ) -> Handle:
        """Answer a prompt in the background; from any thread.

        Submitted requests decode together, up to MAX_ROWS of them. Other calls may run beside:
        they take turns with them.

        Returns:
            A handle: `result()` waits, iterating over it streams chunks, `cancel()` ends it.

        Raises:
            UsageError: the prompt or a parameter cannot be served, or the model was closed.
        """
        answer = self._answering(params, thinking)(as_request(prompt))
        with self._starting:
            if self._worker is None:
                self._worker = Worker(lambda: self._engine("auto", "auto", work=MAX_ROWS))
        return self._worker.submit(answer)

    def session(self) -> Session:
        """A conversation whose K/V stay in memory, so that a turn prefills only what is new."""
        exact = self.exact
        return Session(
            self.tokenizer,
            self.memory,
            lambda kept: self._engine("auto", rows=1, prefixes=kept, exact=exact),
            lambda params: self._answering(params, thinking=False),
            lambda depth: self._depth_policy(depth, exact),
            self.keep_costs,
        )

    def close(self) -> None:
        """End the thread of submitted requests, which are cancelled. Without any, nothing."""
        if self._worker is not None:
            self._worker.close()
            self.keep_costs()

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        batch_size: BatchSize = "auto",
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
            return Answer(request, params, self.defaults, self.context, None)

        return self._run(requests, answering, batch_size, draft_depth).in_order()

    def _run(
        self,
        prompts: Iterable[Prompt],
        answering: Callable[[Request], Answer],
        batch_size: BatchSize,
        draft_depth: Depth,
    ) -> Completions:
        """The results in the order in which they come."""
        if isinstance(prompts, str):
            raise UsageError("The prompts are one text.", "Give a list of prompts.")
        source = iter(prompts)
        first = list(islice(source, MAX_ROWS + 1))  # enough to know how many rows are needed
        engine = self._engine(draft_depth, rows=batch_size, work=len(first))
        requests = enumerate(map(as_request, chain(first, source)))
        return Completions(engine, requests, answering, self.keep_costs)

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.target.config.max_position_embeddings

    def _answering(
        self, params: SamplingParams | None, thinking: bool
    ) -> Callable[[Request], Answer]:
        if params is not None and not isinstance(params, SamplingParams):
            raise UsageError("The parameters are no SamplingParams.", "Build them first.")

        def answering(request: Request) -> Answer:
            return Answer(
                request, params, self.defaults, self.context, lambda: self.tokenizer, thinking
            )

        return answering

    def _engine(
        self,
        draft_depth: Depth,
        rows: BatchSize,
        work: int = 1,
        prefixes: Prefixes | None = None,
        exact: bool | None = None,
    ) -> Engine:
        """An engine of at most `rows` rows, and no more than there is work for."""
        most, exact = rows_asked(rows), self.exact if exact is None else exact
        return Engine(
            self.target,
            self.drafter,
            self._depth_policy(draft_depth, exact),
            rows=max(1, min(most, work)),
            prefill_ahead=work > most,
            suppress=self.defaults.suppress_tokens,
            stats=self.run_stats,
            budget=self.memory,
            prefixes=prefixes,
            exact=exact,
        )

    def _controller(self, exact: bool) -> DepthController:
        return self.exact_controller if exact else self.controller

    def _depth_policy(self, draft_depth: Depth, exact: bool) -> DepthPolicy:
        """What chooses the depth; "auto" is one controller for all calls: it goes on learning."""
        can_draft, auto = self.drafter is not None, self._controller(exact)
        return policy_for(draft_depth, auto, can_draft=can_draft, exact=exact)
