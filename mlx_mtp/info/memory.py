"""What a pair takes in memory by rows and context. Owns: which cells are looked at; the arithmetic
is the engine's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mlx_mtp.model.memory import MemoryBudget, Needed
from mlx_mtp.model.span import SPARE_SLOTS

ROWS = (1, 2, 4, 8)
CONTEXTS = tuple(kilo * 1024 for kilo in (2, 8, 32, 128, 256))
"""Tokens of prompt and answer together."""


class Cell(NamedTuple):
    """So many rows of so many tokens each.

    Attributes:
        needed: bytes at the peak, by what takes them.
        fits: within the limit.
    """

    rows: int
    context: int
    needed: Needed
    fits: bool


@dataclass(frozen=True)
class MemoryTable:
    """All cells.

    Attributes:
        limit: bytes that all of it may take.
        target, drafter: bytes of the weights once loaded; they are in every cell.
        cells: by context, then by rows.
    """

    limit: int
    target: int
    drafter: int
    cells: tuple[Cell, ...]

    @classmethod
    def of(cls, budget: MemoryBudget, drafter: int) -> MemoryTable:
        """Of a budget whose weights are a target's and, in part, a drafter's."""
        longest = budget.config.max_position_embeddings
        contexts = [context for context in CONTEXTS if context < longest]
        cells = []
        for context in [*contexts, longest]:
            for rows in ROWS:
                needed = budget.parts(rows, context + SPARE_SLOTS)
                cells.append(Cell(rows, context, needed, needed.total <= budget.limit))
        return cls(budget.limit, budget.weights - drafter, drafter, tuple(cells))

    @property
    def contexts(self) -> list[int]:
        return sorted({cell.context for cell in self.cells})

    def row(self, context: int) -> list[Cell]:
        """The cells of a context, by rows."""
        return [cell for cell in self.cells if cell.context == context]
