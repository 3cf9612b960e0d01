"""What is believed about the depths of a round. Owns: the figures that they are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from math import erf, exp, hypot, log, pi, sqrt
from typing import NamedTuple


class Outlook(NamedTuple):
    """What is believed of a number of rows; lists by depth.

    Attributes:
        tokens: expected of a round, per row.
        costs: seconds of a round.
        doubts: what a trial would show of the costs' logarithms, standard deviations.
        speeds: tokens per second.
        limits: tokens per second that no round exceeds, however cheap it should prove.
    """

    tokens: list[float]
    costs: list[float]
    doubts: list[float]
    speeds: list[float]
    limits: list[float]

    def expected_gain(self, now: int, depth: int, unseen: float, margin: float) -> float:
        """What knowing another depth's speed is worth: E[log of the gain, 0 where it is none].

        Args:
            now: the depth to stay at otherwise.
            unseen: standard deviation of the log of the tokens, as far as a trial would show it.
        """
        mean = log(self.speeds[depth] / self.speeds[now] / margin)
        cheaper = log(self.limits[depth] / self.speeds[depth])
        spread = hypot(min(self.doubts[depth], cheaper / 2), unseen)
        if not spread:
            return max(mean, 0.0)
        z = mean / spread
        density = exp(-z * z / 2) / sqrt(2 * pi)
        return spread * (density + z * (1 + erf(z / sqrt(2))) / 2)


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
