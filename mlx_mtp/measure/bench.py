"""Plain decoding and drafting at every depth, in turns. Owns: what is run, in which order, and what
is run before it counts.

For each number of rows every depth is warmed up once; then all depths answer the same few prompts
in turns, then the next few, in an order that is rotated, so that what heats up or slows down the
machine meets all of them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.decode.depth import DepthController
from mlx_mtp.decode.policy import DepthPolicy, FixedDepth
from mlx_mtp.errors import UsageError
from mlx_mtp.llm import LLM
from mlx_mtp.measure.bandwidth import Reads
from mlx_mtp.measure.cell import Cell, Depth, make_cell
from mlx_mtp.measure.experts import ExpertTiming, best_strategy, time_experts
from mlx_mtp.measure.prompts import FILLS, PromptSet
from mlx_mtp.measure.replay import as_array, write_script
from mlx_mtp.measure.run import Run, joined, run_prompts
from mlx_mtp.types import MAX_DEPTH, SamplingParams

log = logging.getLogger("mlx_mtp")

ALL_DEPTHS: tuple[Depth, ...] = (*range(MAX_DEPTH + 1), "auto")
WARM_UP_TOKENS = 16
"""Tokens per row of a warm-up; auto's goes over all prompts, as it learns what rounds cost."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        rows: numbers of rows, each 1..MAX_ROWS.
        depths: 0 among them.
        max_tokens: per answer.
        temperature: 0 is greedy; the seed is every prompt's.
        repeat: measured runs of each number of rows and depth.
        replay: chance by position that a draft is kept, instead of the drafter's drafts.
    """

    rows: tuple[int, ...]
    depths: tuple[Depth, ...]
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeat: int = 3
    replay: tuple[float, ...] | None = None


class Step(NamedTuple):
    """One run of the plan; `repeat` 0 is the warm-up."""

    rows: int
    depth: Depth
    repeat: int


def depths_to_run(
    asked: Sequence[Depth] | None, has_drafter: bool, is_replayed: bool
) -> tuple[Depth, ...]:
    """The depths to measure, 0 always first: it is what the others are compared with.

    Args:
        asked: None: all that can be run.

    Raises:
        UsageError: drafting was asked for and nothing can draft.
    """
    can_draft = has_drafter or is_replayed
    if asked is None:
        return ALL_DEPTHS if can_draft else (0,)
    if not can_draft and any(depth != 0 for depth in asked):
        shown = ", ".join(str(depth) for depth in asked if depth != 0)
        raise UsageError(
            f"There is no drafter for depth {shown}.",
            "Name one with --drafter, measure --depths 0, or give --replay-acceptance.",
        )
    return tuple(depth for depth in ALL_DEPTHS if depth == 0 or depth in asked)


class Bench:
    """A measurement under way.

    Args:
        llm: the pair.
        prompts: what it is asked.
        options: what to measure.

    Attributes:
        experts: times of the target's experts, empty before `choose_experts`.

    Raises:
        UsageError: acceptance is to be replayed at a temperature.
    """

    def __init__(self, llm: LLM, prompts: PromptSet, options: BenchOptions) -> None:
        if options.replay is not None and options.temperature:
            raise UsageError(
                "Acceptance is replayed from the model's greedy text, not from sampled text.",
                "Leave --temperature at 0.",
            )
        self.llm = llm
        self.prompts = prompts
        self.options = options
        self.experts: list[ExpertTiming] = []
        self._runs: dict[tuple[int, Depth], list[Run]] = {}
        # A replayed acceptance must not become part of what is known about this pair.
        family = llm.target.config.family
        self._controller = llm.controller if options.replay is None else DepthController(family)

    @property
    def total(self) -> int:
        """Steps of the whole plan."""
        groups = [len(_groups(len(self.prompts.for_rows(n)), n)) for n in self.options.rows]
        turns = sum(self.options.repeat * count + 1 for count in groups)
        return len(self.options.depths) * turns

    def choose_experts(self) -> None:
        """Time the ways to run the target's experts, if it has any, and use the fastest one from
        here on; it is kept with the costs of rounds."""
        target = self.llm.target
        self.experts = time_experts(target)
        if self.experts:
            target.experts.use(best_strategy(self.experts), target.body.layers)
            self.llm.keep_costs()

    def steps(self) -> Iterator[Step]:
        """Run the plan; each step is given before it is run. What was run until an interruption
        is kept."""
        for rows in self.options.rows:
            for step in self._measure(rows):
                log.info("%s row(s), depth %s, run %s", *step)
                yield step

    def _measure(self, rows: int) -> Iterator[Step]:
        prompts = [
            self.llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
            for prompt in self.prompts.for_rows(rows)
        ]
        groups = _groups(len(prompts), rows)
        work = [_Group(prompts[part], self._scripts(rows, prompts[part])) for part in groups]
        depths = self.options.depths
        for depth in depths:
            yield Step(rows, depth, 0)
            self._warm_up(rows, depth, work)
        for repeat in range(self.options.repeat):
            for number, group in enumerate(work):
                turns = repeat * len(work) + number
                turn = turns * len(depths) // (self.options.repeat * len(work))
                for depth in (*depths[turn:], *depths[:turn]):
                    yield Step(rows, depth, repeat + 1)
                    run = self._run(rows, depth, group, self._params)
                    self._runs.setdefault((rows, depth), []).append(run)

    @property
    def _params(self) -> SamplingParams:
        """With a replayed acceptance answers go on to max_tokens, whatever the model says: it may
        have random weights."""
        return SamplingParams(
            max_tokens=self.options.max_tokens,
            temperature=self.options.temperature,
            seed=self.options.seed,
            ignore_eos=self.options.replay is not None,
        )

    def _warm_up(self, rows: int, depth: Depth, work: Sequence[_Group]) -> None:
        if depth == "auto":
            for group in work:
                self._run(rows, depth, group, self._params)
            return
        params = replace(self._params, max_tokens=min(WARM_UP_TOKENS, self.options.max_tokens))
        self._run(rows, depth, work[0].first(rows), params)

    def _run(self, rows: int, depth: Depth, group: _Group, params: SamplingParams) -> Run:
        policy: DepthPolicy = self._controller if depth == "auto" else FixedDepth(depth)
        gc.collect()
        run = run_prompts(self.llm, group.prompts, params, rows, policy, group.scripts)
        if depth == "auto" and self.options.replay is None:
            self.llm.keep_costs()
        return run

    def _scripts(self, rows: int, prompts: Sequence[Sequence[int]]) -> list[mx.array] | None:
        """The scripts of a replay, from the text of plain decoding with as many rows."""
        if self.options.replay is None:
            return None
        longer = replace(self._params, max_tokens=self.options.max_tokens + MAX_DEPTH)
        plain = run_prompts(self.llm, prompts, longer, rows, FixedDepth(0))
        vocabulary, seed = self.llm.target.config.vocab_size, self.options.seed
        return [
            as_array(
                write_script(
                    result.token_ids, self.options.replay, vocabulary, f"{seed} {list(prompt)}"
                )
            )
            for prompt, result in zip(prompts, plain.results, strict=True)
        ]

    def cells(self) -> list[Cell]:
        """The figures of all that was run so far, by rows and depth."""
        reads = Reads.of(self.llm.target, self.llm.drafter)
        cells = []
        for rows in self.options.rows:
            runs = {depth: self._whole_runs(rows, depth) for depth in self.options.depths}
            if not all(runs.values()):
                continue
            kinds = [prompt.kind for prompt in self.prompts.for_rows(rows)]
            kinds = kinds[: len(runs[0][0].results)]
            plain = [result.token_ids for result in runs[0][0].results]
            for depth, own in runs.items():
                cells.append(make_cell(rows, depth, own, kinds, plain, reads.round))
        return cells

    def _whole_runs(self, rows: int, depth: Depth) -> list[Run]:
        """Runs over all groups; where there is none yet for all depths, one over the groups that
        all depths have run."""
        groups = len(_groups(len(self.prompts.for_rows(rows)), rows))
        done = [len(self._runs.get((rows, other), ())) for other in self.options.depths]
        parts = self._runs.get((rows, depth), [])
        if min(done) < groups:
            return [joined(parts[: min(done)])] if min(done) else []
        starts = range(0, len(parts) - groups + 1, groups)
        return [joined(parts[start : start + groups]) for start in starts]


class _Group(NamedTuple):
    """Prompts that each depth answers in its turn, and their scripts in a replay."""

    prompts: Sequence[Sequence[int]]
    scripts: Sequence[mx.array] | None

    def first(self, count: int) -> _Group:
        """The first few of them."""
        return _Group(self.prompts[:count], self.scripts and self.scripts[:count])


def _groups(prompts: int, rows: int) -> list[slice]:
    """Prompts in groups as small as keep all rows taken: the shorter a turn, the less the depths
    differ in what else goes on in the machine."""
    size = FILLS * rows
    starts = range(0, max(prompts - size, 0) + 1, size)
    ends = [*starts[1:], prompts]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]
