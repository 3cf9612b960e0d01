"""What is believed about the depths of a round. Owns: the figures that they are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Outlook(NamedTuple):
    """What is believed of a number of rows; lists by depth.

    Attributes:
        tokens: expected of a round, per row.
        costs: seconds of a round.
        speeds: tokens per second.
        sure_speeds: the same with what acceptance is sure to be.
        hopes: what the speeds may be, within doubt.
    """

    tokens: list[float]
    costs: list[float]
    speeds: list[float]
    sure_speeds: list[float]
    hopes: list[float]


def ratios(tokens: Sequence[float], costs: Sequence[float]) -> list[float]:
    """Tokens per second, by depth."""
    return [gain / cost for gain, cost in zip(tokens, costs, strict=True)]


def fastest(speeds: Sequence[float]) -> int:
    """The depth of the highest speed; the smallest of several."""
    return max(range(len(speeds)), key=speeds.__getitem__)


def why_parked(outlook: Outlook) -> str:
    """Why no depth pays, in words."""
    depth = 1 + fastest(outlook.speeds[1:])
    cost = outlook.costs[depth] / outlook.costs[0]
    return (
        f"a round of depth {depth} costs {cost:.2f} steps and brings "
        f"{outlook.tokens[depth]:.2f} tokens"
    )
