"""mlx-lm and mlx-vlm as engines that `bench/batch.py` can measure, and how their work is counted.

Both are driven through their own batch interfaces and read the pair from the files ours is read
from. Counting wraps their methods, so it is done in a run that is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import mlx.core as mx


class Job(NamedTuple):
    """A prompt as ids, and the most ids to produce for it."""

    ids: list[int]
    max_tokens: int


class Answers(NamedTuple):
    """What an engine made of some jobs.

    Attributes:
        ids: produced for each job, in the order of the jobs.
        prompt_seconds: the part of the run that went into prompts, as the engine itself says.
    """

    ids: list[list[int]]
    prompt_seconds: float


@dataclass
class Counts:
    """What one run of all jobs took.

    Attributes:
        target_forwards: verify or step passes, each for all rows that are live.
        prefill_forwards: passes over prompts.
        drafter_forwards: calls of the drafter, whether for all rows or for one.
        drafted, accepted: tokens proposed and kept, summed over rows.
        host_reads: calls of `item` and `tolist` on arrays.
        evals: calls of `mx.eval`.
    """

    target_forwards: int = 0
    prefill_forwards: int = 0
    drafter_forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    host_reads: int = 0
    evals: int = 0


class Engine(Protocol):
    """Something that answers jobs greedily, a limited number of rows at a time."""

    name: str

    def generate(self, jobs: Sequence[Job]) -> Answers:
        """Answer all jobs."""

    @contextmanager
    def counting(self, counts: Counts) -> Iterator[None]:
        """Add the work of the runs within to `counts`."""


def answered_alone(
    jobs: Sequence[Job], steps: Callable[[Job], Iterator[tuple[Any, Any]]], stop_ids: Sequence[int]
) -> Answers:
    """Answer one job after the other by a generator of tokens; its first one ends the prompt."""
    answers, prompt_seconds = [], 0.0
    for job in jobs:
        began, ids = perf_counter(), []
        for token, _ in steps(job):
            if not ids:
                prompt_seconds += perf_counter() - began
            ids.append(int(token))
            if ids[-1] in stop_ids or len(ids) == job.max_tokens:
                break
        answers.append(ids)
    return Answers(answers, prompt_seconds)


class MlxLmPlain:
    """mlx-lm's `batch_generate`, whose rows leave and join as answers end; `generate_step` where
    one answer is produced at a time.

    Args:
        pair: the folder of the target.
        rows: most answers that decode together, and most prompts of one prefill.
    """

    name = "mlx-lm-plain"

    def __init__(self, pair: Path, rows: int) -> None:
        from mlx_lm import load

        self._model, self._tokenizer = load(str(pair))[:2]
        self._rows = rows

    def generate(self, jobs: Sequence[Job]) -> Answers:
        from mlx_lm import batch_generate
        from mlx_lm.generate import generate_step

        if self._rows == 1:
            return answered_alone(
                jobs,
                lambda job: generate_step(
                    mx.array(job.ids), self._model, max_tokens=job.max_tokens
                ),
                self._tokenizer.eos_token_ids,
            )

        response = batch_generate(
            self._model,
            self._tokenizer,
            [job.ids for job in jobs],
            max_tokens=[job.max_tokens for job in jobs],
            return_token_ids=True,
            completion_batch_size=self._rows,
            prefill_batch_size=self._rows,
        )
        return Answers(response.token_ids, response.stats.prompt_time)

    @contextmanager
    def counting(self, counts: Counts) -> Iterator[None]:
        def forward(_model: Any, inputs: mx.array, *_: Any, **__: Any) -> None:
            if inputs.shape[1] == 1:  # prompts go in without their last token, then that alone
                counts.target_forwards += 1
            else:
                counts.prefill_forwards += 1

        with _watched(type(self._model), "__call__", forward):
            yield


class MlxVlm:
    """mlx-vlm's `BatchGenerator`, as its server runs it; its `generate_step` where one answer is
    produced at a time.

    With a drafter it takes the waiting prompts shortest first, a batch of `rows` of them at a time;
    while a drafted batch decodes nothing joins it. Its `batch_generate` differs in taking text and
    in decoding all prompts given to it as one batch.

    Args:
        pair: the folder of the target, with the drafter in drafter/.
        rows: most answers that decode together.
        depth: tokens to draft per round; mlx-vlm drafts fewer where its own rule says so. 0 loads
            no drafter.
        stop_ids: that end an answer.
    """

    def __init__(self, pair: Path, rows: int, depth: int, stop_ids: Sequence[int]) -> None:
        from mlx_vlm import load
        from mlx_vlm.speculative.drafters import load_drafter

        self.name = "mlx-vlm-mtp" if depth else "mlx-vlm-plain"
        self._model, self._processor = load(str(pair))
        self._drafting: dict[str, Any] = {}
        if depth:
            drafter, kind = load_drafter(str(pair / "drafter"))
            # it counts the token that is verified with them
            self._drafting = {
                "draft_model": drafter,
                "draft_kind": kind,
                "draft_block_size": depth + 1,
            }
        self._rows = rows
        self._stop_ids = stop_ids

    def generate(self, jobs: Sequence[Job]) -> Answers:
        from mlx_vlm.generate import BatchGenerator
        from mlx_vlm.generate.ar import generate_step

        if self._rows == 1:
            return answered_alone(
                jobs,
                lambda job: generate_step(
                    mx.array([job.ids]),
                    self._model,
                    None,
                    None,
                    max_tokens=job.max_tokens,
                    temperature=0.0,
                    **self._drafting,
                ),
                self._stop_ids,
            )
        generator = BatchGenerator(
            self._model.language_model,
            self._processor,
            completion_batch_size=self._rows,
            prefill_batch_size=self._rows,
            compute_logprobs=False,
            greedy_sampling=True,
            **self._drafting,
        )
        uids = generator.insert(
            [job.ids for job in jobs],
            max_tokens=[job.max_tokens for job in jobs],
            prompt_kwargs=[self._embedded(job) for job in jobs],
        )
        ids: dict[int, list[int]] = {uid: [] for uid in uids}
        while generator.has_work:
            for response in generator.next()[1]:
                if response.token is not None:
                    ids[response.uid].append(response.token)
        generator.close()
        return Answers([ids[uid] for uid in uids], generator.stats().prompt_time)

    def _embedded(self, job: Job) -> dict[str, Any]:
        """What the generator wants beside the ids; not evaluated here."""
        features = self._model.get_input_embeddings(mx.array([job.ids])).to_dict()
        return {name: value for name, value in features.items() if value is not None}

    @contextmanager
    def counting(self, counts: Counts) -> Iterator[None]:
        from mlx_vlm.speculative.mtp import _MTPVerifyResult

        def forward(_model: Any, inputs: mx.array, *_: Any, **__: Any) -> None:
            if not self._drafting and inputs is not None and inputs.shape[1] == 1:
                counts.target_forwards += 1
            else:
                counts.prefill_forwards += 1

        def commit(_: Any, _model: Any, _caches: Any, kept: int | list[int], block: int) -> None:
            accepted = [kept] if isinstance(kept, int) else kept
            # A verify runs the text model too, so it was counted as a prefill above.
            counts.prefill_forwards -= 1
            counts.target_forwards += 1
            counts.drafted += len(accepted) * (block - 1)
            counts.accepted += sum(accepted)

        def draft(*_: Any, **__: Any) -> None:
            counts.drafter_forwards += 1

        text_model = self._model.language_model.model
        with ExitStack() as watches:
            watches.enter_context(_watched(type(text_model), "__call__", forward))
            watches.enter_context(_watched(_MTPVerifyResult, "commit", commit))
            if self._drafting:
                drafter = type(self._drafting["draft_model"])
                watches.enter_context(_watched(drafter, "_forward_hidden", draft))
            yield


@contextmanager
def counting_host(counts: Counts) -> Iterator[None]:
    """Add what the runs within ask of the device from the host to `counts`."""

    def read(*_: Any) -> None:
        counts.host_reads += 1

    def evaluate(*_: Any) -> None:
        counts.evals += 1

    with ExitStack() as watches:
        watches.enter_context(_watched(mx.array, "item", read))
        watches.enter_context(_watched(mx.array, "tolist", read))
        watches.enter_context(_watched(mx, "eval", evaluate))
        yield


@contextmanager
def _watched(owner: Any, name: str, seen: Callable[..., None]) -> Iterator[None]:
    """Call `seen` with the arguments of each call of a class's or module's function."""
    original = getattr(owner, name)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        seen(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)
