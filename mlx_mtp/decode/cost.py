"""What a round costs. Owns: seconds by (rows, depth), measured where rounds were run, modelled
elsewhere.

The model is a table by family of what n = rows * (depth + 1) token rows cost, bent through what
was measured. Knows nothing of acceptance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from math import exp, hypot, inf, isfinite, log
from typing import Any

from mlx_mtp.pair import Family
from mlx_mtp.types import MAX_DEPTH, MAX_ROWS

KEPT_SAMPLES = 32
KNOWN_SAMPLES = 6
"""Samples from which on a cell's estimate is good enough to notice that everything drifts."""

TRIED = 3
"""Usable measurements that a depth gets when it is tried."""

FIRST_USE = 5.0
"""Plain rounds of one row that a first use is taken to cost before one was seen."""

FIRST_USE_SEEN = 3
"""Rounds of a cell after which what its first one took longer is known."""

SHADOW = -1
"""Stands for the depth of a plain round that also drafted one token without verifying it."""

DRIFT = 0.01
"""Share of a deviation that is taken for drift (longer context, heat) of every depth."""

NOISE = 0.05
"""Standard deviation of a sample's logarithm before it is known."""

JUMP = 0.12
"""Log of the ratio by which five rounds in a row must deviate to be a jump of every depth."""

# Seconds of a target forward over n token rows, relative to one; between the points it is linear.
# M3/M4 families (quantized matmul: one weight pass per 5 rows, then tiles of 32), a little flatter
# where M3 Ultra and M5 are; with experts two thirds of it, their reads growing with every token.
_DENSE: tuple[tuple[int, float], ...] = (
    (1, 1.0),
    (2, 1.02),
    (3, 1.12),
    (4, 1.3),
    (5, 1.5),
    (8, 2.2),
    (10, 3.6),
    (32, 3.8),
)
_DENSE += ((33, 7.0), (64, 7.2))
_DRAFT_STEP = {"dense": 0.06, "unified": 0.08, "e-series": 0.08, "experts": 0.09}


PRIOR_DOUBT = {"dense": 0.5, "experts": 0.3}
"""Standard deviation of the log of a cost that the prior gives. Chips differ in where the steps of
dense matmuls are; with experts the cost is nearly linear in the tokens on all of them."""


def _interpolate(points: Iterable[tuple[float, float]], at: float) -> float:
    """Linear between the points (ascending), constant outside them."""
    left: tuple[float, float] | None = None
    for x, y in points:
        if at <= x:
            if left is None or x == left[0]:
                return y
            return left[1] + (y - left[1]) * (at - left[0]) / (x - left[0])
        left = (x, y)
    return left[1] if left else 0.0


@cache
def prior_cost(family: Family, rows: int, depth: int) -> float:
    """A round's cost in plain rounds of one row, before anything was measured."""
    n = rows * (depth + 1)
    target = _interpolate(_DENSE, n)
    if family == "experts":
        target = 0.5 + 0.25 * target + 0.25 * n
    return target + depth * prior_draft_step(family, rows)


def prior_draft_step(family: Family, rows: int) -> float:
    """A draft step's cost in plain rounds of one row, before one was measured."""
    return _DRAFT_STEP[family] * (0.9 + 0.1 * rows)


class Cell:
    """Seconds of one (rows, depth), divided by the level of their time."""

    def __init__(self, samples: Iterable[float] = ()) -> None:
        self.samples: deque[float] = deque(samples, maxlen=KEPT_SAMPLES)
        self.seen = 0
        self.first = 0.0
        self.measured_at = 0
        self.estimate = 0.0
        self.update()

    def update(self) -> None:
        """Recompute the estimate: the mean of the middle half; the lower middle of fewer than 8."""
        ordered = sorted(self.samples)
        count = len(ordered)
        if count < 8:
            self.estimate = ordered[(count - 1) // 2] if ordered else 0.0
        else:
            middle = ordered[count // 4 : count - count // 4]
            self.estimate = sum(middle) / len(middle)


class _RowCosts:
    """What rounds of one number of rows cost.

    `level` follows what makes all depths slower or faster (context length, heat, other programs),
    so that a depth not run for long stays comparable.
    """

    def __init__(self) -> None:
        self.cells: dict[int, Cell] = {}
        self.level = 1.0
        self.noise = NOISE
        self.rounds = 0
        self.residuals: deque[float] = deque(maxlen=5)
        self.residuals_of: int | None = None

    def observe(self, depth: int, seconds: float) -> None:
        self.rounds += 1
        cell = self.cells.setdefault(depth, Cell())
        cell.seen += 1
        if cell.seen == 1:
            cell.first = seconds  # with compiling and other first-use costs
            return
        cell.measured_at = self.rounds
        sample = seconds / self.level
        known = len(cell.samples) >= KNOWN_SAMPLES
        residual = log(sample / cell.estimate) if known else 0.0
        cell.samples.append(sample)
        if known:
            self._drift(depth, cell, residual)
        cell.update()

    def _drift(self, depth: int, cell: Cell, residual: float) -> None:
        if self.residuals_of != depth:
            self.residuals.clear()
            self.residuals_of = depth
        self.residuals.append(residual)
        self.noise += 0.05 * (min(1.25 * abs(residual), 0.2) - self.noise)
        middle = sorted(self.residuals)[len(self.residuals) // 2]
        if len(self.residuals) == 5 and abs(middle) > JUMP:
            self.residuals.clear()
            self.level *= exp(middle)
            for place in range(-5, 0):
                cell.samples[place] *= exp(-middle)
        else:
            self.level *= exp(DRIFT * min(max(residual, -0.1), 0.1))

    def known(self) -> list[tuple[int, float]]:
        """(depth, seconds) measured, by depth; one sample alone may be an outlier."""
        return sorted(
            (d, c.estimate) for d, c in self.cells.items() if d >= 0 and len(c.samples) >= 2
        )


class CostModel:
    """Seconds of a round by (rows, depth), and how far they may be off.

    Args:
        family: of the target; chooses the table used before anything was measured.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._rows: dict[int, _RowCosts] = {}
        self._first_uses: deque[float] = deque(maxlen=5)

    def observe(self, rows: int, depth: int, seconds: float) -> None:
        """Add a measured round; depth may be SHADOW. Nonsense (zero, NaN) is left out."""
        if not (isfinite(seconds) and seconds > 0):
            return
        costs = self._rows.setdefault(rows, _RowCosts())
        costs.observe(depth, seconds)
        if depth >= 0 and costs.cells[depth].seen == FIRST_USE_SEEN:
            cell = costs.cells[depth]
            self._first_uses.append(max(0.0, cell.first - cell.estimate * costs.level))

    def first_use(self, rows: int, depth: int) -> float:
        """Seconds that running a depth costs once, on top: none if it was run, restored or not."""
        if not self.is_new(rows, depth):
            return 0.0
        if self._first_uses:  # the lower middle: one may have been an outlier
            return sorted(self._first_uses)[(len(self._first_uses) - 1) // 2] / self.level(rows)
        return FIRST_USE * self.table(rows)[0][0] / prior_cost(self.family, rows, 0)

    def is_new(self, rows: int, depth: int) -> bool:
        """Whether no such round was run yet, restored cells included."""
        return rows not in self._rows or not (
            depth in self._rows[rows].cells and self._rows[rows].cells[depth].seen
        )

    def rounds(self, rows: int) -> int:
        """Rounds measured with this many rows."""
        return self._rows[rows].rounds if rows in self._rows else 0

    def samples(self, rows: int, depth: int) -> int:
        """Usable measurements of a cell."""
        cell = self._rows[rows].cells.get(depth) if rows in self._rows else None
        return len(cell.samples) if cell else 0

    def level(self, rows: int) -> float:
        """What the costs of `table` have to be multiplied by to be seconds of now."""
        return self._rows[rows].level if rows in self._rows else 1.0

    def draft_step(self, rows: int) -> float:
        """Seconds of one draft step, in units of a plain round."""
        if self.samples(rows, SHADOW) and self.samples(rows, 0):
            cells = self._rows[rows].cells
            return max(0.0, cells[SHADOW].estimate / cells[0].estimate - 1)
        return prior_draft_step(self.family, rows) / prior_cost(self.family, rows, 0)

    def table(self, rows: int) -> tuple[list[float], list[float]]:
        """Costs and doubts of depth 0..MAX_DEPTH.

        A depth that was not run gets the prior's cost, corrected by what other numbers of rows
        showed at its n, and by how far its measured neighbours are from that: interpolated in
        log(depth + 1), the last one's outside of them. No round is taken to be cheaper than one
        measured at a smaller depth, or dearer than one at a greater.

        Returns:
            seconds (divide by nothing to compare depths, multiply by `level` for seconds of now),
            and of what a trial would show of their logarithms the standard deviations.
        """
        depths = range(MAX_DEPTH + 1)
        own = self._rows.get(rows)
        known = own.known() if own else []
        guess, doubt = self._from_other_rows(rows)
        costs = [guess(depth) for depth in depths]
        if not own or not known:
            return costs, [doubt] * len(costs)
        points = [(log(depth + 1), log(seconds / costs[depth])) for depth, seconds in known]
        doubts = []
        measured = dict(known)
        for depth in depths:
            if depth in measured:
                costs[depth] = measured[depth]
                age = own.rounds - own.cells[depth].measured_at
                count = len(own.cells[depth].samples)
                shown = own.noise * (1 / count - 1 / (count + TRIED)) ** 0.5
                doubts.append(hypot(shown, min(0.15, 0.0002 * age)))
            else:
                at = log(depth + 1)
                least = max((c for d, c in known if d < depth), default=0.0)
                most = max(min((c for d, c in known if d > depth), default=inf), least)
                costs[depth] = min(max(costs[depth] * exp(_interpolate(points, at)), least), most)
                far = 0.05 + 0.6 * doubt * min(abs(at - x) for x, _ in points)
                between = log(most / least) / 12**0.5 if least and isfinite(most) else far
                doubts.append(min(far, max(between, 0.02)))
        return costs, doubts

    def _from_other_rows(self, rows: int) -> tuple[Callable[[int], float], float]:
        """Cost by depth as the nearest other number of rows lets expect it, and its doubt."""
        measured = [
            (abs(log(other / rows)), other, known)
            for other, costs in self._rows.items()
            if other != rows and (known := costs.known())
        ]
        prior_doubt = PRIOR_DOUBT["experts" if self.family == "experts" else "dense"]
        if not measured:
            return lambda depth: prior_cost(self.family, rows, depth), prior_doubt
        _, other, known = min(measured)
        level = self._rows[other].level
        points = [
            (
                log(other * (depth + 1)),
                log(seconds * level / prior_cost(self.family, other, depth)),
            )
            for depth, seconds in known
        ]
        covered = points[-1][0] - points[0][0]

        def guess(depth: int) -> float:
            ratio = _interpolate(points, log(rows * (depth + 1)))
            return prior_cost(self.family, rows, depth) * exp(ratio)

        return guess, prior_doubt / 2 if covered else prior_doubt

    def to_json(self) -> list[list[float]]:
        """[rows, depth, seconds, samples] of every cell."""
        return [
            [rows, depth, cell.estimate * costs.level, len(cell.samples)]
            for rows, costs in sorted(self._rows.items())
            for depth, cell in sorted(costs.cells.items())
            if cell.samples
        ]

    def load(self, cells: Any) -> None:
        """Start from cells of `to_json`; whatever is not one is left out.

        They count as few samples, and their first measurement is discarded as ever.
        """
        for item in cells if isinstance(cells, list) else ():
            match item:
                case [int(rows), int(depth), int() | float() as seconds, int(count)]:
                    usable = 1 <= rows <= MAX_ROWS and SHADOW <= depth <= MAX_DEPTH and count > 0
                    if usable and isfinite(seconds) and seconds > 0:
                        costs = self._rows.setdefault(rows, _RowCosts())
                        costs.cells[depth] = Cell([float(seconds)] * min(count, 3))
