"""The depth controller meets its goals on simulated machines, cell by cell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from simulate_depth import MACHINES, run_change, run_grid, run_steady

OF_BEST, OF_PLAIN, FOLLOW_ROUNDS = 0.97, 0.99, 60


def missed(report: dict[str, Any]) -> list[str]:
    """The cells that miss a goal, in words."""
    lines = []
    for cell in report["steady"]:
        name = f"{cell['machine']}, {cell['text']}, {cell['rows']} rows"
        if cell["vs_best_fixed"] < OF_BEST:
            lines.append(f"{name}: {cell['vs_best_fixed']:.4f} of the best fixed depth")
        if cell["vs_plain"] is not None and cell["vs_plain"] < OF_PLAIN:
            lines.append(f"{name}: {cell['vs_plain']:.4f} of plain decoding")
    for cell in report["changing"]:
        name = f"{cell['machine']}, {cell['text']}, {cell['rows']} rows"
        if cell["follow_rounds"] > FOLLOW_ROUNDS:
            lines.append(f"{name}: followed after {cell['follow_rounds']} rounds")
    return lines


def test_the_corners_of_the_grid_meet_the_goals() -> None:
    steep, even = (next(m for m in MACHINES if m.name == name) for name in ("M1 Ultra", "M4 Pro"))
    cells = [(steep, "flat", 1), (even, "low", 1), (even, "none", 1)]
    changes = [(steep, "none", "low", 1), (even, "high", "none", 1)]
    seeds = range(6)
    steady = [run_steady(*cell, 800, seeds) for cell in cells]
    changing = [run_change(*change, seeds) for change in changes]
    assert missed({"steady": steady, "changing": changing}) == []


@pytest.mark.slow
def test_every_cell_of_the_grid_meets_the_goals() -> None:
    assert missed(run_grid(rounds=800, seeds=6, quick=False)) == []
