"""How deep to draft. Owns: the depth of the next round, from measured costs and acceptance.

    expected tokens of a round of depth d: 1 + sum of P(at least i drafts are kept), i = 1..d
    next depth: argmax of expected tokens / seconds, 0 (plain decoding) allowed

Other depths are tried only where the model says that they could win, within a budget. Parked at 0
nothing is verified in vain: now and then one token is drafted beside a plain round and compared
with what that round produced. Deterministic; knows no arrays and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp
from typing import Any

from mlx_mtp.decode.acceptance import CHANGED, Acceptance
from mlx_mtp.decode.cost import SHADOW, CostModel
from mlx_mtp.decode.outlook import Outlook, fastest, ratios, why_parked
from mlx_mtp.decode.policy import Plan
from mlx_mtp.pair import Family

VERSION = 1

START_DEPTH: dict[Family, int] = {"dense": 3, "unified": 3, "e-series": 3, "experts": 2}
"""Deepest first round; the prior's best depth where that is less."""

SWITCH = 1.015
LEAVE_PLAIN = 1.025
STAY_PLAIN = 0.99
"""How much faster another depth must look to be taken; plain decoding is taken for any gain."""

DOUBT = 0.7
"""Standard deviations of acceptance by which a deeper depth must win."""

FIRST_USE_ROUNDS = 250.0
"""Rounds in which a depth must earn what its first use costs."""

DRAFT_FLOOR = 0.02
"""A drafted token never counts as costing less than this share of a plain round."""

TRIED = 3
"""Usable measurements that a depth gets when it is tried."""

TRY_GAIN = 1.02
TRY_AGE = 50
PARKED_TRY_TOKENS = 1.1
"""A depth is tried where it could be this much faster, was not measured for so many rounds, and,
parked, brings so many tokens."""

YOUNG = 100
RENEWED_CREDIT = 12.0
RENEWING_TOKENS = 1.6
CREDIT, KEPT_CREDIT, PARKED_CREDIT = 24.0, 16.0, 4.0
CREDIT_RATE, PARKED_CREDIT_RATE = 0.01, 0.003
"""Time to lose by trying depths: in plain rounds at first, then as a share of all time."""

SHADOW_GAP = 21
SHADOW_SHARE = 0.005
MAX_SHADOW_GAP = 40
"""Parked: plain rounds from one shadow to the next, more where shadows take more of the time."""

EXTRA_SHADOWS = 8.0
EXTRA_SHADOW_RATE = 1 / 80
"""Shadows at once after one that agreed; how many at most, and gained per parked round."""

SHADOW_FORGET = 0.93

FEW_DRAFTS = 16.0

HOPELESS_TOKENS = 1.1
CHANGED_PARKED, CHANGED_HOPELESS = 4.0, 2.0
"""Evidence (nats) of a change that is enough while parked, where a mistake costs little."""


@dataclass
class _Rows:
    """Where the controller stands with a number of rows.

    Attributes:
        depth: what it has settled on.
        credit: time it may lose by trying others, in plain rounds.
        trial, trial_left: a depth being tried, and rounds of it to come.
        trial_worth: seconds in which the depth settled on brings a trial round's tokens.
    """

    depth: int
    credit: float = CREDIT
    trial: int = 0
    trial_left: int = 0
    trial_worth: float | None = None


class DepthController:
    """Learns the fastest depth while decoding.

    Args:
        family: of the target; sets what is believed before anything was measured.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._costs = CostModel(family)
        self._acceptance = Acceptance()
        self._rows: dict[int, _Rows] = {}
        self._plan = Plan(0)
        self._parked_rounds = 0
        self._extra_shadows = EXTRA_SHADOWS
        self._shadowed = False
        self._renewed = False
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
        self._parked = why_parked(outlook) if state.depth == 0 else None
        depth = self._try(rows, state, outlook)
        self._plan = Plan(depth, self._shadow(rows, state, outlook) if depth == 0 else 0)
        return self._plan

    def _outlook(self, rows: int) -> Outlook:
        tokens = self._acceptance.tokens()
        costs, doubts = self._costs.table(rows)
        floor = costs[0]
        costs = [max(cost, floor * (1 + DRAFT_FLOOR * d)) for d, cost in enumerate(costs)]
        sure, hoped = tokens, self._acceptance.tokens(-DOUBT)
        if self._acceptance.first_drafts < FEW_DRAFTS:
            sure = hoped = self._acceptance.tokens(DOUBT)
        hopes = [
            gain / cost * exp(doubt) for gain, cost, doubt in zip(hoped, costs, doubts, strict=True)
        ]
        return Outlook(tokens, costs, ratios(tokens, costs), ratios(sure, costs), hopes)

    def _settle(self, rows: int, outlook: Outlook) -> _Rows:
        """Move to the fastest depth, unless the one settled on is about as fast."""
        speeds = outlook.speeds
        state = self._rows.get(rows)
        if state is None:
            most = START_DEPTH[self.family]
            state = self._rows[rows] = _Rows(fastest(speeds[: most + 1]))
            return state
        if self._costs.rounds(rows) < TRIED and not self._acceptance.changes:
            return state
        best = fastest(speeds)
        if best > state.depth:  # deeper only where the text is known well enough
            best = fastest(self._sure_enough(rows, outlook.sure_speeds))
            speeds = outlook.sure_speeds
        margin = LEAVE_PLAIN if state.depth == 0 else SWITCH if best else STAY_PLAIN
        if self._costs.is_new(rows, best):
            margin += self._costs.first_use / FIRST_USE_ROUNDS
        if speeds[best] > margin * speeds[state.depth]:
            state.depth = best
        return state

    def _sure_enough(self, rows: int, speeds: list[float]) -> list[float]:
        """Speeds; none for depths over 1 that were never run, while the text is hardly known."""
        if not self._knows_little:
            return speeds
        return [
            speed if depth < 2 or not self._costs.is_new(rows, depth) else 0.0
            for depth, speed in enumerate(speeds)
        ]

    @property
    def _knows_little(self) -> bool:
        """Whether the text changed and few drafts were judged since."""
        return self._acceptance.changes > 0 and self._acceptance.first_drafts < FEW_DRAFTS

    # Trying other depths.

    def _try(self, rows: int, state: _Rows, outlook: Outlook) -> int:
        """The depth settled on, or another one that deserves to be measured now."""
        state.trial_worth = None
        if not state.trial_left:
            self._begin_trial(rows, state, outlook)
        if not state.trial_left:
            return state.depth
        state.trial_left -= 1
        if state.trial != state.depth:
            gain, speed = outlook.tokens[state.trial], outlook.speeds[state.depth]
            state.trial_worth = gain / speed
        return state.trial

    def _begin_trial(self, rows: int, state: _Rows, outlook: Outlook) -> None:
        if self._costs.samples(rows, state.depth) < TRIED - 1:
            return
        if state.depth and not self._costs.samples(rows, 0):
            depth: int | None = 0  # what plain decoding costs has to be known
        else:
            depth = self._candidate(rows, state, outlook)
        if depth is not None:
            state.trial, state.trial_left = depth, TRIED + (not self._costs.samples(rows, depth))

    def _candidate(self, rows: int, state: _Rows, outlook: Outlook) -> int | None:
        """The depth that could most likely win and that the credit suffices for."""
        best, best_hope = None, TRY_GAIN * outlook.sure_speeds[state.depth]
        for depth, hope in enumerate(outlook.hopes):
            if depth == state.depth or hope <= best_hope:
                continue
            if state.depth == 0 and outlook.tokens[depth] < PARKED_TRY_TOKENS:
                continue
            is_new = self._costs.is_new(rows, depth)
            if is_new and self._knows_little:
                continue
            samples = self._costs.samples(rows, depth)
            if samples >= TRIED and self._costs.age(rows, depth) < TRY_AGE:
                continue
            loss = outlook.costs[depth] - outlook.tokens[depth] / outlook.speeds[state.depth]
            price = TRIED * max(loss, 0.0) / outlook.costs[0]
            price += self._costs.first_use * is_new
            if price <= state.credit:
                best, best_hope = depth, hope
        return best

    # Shadows.

    def _shadow(self, rows: int, state: _Rows, outlook: Outlook) -> int:
        """Tokens to draft beside a plain round, only to learn whether they would be kept."""
        if state.depth:
            self._parked_rounds = 0
            return 0
        self._parked_rounds += 1
        self._extra_shadows = min(EXTRA_SHADOWS, self._extra_shadows + EXTRA_SHADOW_RATE)
        gap = max(SHADOW_GAP, ceil(self._costs.draft_step(rows) / SHADOW_SHARE))
        due = self._parked_rounds >= min(gap, MAX_SHADOW_GAP)
        if not due and self._extra_shadows >= 1 and self._is_promising(outlook):
            self._extra_shadows -= 1
            due = True
        self._shadowed = False
        if due:
            self._parked_rounds = 0
        return int(due)

    def _is_promising(self, outlook: Outlook) -> bool:
        """Whether drafting would be faster if all text were like that of the last shadow, or might
        be after a change of which little was seen."""
        if self._knows_little:
            guesses = [self._acceptance.tokens(-1)]
        elif self._shadowed:
            guesses = [self._acceptance.recent_tokens(blocks) for blocks in (1, 3)]
        else:
            return False
        speeds = [ratios(tokens, outlook.costs) for tokens in guesses]
        return any(max(guess) > LEAVE_PLAIN * guess[0] for guess in speeds)

    # After a round.

    def observe(self, rows: int, depth: int, seconds: float, accepted: Sequence[int]) -> None:
        """Learn from a round.

        Args:
            seconds: from its start to its tokens on the host.
            accepted: drafts kept, per row, 0..depth.
        """
        shadow = self._plan.shadow if depth == 0 else 0
        state = self._rows.get(rows)
        if state is not None:
            self._account(rows, state, seconds)
        self._costs.observe(rows, SHADOW if shadow else depth, seconds)
        if depth and self._acceptance.observe(depth, accepted, CHANGED):
            self._renewed = True
        if state is not None and self._renewed and not self._knows_little:
            self._renewed = False
            if self._acceptance.tokens()[1] >= RENEWING_TOKENS:
                state.credit = max(state.credit, RENEWED_CREDIT)

    def _account(self, rows: int, state: _Rows, seconds: float) -> None:
        """Earn credit by time; pay what a trial round took longer than its tokens are worth."""
        costs, _ = self._costs.table(rows)
        plain = seconds / self._costs.level(rows) / costs[0]
        rate = CREDIT_RATE if state.depth else PARKED_CREDIT_RATE
        kept = KEPT_CREDIT if state.depth else PARKED_CREDIT
        most = CREDIT if self._costs.rounds(rows) < YOUNG else kept
        state.credit = min(most, state.credit + rate * plain)
        if state.trial_worth is not None:
            state.credit -= max(0.0, plain - state.trial_worth / costs[0])

    def observe_shadow(self, agreed: Sequence[int], drafted: int) -> None:
        """Learn from a shadow.

        Args:
            agreed: leading drafts equal to what the rows then produced, per row.
            drafted: tokens that the shadow drafted for each row.
        """
        if drafted and agreed:
            hopeless = self._acceptance.tokens()[1] < HOPELESS_TOKENS
            enough = CHANGED_HOPELESS if hopeless else CHANGED_PARKED
            if self._acceptance.observe(drafted, agreed, enough, SHADOW_FORGET):
                self._renewed = True
            self._shadowed = True

    # Keeping what was learned.

    def to_json(self) -> dict[str, Any]:
        """What was learned of costs; acceptance belongs to the text and is not kept."""
        return {"version": VERSION, "family": self.family, "cells": self._costs.to_json()}

    @classmethod
    def from_json(cls, family: Family, document: Any) -> DepthController:
        """A controller that starts from `to_json`'s costs; what is no such document is ignored."""
        controller = cls(family)
        match document:
            case {"version": int(version), "family": str(name), "cells": list(cells)}:
                if version == VERSION and name == family:
                    controller._costs.load(cells)
        return controller
