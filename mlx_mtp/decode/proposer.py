"""The drafts of rounds. Owns: when they are made and how deep, and what the depth policy is told.

Where nobody can join, the drafts of a round are launched before the round in front of it is read,
so that the device does not wait for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_mtp.decode.policy import DepthPolicy, Plan
from mlx_mtp.decode.replay import Replay, replay_of
from mlx_mtp.decode.request import Running
from mlx_mtp.decode.round import Drafts, Rows, launch, propose
from mlx_mtp.decode.sampling import Sampler
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.drafter import Drafter
from mlx_mtp.model.target import Target
from mlx_mtp.types import RunStats


class Proposer:
    """Makes drafts of a fixed set of rows until it is given others.

    Args:
        target, drafter: a drafter of None drafts nothing, or what the rows' scripts say.
        depth: chooses how many tokens to draft and learns from what came of it; not asked where
            nothing can draft.
        stats: counters to add to.
        exact: the rounds are exact ones.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        depth: DepthPolicy,
        stats: RunStats,
        exact: bool = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.depth = depth
        self.stats = stats
        self.exact = exact
        self._replay: Replay | None = None

    def use(self, live: Sequence[Running]) -> None:
        """Draft for these rows from now on."""
        self._replay = replay_of(live)

    @property
    def can_draft(self) -> bool:
        return self.drafter is not None or self._replay is not None

    def make(
        self, rows: Rows, sampler: Sampler, cache: SlotCache, committed: Sequence[int]
    ) -> Drafts:
        """The drafts of the next round: those made ahead, or new ones; see `propose`."""
        if rows.drafts is not None:
            return rows.drafts
        plan = self.depth.choose(len(committed)) if self.can_draft else Plan(0)
        if self.drafter is not None:
            self.stats.drafter_forwards += plan.depth + plan.shadow
        return propose(
            self.target,
            self.drafter,
            cache,
            rows,
            sampler,
            plan,
            committed,
            self._replay,
            exact=self.exact,
        )

    def make_ahead(
        self, rows: Rows, sampler: Sampler, cache: SlotCache, most_committed: Sequence[int]
    ) -> Rows:
        """The state after a round that is not read yet, with the next drafts under way.

        Args:
            most_committed: what the round may commit at most, and no less than it will.
        """
        if not self.can_draft:
            return rows
        drafts = self.make(rows, sampler, cache, most_committed)
        launch(drafts)
        return replace(rows, drafts=drafts)

    def learn(self, plan: Plan, seconds: float, blocks: Sequence[Sequence[int]]) -> None:
        """Tell the depth policy what came of a round.

        Args:
            plan: of the round.
            seconds: that it took.
            blocks: per row, as `read` gives them.
        """
        if not self.can_draft:
            return
        kept = [block[plan.depth + 1] for block in blocks]
        self.depth.observe(len(blocks), plan, seconds, kept)
        if plan.shadow:
            # The first of the shadow's tokens stands where this round's token does.
            self.depth.observe_shadow([int(block[2] == block[0]) for block in blocks], 1)
