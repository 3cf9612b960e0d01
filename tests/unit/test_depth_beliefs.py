"""What the depth controller believes: costs not measured, the worth of a trial, changes."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from mlx_mtp.decode.acceptance import Acceptance
from mlx_mtp.decode.cost import CostModel
from mlx_mtp.decode.depth import PURSE, SHADOW_SHARE, DepthController
from mlx_mtp.decode.outlook import Outlook, ratios
from mlx_mtp.types import MAX_DEPTH


def outlook(tokens: list[float], costs: list[float], doubt: float, floor: float = 0.0) -> Outlook:
    floors = [max(floor, 1.0 if depth else costs[0]) for depth in range(len(costs))]
    doubts = [doubt] * len(costs)
    return Outlook(tokens, costs, doubts, ratios(tokens, costs), ratios(tokens, floors))


def test_a_trial_is_worth_more_the_less_is_known() -> None:
    worth = [
        outlook([1, 1.8], [1, 2], doubt).expected_gain(0, 1, 0.0, 1.0) for doubt in (0, 0.1, 0.3)
    ]
    assert worth[0] == 0
    assert worth[0] < worth[1] < worth[2]


def test_a_depth_that_cannot_be_cheap_enough_is_not_worth_a_trial() -> None:
    hopeful = outlook([1, 1.8], [1, 2], 0.3)
    bounded = outlook([1, 1.8], [1, 2], 0.3, floor=1.99)
    assert bounded.expected_gain(0, 1, 0.0, 1.0) < 0.01 * hopeful.expected_gain(0, 1, 0.0, 1.0)


def test_a_deeper_round_is_never_taken_to_be_cheaper_than_a_measured_one() -> None:
    costs = CostModel("dense")
    for depth, seconds in ((0, 1.0), (1, 5.0), (4, 5.5), (7, 6.0)):
        for _ in range(4):
            costs.observe(1, depth, seconds)
    table, doubts = costs.table(1)
    assert all(shallow <= deep for shallow, deep in pairwise(table))
    assert doubts[2] < 0.1  # it lies between 5 and 5.5


@pytest.mark.parametrize("rows", [1, 8])
def test_what_a_first_use_costs_is_learned_in_seconds(rows: int) -> None:
    costs = CostModel("dense")
    for depth in (0, 1):
        for number in range(4):
            costs.observe(rows, depth, 0.02 + (0.3 if number == 0 else 0))
    assert costs.first_use(rows, 5) == pytest.approx(0.3)
    assert costs.first_use(rows, 1) == 0


def test_blocks_that_do_better_raise_suspicion_and_then_show_a_change() -> None:
    acceptance = Acceptance()
    for number in range(60):
        acceptance.observe(1, [int(number % 3 == 0)], 4.0)
    changes = acceptance.changes  # one is that from what was believed at first
    acceptance.observe(1, [0], 4.0)
    assert acceptance.suspicion < 0.4
    acceptance.observe(1, [1], 4.0)
    assert acceptance.suspicion > 0.4
    assert acceptance.changes == changes
    assert any(acceptance.observe(1, [1], 4.0) for _ in range(6))
    assert acceptance.conditional()[0] > 0.6


def test_a_lucky_run_does_not_count_as_much_as_it_is_long() -> None:
    acceptance = Acceptance()
    for _ in range(40):
        acceptance.observe(1, [0, 0, 0, 1], 4.0)
    while not acceptance.changes:
        acceptance.observe(1, [1, 1, 1, 1], 4.0)
    assert acceptance.first_drafts <= 8


def test_shadows_take_their_share_of_the_time_however_often_they_agree() -> None:
    rng, controller, step, rounds = Random(5), DepthController("experts"), 0.1, 2000
    shadows = 0
    for _ in range(rounds):
        plan = controller.choose(1)
        shadows += plan.shadow
        seconds = 1 + 1.0 * plan.depth + step * plan.shadow
        kept = [int(plan.depth > 0 and rng.random() < 0.4)]
        controller.observe(1, plan, seconds, kept)
        if plan.shadow:
            controller.observe_shadow([int(rng.random() < 0.4)], 1)
    assert shadows * step <= 1.2 * SHADOW_SHARE * rounds + PURSE * step


def test_nothing_is_tried_that_cannot_win() -> None:
    controller, tried = DepthController("dense"), 0
    for number in range(1000):
        plan = controller.choose(1)
        tried += number > 50 and plan.depth > 0
        controller.observe(1, plan, 1 + 0.9 * plan.depth + 0.06 * plan.shadow, [0])
        if plan.shadow:
            controller.observe_shadow([0], 1)
    assert tried == 0
    assert len(controller.to_json()["cells"]) <= MAX_DEPTH


def test_the_depth_settled_on_is_run_between_trials() -> None:
    rng, controller, depths = Random(7), DepthController("dense"), []
    for _ in range(600):  # plain and depth 1 are as fast
        plan = controller.choose(1)
        depths.append(plan.depth)
        seconds = (1 + 0.5 * plan.depth + 0.05 * plan.shadow) * rng.lognormvariate(0, 0.05)
        controller.observe(1, plan, seconds, [int(plan.depth > 0 and rng.random() < 0.5)])
        if plan.shadow:
            controller.observe_shadow([int(rng.random() < 0.5)], 1)
        assert controller.parked or any(depths[-8:])
