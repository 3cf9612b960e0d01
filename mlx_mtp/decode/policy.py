"""What the engine asks before a round and tells after it. Owns: the contract, the fixed depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


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

    def observe(self, rows: int, depth: int, seconds: float, accepted: Sequence[int]) -> None:
        """A round took this long; drafts kept per row."""

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

    def observe(self, rows: int, depth: int, seconds: float, accepted: Sequence[int]) -> None:
        pass

    def observe_shadow(self, agreed: Sequence[int], drafted: int) -> None:
        pass
