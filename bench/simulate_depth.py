"""The depth controller on simulated machines: against the best fixed depth and against plain.

    python bench/simulate_depth.py [--quick] [--rounds 800] [--seeds 6]

A machine is a table of what verifying n token rows costs, a text is the share of drafts kept by
position. The controller sees drawn acceptances and noisy seconds only, with outliers, a compile
cost at the first use of every (rows, depth), and a context that grows. What is reported is free of
the luck of the draw: expected tokens over expected seconds of the depths that it chose, its trials,
its shadows and compiling included. The last line of stdout is one JSON document.

Steady texts: speed over the rounds after 300 against the best fixed depth, and over the rounds
after 100 against plain decoding where no depth is faster. Changing texts: the first round after the
change from which on 100 rounds reach 95 % of the best fixed depth for the new text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import mean
from typing import Any, NamedTuple

from mlx_mtp.decode.depth import DepthController
from mlx_mtp.decode.policy import DepthPolicy, Plan
from mlx_mtp.pair import Family
from mlx_mtp.types import MAX_DEPTH

NOISE = 0.04
OUTLIER_SHARE, OUTLIER_FACTOR = 0.01, 3.0
COMPILE_STEPS = 2.0  # assumed: making kernels at a first use, in plain rounds of one row
GROWTH = 0.00015  # assumed: a plain round's time that every round adds as the context grows
SETTLED, SETTLED_PLAIN = 300, 100
CHANGE_AT, FOLLOW_WINDOW, FOLLOW_STEP, FOLLOW_LIMIT = 300, 100, 5, 150
FOLLOWED = 0.95

Table = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Machine:
    """What rounds cost on a chip, in milliseconds.

    Attributes:
        fixed: per round, whatever it verifies.
        dense: per round, times what `table` says of n token rows.
        per_token: per token row: experts are read for every (token, expert) pair.
        draft: per draft step of one row; 0.1 of it more for each further row (assumed).
    """

    name: str
    family: Family
    table: Table
    fixed: float
    dense: float
    per_token: float
    draft: float

    def seconds(self, rows: int, depth: int) -> float:
        n = rows * (depth + 1)
        verify = self.fixed + self.dense * interpolate(self.table, n) + self.per_token * n
        return (verify + depth * self.draft_step(rows)) / 1000

    def draft_step(self, rows: int) -> float:
        return self.draft * (0.9 + 0.1 * rows)


def interpolate(table: Table, n: int) -> float:
    """Linear between the points of a table, its last value behind them."""
    for (left, low), (right, high) in pairwise(table):
        if n <= right:
            return low + (high - low) * (n - left) / (right - left)
    return table[-1][1]


# Dense 4-bit matmuls over n token rows, relative to one.
TABLES: dict[str, Table] = {
    # "M1/M2 near linear up to 6-14 rows": slope 0.65, as 31B with blocks of 4 was measured at
    # 0.75-0.96 of plain decoding (mlxcel#216). At the limit of its class, 12, both kernels are
    # taken to cost the same; tiles of 32 rows behind it.
    "M1 Ultra": ((1, 1.0), (12, 8.2), (32, 8.2), (33, 16.0), (64, 16.0)),
    # mlx#3863: 1.0, 1.28, 2.04, 2.5, 3.95 and 7.8 at 2, 4, 6, 8, 10-32 and 33; 3 and 5 between.
    "M3 Max": (
        *((1, 1.0), (2, 1.0), (4, 1.28), (6, 2.04), (8, 2.5), (10, 3.95), (32, 3.95)),
        *((33, 7.8), (64, 7.8)),
    ),
    # A round of K token rows with its drafts was fitted as 0.83 + 0.17 K (mlxcel#1254), of which
    # 0.06 are the bf16 assistant's (assumed); behind 8, the limit of 12 and doubling: assumed.
    "M3 Ultra": ((1, 1.0), (8, 1.77), (11, 2.2), (12, 3.0), (32, 3.0), (33, 6.0), (64, 6.0)),
    # mlx#3852: .99, 1.13, 1.43, 1.75, 2.84 and 4.5 at 2, 3, 4, 5, 8 and 10-32; 33 as M3 Max.
    "M4 Pro": (
        *((1, 1.0), (2, 0.99), (3, 1.13), (4, 1.43), (5, 1.75), (8, 2.84), (10, 4.5)),
        *((32, 4.5), (33, 8.0), (64, 8.0)),
    ),
    # "Much flatter above 13 rows" (mlx#3791, #4171); the numbers are assumed.
    "M5": (
        *((1, 1.0), (2, 1.0), (4, 1.15), (5, 1.3), (8, 1.8), (12, 2.2), (32, 2.3)),
        *((33, 3.0), (64, 3.0)),
    ),
}

# Fixed, dense, per-token and draft-step milliseconds. Dense: 31B or 12B, its bytes by the chip's
# bandwidth (assumed); draft 0.06 of a step in bf16, half of it with a 4-bit assistant (assumed).
# Experts: the 26B-A4B at 4 bit as calibrated or assumed in the cost model for its routing:
# M3 Ultra 7.7 + 2.08 + 1.8 and M3 Max 4.5 + 4.0 + 3.1 with draft steps of 0.8 and 1.2 ms.
TIMES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "M1 Ultra": ((2.0, 26.0, 0.0, 1.5), (8.0, 2.6, 2.3, 1.2)),  # assumed
    "M3 Max": ((1.0, 50.0, 0.0, 2.0), (4.5, 4.0, 3.1, 1.2)),
    "M3 Ultra": ((0.5, 24.0, 0.0, 1.5), (7.7, 2.08, 1.8, 0.8)),
    "M4 Pro": ((1.0, 28.0, 0.0, 1.7), (4.0, 5.6, 4.4, 1.2)),  # M4 Max's bytes by half its bandwidth
    "M5": ((1.0, 45.0, 0.0, 1.8), (3.2, 3.0, 2.4, 0.8)),  # assumed
}

MACHINES = [
    Machine(chip, family, TABLES[chip], *times)
    for chip, pair in TIMES.items()
    for family, times in zip(("dense", "experts"), pair, strict=True)
]

# Chance that a block keeps at least i drafts; what follows goes on with the last ratio.
TEXTS: dict[str, tuple[float, ...]] = {
    "high": (0.92, 0.78, 0.67, 0.57),
    "low": (0.84, 0.60, 0.39, 0.27),
    "flat": (0.35, 0.35**2),
    "none": (0.0, 0.0),
}


def reach(text: str) -> list[float]:
    """P(at least i drafts are kept) for i = 1..MAX_DEPTH."""
    chances = list(TEXTS[text])
    ratio = chances[-1] / chances[-2] if chances[-2] else 0.0
    while len(chances) < MAX_DEPTH:
        chances.append(chances[-1] * ratio)
    return chances


class Step(NamedTuple):
    """A simulated round: what was done, and its expected tokens and seconds."""

    depth: int
    shadow: int
    tokens: float
    seconds: float


def simulate(
    machine: Machine,
    texts: Sequence[tuple[int, str]],
    rows: int,
    rounds: int,
    seed: int,
    policy: DepthPolicy | None = None,
) -> Iterator[Step]:
    """Run a controller; texts: (first round, name) of each kind of text."""
    random = Random(seed)
    policy = policy or DepthController(machine.family)
    compiled: set[tuple[int, int]] = set()
    starts = dict(texts)
    chances: list[float] = []
    for number in range(rounds):
        if number in starts:
            chances = reach(starts[number])
        depth, shadow = policy.choose(rows)
        seconds = machine.seconds(rows, depth) + shadow * machine.draft_step(rows) / 1000
        seconds += growth(machine, rows, number)
        compiling = 0.0
        if (depth, shadow) not in compiled:
            compiled.add((depth, shadow))
            compiling = COMPILE_STEPS * machine.seconds(1, 0)
        measured = seconds * random.lognormvariate(0, NOISE) + compiling
        if random.random() < OUTLIER_SHARE:
            measured *= OUTLIER_FACTOR
        kept = [draw(random, chances, depth + shadow) for _ in range(rows)]
        policy.observe(rows, Plan(depth, shadow), measured, kept if depth else [0] * rows)
        if shadow:
            policy.observe_shadow(kept, shadow)
        yield Step(depth, shadow, rows * (1 + sum(chances[:depth])), seconds + compiling)


def draw(random: Random, chances: Sequence[float], depth: int) -> int:
    """Drafts that a row keeps of a block."""
    luck = random.random()
    return sum(luck < chance for chance in chances[:depth])


def growth(machine: Machine, rows: int, number: int) -> float:
    return machine.seconds(rows, 0) * GROWTH * number


def fixed_speeds(machine: Machine, text: str, rows: int, rounds: range) -> list[float]:
    """Tokens per second of every fixed depth over these rounds."""
    chances = reach(text)
    grown = mean(growth(machine, rows, number) for number in rounds)
    return [
        rows * (1 + sum(chances[:depth])) / (machine.seconds(rows, depth) + grown)
        for depth in range(MAX_DEPTH + 1)
    ]


def speed(steps: Sequence[Step]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def run_steady(
    machine: Machine, text: str, rows: int, rounds: int, seeds: Iterable[int]
) -> dict[str, Any]:
    """One cell of a text that stays what it is."""
    best = fixed_speeds(machine, text, rows, range(SETTLED, rounds))
    plain = fixed_speeds(machine, text, rows, range(SETTLED_PLAIN, rounds))
    against_best, against_plain, shadows, depths = [], [], [], []
    for seed in seeds:
        steps = list(simulate(machine, [(0, text)], rows, rounds, seed))
        against_best.append(speed(steps[SETTLED:]) / max(best))
        against_plain.append(speed(steps[SETTLED_PLAIN:]) / plain[0])
        shadows.append(mean(step.shadow for step in steps[SETTLED:]))
        depths.append(mean(step.depth for step in steps[SETTLED:]))
    return {
        "machine": f"{machine.name} {machine.family}",
        "text": text,
        "rows": rows,
        "best_depth": best.index(max(best)),
        "gain": max(best) / best[0],
        "mean_depth": mean(depths),
        "shadow_rounds": mean(shadows),
        "vs_best_fixed": mean(against_best),
        "vs_plain": mean(against_plain) if max(plain) == plain[0] else None,
    }


def run_change(
    machine: Machine, before: str, after: str, rows: int, seeds: Sequence[int]
) -> dict[str, Any]:
    """One cell of a text that changes its kind."""
    rounds = CHANGE_AT + FOLLOW_LIMIT + FOLLOW_WINDOW
    runs = [
        list(simulate(machine, [(0, before), (CHANGE_AT, after)], rows, rounds, seed))
        for seed in seeds
    ]
    ratios = []
    for late in range(0, FOLLOW_LIMIT + 1, FOLLOW_STEP):
        window = range(CHANGE_AT + late, CHANGE_AT + late + FOLLOW_WINDOW)
        best = max(fixed_speeds(machine, after, rows, window))
        ratios.append(mean(speed(run[window.start : window.stop]) / best for run in runs))
    followed = [place for place, ratio in enumerate(ratios) if ratio >= FOLLOWED]
    return {
        "machine": f"{machine.name} {machine.family}",
        "text": f"{before} -> {after}",
        "rows": rows,
        "follow_rounds": FOLLOW_STEP * (followed[0] if followed else len(ratios)),
        "after_60": ratios[60 // FOLLOW_STEP],
    }


def run_grid(rounds: int, seeds: int, quick: bool) -> dict[str, Any]:
    """All cells; quick: the corners of the grid."""
    machines, row_counts = MACHINES, [1, 2, 4, 8]
    changes = [(a, b) for a in TEXTS for b in TEXTS if a != b]
    if quick:
        machines = [one for one in MACHINES if one.name in ("M1 Ultra", "M4 Pro")]
        row_counts = [1, 8]
        changes = [("none", "low"), ("high", "none"), ("flat", "high")]
    steady = [
        run_steady(machine, text, rows, rounds, range(seeds))
        for machine in machines
        for rows in row_counts
        for text in TEXTS
    ]
    changing = [
        run_change(machine, before, after, rows, range(seeds))
        for machine in machines
        for rows in row_counts
        for before, after in changes
    ]
    return {
        "rounds": rounds,
        "seeds": seeds,
        "worst_vs_best_fixed": min(cell["vs_best_fixed"] for cell in steady),
        "worst_vs_plain": min(
            (cell["vs_plain"] for cell in steady if cell["vs_plain"] is not None), default=None
        ),
        "worst_follow_rounds": max(cell["follow_rounds"] for cell in changing),
        "worst_after_60": min(cell["after_60"] for cell in changing),
        "steady": steady,
        "changing": changing,
    }


def print_tables(report: dict[str, Any]) -> None:
    print("machine            text           rows  best  gain  depth  of best  of plain")
    for cell in report["steady"]:
        plain = "" if cell["vs_plain"] is None else f"{cell['vs_plain']:.3f}"
        print(
            f"{cell['machine']:18} {cell['text']:14} {cell['rows']:4}  {cell['best_depth']:4}"
            f"  {cell['gain']:4.2f}  {cell['mean_depth']:5.2f}  {cell['vs_best_fixed']:7.3f}"
            f"  {plain:>8}"
        )
    print("\nmachine            text           rows  followed after  of best from round 60 on")
    for cell in report["changing"]:
        print(
            f"{cell['machine']:18} {cell['text']:14} {cell['rows']:4}  {cell['follow_rounds']:14}"
            f"  {cell['after_60']:.3f}"
        )
    for name in ("worst_vs_best_fixed", "worst_vs_plain", "worst_after_60"):
        print(f"{name:22} {report[name]:.3f}")
    print(f"{'worst_follow_rounds':22} {report['worst_follow_rounds']}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The depth controller on simulated machines.")
    parser.add_argument("--rounds", type=int, default=800, help="of a steady text, over 300")
    parser.add_argument("--seeds", type=int, default=6, help="runs that a cell is averaged over")
    parser.add_argument("--quick", action="store_true", help="only the corners of the grid")
    options = parser.parse_args()
    if options.rounds <= SETTLED:
        parser.error(f"--rounds must be over {SETTLED}")
    report = run_grid(options.rounds, options.seeds, options.quick)
    print_tables(report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
