"""The depth controller on made-up rounds: it finds the best depth, parks and comes back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random

import pytest

from mlx_mtp.decode.depth import DepthController
from mlx_mtp.decode.policy import Plan
from mlx_mtp.types import MAX_DEPTH

Cost = Callable[[int, int], float]
HIGH = (0.95, 0.93, 0.9, 0.88, 0.85, 0.8, 0.8)
NEVER = (0.0,) * MAX_DEPTH


def steep(rows: int, depth: int) -> float:
    """Verifying costs nearly as much per token as a plain step."""
    return 0.010 * rows * (1 + 0.9 * depth)


def flat(rows: int, depth: int) -> float:
    return 0.020 * (1 + 0.08 * depth + 0.02 * rows)


def drawn(rng: Random, chances: tuple[float, ...], depth: int) -> int:
    kept = 0
    while kept < depth and rng.random() < chances[kept]:
        kept += 1
    return kept


def drive(
    controller: DepthController,
    rounds: int,
    cost: Cost,
    chances: tuple[float, ...],
    rows: int = 1,
    seed: int = 1,
    slow_every: int = 0,
) -> list[Plan]:
    """The plans of so many rounds; every slow_every-th of them takes five times as long."""
    rng, plans = Random(seed), []
    for number in range(1, rounds + 1):
        plan = controller.choose(rows)
        plans.append(plan)
        seconds = cost(rows, plan.depth) + 0.002 * plan.shadow
        if slow_every and number % slow_every == 0:
            seconds *= 5
        kept = [drawn(rng, chances, plan.depth) for _ in range(rows)]
        controller.observe(rows, plan, seconds * (1 + 0.03 * rng.random()), kept)
        if plan.shadow:
            agreed = [drawn(rng, chances, plan.shadow) for _ in range(rows)]
            controller.observe_shadow(agreed, plan.shadow)
    return plans


def expected(chances: tuple[float, ...], depth: int) -> float:
    total, reach = 1.0, 1.0
    for chance in chances[:depth]:
        reach *= chance
        total += reach
    return total


def speed(plans: list[Plan], cost: Cost, chances: tuple[float, ...], rows: int) -> float:
    """Expected tokens per second of these rounds, shadows paid."""
    tokens = sum(rows * expected(chances, plan.depth) for plan in plans)
    return tokens / sum(cost(rows, plan.depth) + 0.002 * plan.shadow for plan in plans)


@pytest.mark.parametrize("slow_every", [0, 17])
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("chances", [HIGH, (0.6,) * MAX_DEPTH, (0.3,) * MAX_DEPTH, NEVER])
@pytest.mark.parametrize("cost", [steep, flat])
def test_it_gets_near_the_best_fixed_depth(
    cost: Cost, chances: tuple[float, ...], rows: int, slow_every: int
) -> None:
    plans = drive(DepthController("dense"), 500, cost, chances, rows=rows, slow_every=slow_every)[
        300:
    ]
    best = max(speed([Plan(d)] * 9, cost, chances, rows) for d in range(MAX_DEPTH + 1))
    assert speed(plans, cost, chances, rows) >= 0.95 * best


@pytest.mark.parametrize("family", ["dense", "experts", "e-series", "unified"])
def test_it_parks_and_says_why(family: str) -> None:
    controller = DepthController(family)  # type: ignore[arg-type]
    plans = drive(controller, 400, steep, NEVER)
    assert all(plan.depth == 0 for plan in plans[50:])
    assert sum(plan.shadow for plan in plans[50:]) <= 0.05 * len(plans[50:])
    assert controller.parked is not None
    assert "steps" in controller.parked


def test_why_it_parks_is_true() -> None:
    """It begins with few drafts, which do not pay here, but says nothing of the many that do."""

    def step(rows: int, depth: int) -> float:
        return 0.02 * (1 + (1.1 if depth <= 3 else 0.5) * depth)

    learned = DepthController("e-series")
    for depth in (0, 1, 2, 3, 6):
        for _ in range(8):
            learned.observe(1, Plan(depth), step(1, depth), [depth])
    again = DepthController.from_json("e-series", learned.to_json())
    said = []
    for seed in range(40):
        drive(again, 1, step, (1.0,) * MAX_DEPTH, seed=seed)
        if again.parked is not None:
            said.append(tuple(map(float, re.findall(r"\d+\.\d+", again.parked))))
    assert all(tokens <= 1.03 * steps for steps, tokens in said)


def test_it_comes_back_when_the_text_becomes_predictable() -> None:
    controller = DepthController("dense")
    drive(controller, 200, flat, NEVER)
    assert controller.parked
    drive(controller, 60, flat, HIGH)
    assert not controller.parked
    later = drive(controller, 100, flat, HIGH)
    best = max(speed([Plan(d)] * 9, flat, HIGH, 1) for d in range(MAX_DEPTH + 1))
    assert speed(later, flat, HIGH, 1) >= 0.9 * best


def test_the_same_observations_give_the_same_choices() -> None:
    runs = [drive(DepthController("dense"), 200, flat, HIGH, rows=3) for _ in range(2)]
    assert runs[0] == runs[1]


def test_plans_are_possible() -> None:
    rng, controller = Random(3), DepthController("experts")
    for _ in range(300):
        rows = rng.randint(1, 8)
        (plan,) = drive(controller, 1, flat, HIGH, rows=rows, seed=rng.randrange(10**6))
        assert 0 <= plan.depth <= MAX_DEPTH
        assert plan.shadow == 0 or plan.depth == 0


def test_it_goes_no_deeper_than_it_may() -> None:
    """Where all depths cost the same and all drafts are kept, it settles on the deepest."""
    controller = DepthController("dense", most=4)
    plans = drive(controller, 200, lambda rows, depth: 1.0, [1.0] * 7)
    assert max(plan.depth for plan in plans) == 4
    assert all(plan.depth == 4 for plan in plans[100:])


def test_costs_are_kept_and_acceptance_is_not() -> None:
    first = DepthController("dense")
    drive(first, 200, flat, HIGH)
    document = json.loads(json.dumps(first.to_json()))
    second = DepthController.from_json("dense", document)
    assert second.to_json()["cells"]
    assert [cell[:2] for cell in second.to_json()["cells"]] == [
        cell[:2] for cell in document["cells"]
    ]


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"version": 99, "family": "dense", "cells": [[1, 0, 0.1, 3]]},
        {"version": 1, "family": "experts", "cells": [[1, 0, 0.1, 3]]},
        {"version": 1, "family": "dense", "cells": [["x"], None, [1, 0], [1, 0, -1.0, 3]]},
        {"version": 1, "family": "dense", "cells": [[1, 0, float("nan"), 3], [99, 0, 0.1, 3]]},
    ],
)
def test_other_documents_are_ignored(document: object) -> None:
    controller = DepthController.from_json("dense", document)
    assert controller.to_json()["cells"] == []
    drive(controller, 20, flat, HIGH)
