"""Plain data of a batch: what is asked for and what is told about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_mtp.batch.rows import RowOptions

if TYPE_CHECKING:  # loads mlx, which takes seconds
    from mlx_mtp.completions import BatchSize
    from mlx_mtp.decode.policy import Depth

SHOWN_PROBLEMS = 10
"""Broken and failed rows that are named; the others are counted."""


@dataclass(frozen=True)
class BatchOptions:
    """How a batch is done.

    Attributes:
        rows: what all rows have in common.
        kind: of the input, one of sources.SOURCE_KINDS.
        format: of OUTPUT, one of output.OUTPUT_FORMATS; None: csv for a name that ends so, openai
            where the rows are written so, else simple.
        ordered: write OUTPUT in the order of the input, not in that of completion.
        skip_invalid: record broken rows as failed instead of refusing the input.
        retry_errors: do rows again that failed in an earlier run.
        thinking: let the model think first.
        exact: the rows were or will be decoded exactly, which can change an answer on a GPU.
        batch_size: rows that decode together; "auto" goes by memory, and is halved where the last
            run was killed.
        draft_depth: tokens drafted per round.
    """

    rows: RowOptions = field(default_factory=RowOptions)
    kind: str = "auto"
    format: str | None = None
    ordered: bool = False
    skip_invalid: bool = False
    retry_errors: bool = False
    thinking: bool = False
    exact: bool = False
    batch_size: BatchSize = "auto"
    draft_depth: Depth = "auto"


@dataclass(frozen=True)
class Problem:
    """A row that cannot be served: where it stands and why, in a sentence."""

    place: str
    error: str


@dataclass
class Problems:
    """All of one kind.

    Attributes:
        shown: the first SHOWN_PROBLEMS of them.
        count: how many there are.
    """

    shown: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, place: str, error: str) -> None:
        """Count one more, and keep it while there are few."""
        self.count += 1
        if len(self.shown) < SHOWN_PROBLEMS:
            self.shown.append(Problem(place, error))


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes:
        rows: of the input.
        done: rows with an answer, earlier runs' included.
        failed: rows with an error, earlier runs' included.
        reused: rows that an earlier run had finished.
        interrupted: whether rows are left.
        batch_size: most rows that decoded together.
        seconds: of decoding, loading left out.
        tokens: produced in this run.
        mode: how it decoded and why, in words.
    """

    rows: int
    done: int
    failed: int
    reused: int
    interrupted: bool
    batch_size: int
    seconds: float
    tokens: int
    mode: str
