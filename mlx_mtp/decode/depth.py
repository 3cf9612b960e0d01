"""How deep to draft. Owns: the depth of the next round, from measured costs and acceptance.

    expected tokens of a round of depth d: 1 + sum of P(at least i drafts are kept), i = 1..d
    next depth: argmax of expected tokens / seconds, 0 (plain decoding) allowed

Another depth is tried where knowing it is worth more than the trial costs: the expected gain over a
horizon, of which a normal distribution of the log of its speed is believed, against the time lost
by running and compiling it. Parked at 0 nothing is verified in vain: now and then one token is
drafted beside a plain round and compared with what that round produced, within a share of the time.
Deterministic; knows no arrays and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from mlx_mtp.decode.acceptance import Acceptance
from mlx_mtp.decode.cost import SHADOW, TRIED, CostModel
from mlx_mtp.decode.outlook import Outlook, fastest, ratios, why_parked
from mlx_mtp.decode.policy import Plan
from mlx_mtp.pair import Family
from mlx_mtp.types import MAX_DEPTH

VERSION = 1

START_DEPTH: dict[Family, int] = {"dense": 3, "unified": 3, "e-series": 3, "experts": 2}
"""Deepest first round; the prior's best depth where that is less."""

SWITCH = 1.0145
"""How much faster another depth must look to be taken; see `_margin`."""

HORIZON = 500.0
"""Plain rounds in which what a trial costs, compiling included, has to be earned back."""

DRAFT_FLOOR = 0.02
"""A drafted token never counts as costing less than this share of a plain round."""

SHADOW_SHARE = 0.0045
"""Share of its time that a parked controller spends on shadows."""

SHADOW_GAP, MAX_SHADOW_GAP = 21, 40
"""Parked: fewest and most rounds from one shadow to the next. Two thirds of the share are spent
on them, the rest is saved up."""

PURSE = 8.0
"""Most shadows that are saved up for when the text may have become better."""

SUSPICION = 0.8
"""Evidence (nats) of better text that is worth another shadow at once."""

FEW_DRAFTS = 32.0
"""First drafts judged since a change before a depth is run for the first time."""

CHANGED, CHANGED_PARKED = 6.0, 3.5
"""Evidence (nats) that the text changed; parked, where a mistake costs little, less will do."""


@dataclass
class _Rows:
    """Where the controller stands with a number of rows.

    Attributes:
        depth: what it has settled on.
        trial, trial_left: a depth being tried, and rounds of it to come.
        rest: rounds of `depth` to come before the next trial, or what it is compared with ages.
    """

    depth: int
    trial: int = 0
    trial_left: int = 0
    rest: int = 0


def _margin(now: int, depth: int) -> float:
    """How much faster another depth must look to be taken.

    Plain decoding is taken for about as fast, and left for twice as much: what looks as fast by
    chance costs shadows there, and rounds, trials and compiling elsewhere.
    """
    return 1 / SWITCH if depth == 0 else SWITCH if now else SWITCH**2


def _hopeless(outlook: Outlook) -> bool:
    """Whether no depth looks faster than plain decoding; else it decodes plainly only until more
    is known."""
    return max(outlook.speeds[1:]) <= _margin(0, 1) * outlook.speeds[0]


class DepthController:
    """Learns the fastest depth while decoding.

    Args:
        family: of the target; sets what is believed before anything was measured.
        most: the deepest that it may choose, 1..MAX_DEPTH.
    """

    def __init__(self, family: Family, most: int = MAX_DEPTH) -> None:
        self.family = family
        self.most = most
        self._costs = CostModel(family)
        self._acceptance = Acceptance()
        self._rows: dict[int, _Rows] = {}
        self._parked_rounds = 0
        self._purse = PURSE
        self._parked: str | None = None

    @property
    def parked(self) -> str | None:
        """Why it decodes plainly, in words; None while it drafts."""
        return self._parked

    # Before a round.

    def choose(self, rows: int) -> Plan:
        """The next round of `rows` live rows. Changes what it is in the middle of trying."""
        outlook = self._outlook(rows)
        state = self._settle(rows, outlook)
        self._parked = why_parked(outlook) if state.depth == 0 and _hopeless(outlook) else None
        depth = self._try(rows, state, outlook)
        return Plan(depth, self._shadow(rows, state, outlook) if depth == 0 else 0)

    def settled(self, rows: int) -> int:
        """The depth that is believed to be the fastest at present. Changes nothing."""
        state = self._rows.get(rows)
        return self._first(self._outlook(rows)) if state is None else state.depth

    def _first(self, outlook: Outlook) -> int:
        """The depth to begin with."""
        return fastest(outlook.speeds[: START_DEPTH[self.family] + 1])

    def _outlook(self, rows: int) -> Outlook:
        depths = slice(self.most + 1)
        tokens = self._acceptance.tokens()[depths]
        costs, doubts = (values[depths] for values in self._costs.table(rows))
        floors = costs[:1]
        for depth in range(1, len(costs)):
            floor = floors[-1] + DRAFT_FLOOR * costs[0]
            known = self._costs.samples(rows, depth) >= TRIED
            floors.append(max(floor, costs[depth]) if known else floor)
        costs = [max(cost, floor) for cost, floor in zip(costs, floors, strict=True)]
        return Outlook(tokens, costs, doubts, ratios(tokens, costs), ratios(tokens, floors))

    def _settle(self, rows: int, outlook: Outlook) -> _Rows:
        """Move to the fastest depth, unless the one settled on is about as fast."""
        speeds = outlook.speeds
        state = self._rows.get(rows)
        if state is None:
            state = self._rows[rows] = _Rows(self._first(outlook))
            return state
        if self._costs.rounds(rows) < TRIED and not self._acceptance.changes:
            return state
        if self._hardly_known:
            speeds = [
                0.0 if depth > 1 and self._costs.is_new(rows, depth) else speed
                for depth, speed in enumerate(speeds)
            ]
        best = fastest(speeds)
        margin = _margin(state.depth, best)
        margin += self._costs.first_use(rows, best) / outlook.costs[0] / HORIZON
        if speeds[best] > margin * speeds[state.depth]:
            state.depth = best
        return state

    @property
    def _hardly_known(self) -> bool:
        """Whether the text changed and few drafts were judged since: no time to compile."""
        return self._acceptance.changes > 0 and self._acceptance.first_drafts < FEW_DRAFTS

    # Trying other depths.

    def _try(self, rows: int, state: _Rows, outlook: Outlook) -> int:
        """The depth settled on, or another one that deserves to be measured now."""
        if not state.trial_left and not state.rest:
            depth = None
            if self._costs.samples(rows, state.depth) >= TRIED - 1:
                depth = self._candidate(rows, state.depth, outlook)
            if depth is not None:
                state.trial, state.rest = depth, TRIED
                state.trial_left = TRIED + (not self._costs.samples(rows, depth))
        if not state.trial_left:
            state.rest = max(0, state.rest - 1)
            return state.depth
        state.trial_left -= 1
        return state.trial

    def _candidate(self, rows: int, now: int, outlook: Outlook) -> int | None:
        """The depth that a trial of is worth most more than it costs, if any."""
        if now and not self._costs.samples(rows, 0):
            return 0  # what plain decoding costs has to be known
        best, most = None, 0.0
        for depth, tokens in enumerate(outlook.tokens):
            if depth == now or 1.5 * outlook.limits[depth] <= outlook.speeds[now]:
                continue
            if self._hardly_known and self._costs.is_new(rows, depth):
                continue
            late = outlook.costs[depth] - tokens / outlook.speeds[now]
            price = TRIED * max(late, 0.0) + self._costs.first_use(rows, depth)
            unseen = self._acceptance.unseen(range(now, depth), depth, TRIED * rows)
            gain = outlook.expected_gain(now, depth, unseen, _margin(now, depth))
            gain = HORIZON * gain - price / outlook.costs[0]
            if gain > most:
                best, most = depth, gain
        return best

    # Shadows.

    def _shadow(self, rows: int, state: _Rows, outlook: Outlook) -> int:
        """Tokens to draft beside a plain round, only to learn whether they would be kept."""
        if state.depth:
            self._parked_rounds = 0
            return 0
        self._parked_rounds += 1
        step = max(self._costs.draft_step(rows), DRAFT_FLOOR)
        self._purse = min(PURSE, self._purse + SHADOW_SHARE / step)
        gap = min(max(SHADOW_GAP, ceil(1.5 * step / SHADOW_SHARE)), MAX_SHADOW_GAP)
        new = not self._costs.samples(rows, SHADOW)  # better compile it while learning anyway
        due = self._parked_rounds >= gap or new
        if not due and self._purse >= 1:
            due = self._is_promising(outlook) or self._is_worth_a_shadow(rows, step, outlook)
        if due:
            self._purse = max(0.0, self._purse - 1)
            self._parked_rounds = 0
        return int(due)

    def _is_promising(self, outlook: Outlook) -> bool:
        """Whether the last blocks look better than what is remembered, and drafting would pay if
        all text were like them."""
        if self._acceptance.suspicion < SUSPICION:
            return False
        suspected = self._acceptance.suspected_tokens()[: self.most + 1]
        speeds = ratios(suspected, outlook.costs)
        return max(speeds) > _margin(0, 1) * speeds[0]

    def _is_worth_a_shadow(self, rows: int, step: float, outlook: Outlook) -> bool:
        """Whether so little is known of first drafts that one more earns what it costs."""
        depth = 1 + fastest(outlook.speeds[1:])
        unseen = self._acceptance.unseen(range(1), depth, rows)
        known = outlook._replace(doubts=[0.0] * len(outlook.doubts))
        return HORIZON * known.expected_gain(0, depth, unseen, _margin(0, depth)) > step

    # After a round.

    def observe(self, rows: int, plan: Plan, seconds: float, accepted: Sequence[int]) -> None:
        """Learn from a round.

        Args:
            plan: of the round; the next one may have been chosen since.
            seconds: from its start to its tokens on the host.
            accepted: drafts kept, per row, 0..depth.
        """
        depth, shadow = plan
        self._costs.observe(rows, SHADOW if shadow else depth, seconds)
        if depth:
            self._acceptance.observe(depth, accepted, CHANGED)
        else:
            self._acceptance.pass_round()

    def observe_shadow(self, agreed: Sequence[int], drafted: int) -> None:
        """Learn from a shadow.

        Args:
            agreed: leading drafts equal to what the rows then produced, per row.
            drafted: tokens that the shadow drafted for each row.
        """
        if drafted and agreed:
            self._acceptance.observe(drafted, agreed, CHANGED_PARKED)

    # Keeping what was learned.

    def to_json(self) -> dict[str, Any]:
        """What was learned of costs; acceptance belongs to the text and is not kept."""
        return {"version": VERSION, "family": self.family, "cells": self._costs.to_json()}

    @classmethod
    def from_json(cls, family: Family, document: Any, most: int = MAX_DEPTH) -> DepthController:
        """A controller that starts from `to_json`'s costs; what is no such document is ignored."""
        controller = cls(family, most)
        match document:
            case {"version": int(version), "family": str(name), "cells": list(cells)}:
                if version == VERSION and name == family:
                    controller._costs.load(cells)
        return controller
