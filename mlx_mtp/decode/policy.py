"""What the engine asks before a round and tells after it. Owns: the contract, the fixed depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from mlx_mtp.errors import UsageError
from mlx_mtp.types import EXACT_DEPTH, EXACT_TOKENS, MAX_DEPTH

Depth = int | Literal["auto"]
"""What a caller may ask for: tokens drafted per round, or that the program chooses."""


class Plan(NamedTuple):
    """What to do in the next round.

    Attributes:
        depth: tokens to draft and verify.
        shadow: only with depth 0: tokens to draft without verifying; they are compared with the
            tokens that this and the next rounds produce plainly.
    """

    depth: int
    shadow: int = 0


class DepthPolicy(Protocol):
    """What the engine asks before a round and tells after it."""

    @property
    def parked(self) -> str | None:
        """Why it decodes plainly; None while it drafts."""

    def choose(self, rows: int) -> Plan:
        """The next round of this many live rows."""

    def observe(self, rows: int, plan: Plan, seconds: float, accepted: Sequence[int]) -> None:
        """A round took this long; drafts kept per row. The next one may be chosen already."""

    def observe_shadow(self, agreed: Sequence[int], drafted: int) -> None:
        """Of `drafted` tokens of a shadow, so many agreed from the first on, per row."""


@dataclass(frozen=True)
class FixedDepth:
    """Always the same depth; learns nothing."""

    depth: int

    @property
    def parked(self) -> str | None:
        return None

    def choose(self, rows: int) -> Plan:
        return Plan(self.depth)

    def observe(self, rows: int, plan: Plan, seconds: float, accepted: Sequence[int]) -> None:
        pass

    def observe_shadow(self, agreed: Sequence[int], drafted: int) -> None:
        pass


def policy_for(
    depth: Depth, auto: DepthPolicy, *, can_draft: bool, exact: bool = False
) -> DepthPolicy:
    """What chooses the depth for a caller's wish.

    Args:
        depth: "auto" or 0..MAX_DEPTH; 0..EXACT_DEPTH for exact rounds.
        auto: serves "auto".
        can_draft: there is a drafter.
        exact: the rounds are exact ones.

    Raises:
        UsageError: another value, or drafts without a drafter.
    """
    if depth == "auto":
        return auto
    if not isinstance(depth, int) or isinstance(depth, bool) or not 0 <= depth <= MAX_DEPTH:
        raise UsageError(
            f"draft_depth is {depth!r}.", f'Give "auto" or a whole number from 0 to {MAX_DEPTH}.'
        )
    if depth and not can_draft:
        raise UsageError(
            f"draft_depth is {depth}, but no drafter is loaded.",
            "Load one, or leave draft_depth out.",
        )
    if exact and depth > EXACT_DEPTH:
        raise UsageError(
            f"draft_depth is {depth}, and exact decoding verifies {EXACT_TOKENS} tokens at a time.",
            f'Give "auto" or a whole number from 0 to {EXACT_DEPTH}, or decode without exact.',
        )
    return FixedDepth(depth)
