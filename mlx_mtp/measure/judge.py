"""Where two answers part. Owns: whether that is a near tie or a fault.

Both tokens are scored where the answers part, from the common beginning, by plain steps. With T the
temperature (1 where greedy), N the rounding of measure.geometry, at this position where that is
more, and g the distance of the two scores (scaled, with the position's noise):

    near tie   both tokens could be the choice if no two scores moved against each other by more
               than 2 N / T (measure.scores), so g <= 2 N / T, or a filter's threshold is as near
    fault      anything else, and everything where N is 0: equal logits have one choice

2 is for two scores that move apart. At a position N is what SHAKES changes of the last bit of the
embeddings move its logits by; it counts only where geometries were seen to differ at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx

from mlx_mtp.decode.sampling import RowSampling
from mlx_mtp.measure.geometry import CAP, PLAIN, Geometry, Noise, Shaken, distance, retrace
from mlx_mtp.measure.scores import Scores
from mlx_mtp.model.target import Target

SLACK = 2.0
"""How many times rounding may move two scores against each other."""
SHAKES = 3
"""Changes of last bits at a position where the noise of others does not explain a difference."""


@dataclass(frozen=True)
class Parting:
    """Where an answer parts from the plain one.

    Attributes:
        place: number of the first other token in the answer, from 0.
        plain, other: the tokens there; None: that answer is over.
        plain_gap, block_gap: by how much the plain token's score is above the other's in plain
            steps, and in the geometry of the other answer; None where an answer is over.
        allowed: the gap that rounding explains.
        fault: why it is more than a near tie, in words; None: it is one.
    """

    place: int
    plain: int | None
    other: int | None
    plain_gap: float | None = None
    block_gap: float | None = None
    allowed: float = 0.0
    fault: str | None = None


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place at which two answers differ, the end of one included; None if nowhere."""
    for place, (one, its) in enumerate(zip(plain, other, strict=False)):
        if one != its:
            return place
    return None if len(plain) == len(other) else min(len(plain), len(other))


class Judge:
    """Tells near ties from faults.

    Args:
        target: computed with.
        suppress: ids that are never produced.
        noise: of this target on this machine; measured when it is first needed.
    """

    def __init__(self, target: Target, suppress: Sequence[int], noise: Callable[[], Noise]) -> None:
        self._target = target
        self._suppress = suppress
        self._noise = noise

    def part(
        self,
        prompt: Sequence[int],
        plain: Sequence[int],
        other: Sequence[int],
        sampling: RowSampling,
        geometry: Geometry,
        *,
        exact: bool = False,
    ) -> Parting | None:
        """Where two answers to a prompt part, and why; None where they are equal.

        Args:
            plain, other: token ids.
            sampling: of both.
            geometry: of the forwards that made the other one.
            exact: both were made with the same geometry, so a near tie is no excuse.
        """
        place = first_difference(plain, other)
        if place is None:
            return None
        if place >= min(len(plain), len(other)):
            one, its = (ids[place] if place < len(ids) else None for ids in (plain, other))
            return Parting(place, one, its, fault="One answer ends where the other goes on.")
        tokens, position = (plain[place], other[place]), len(prompt) + place
        logits = self._at(self._target, prompt, plain, place)
        in_block = self._at(self._target, prompt, plain, place, geometry)
        scores, block = (
            Scores(one, sampling, position, self._suppress) for one in (logits, in_block)
        )
        apart = distance(logits, in_block)
        rounding, fault = 0.0, "In exact mode equal bits are promised."
        if not exact:
            rounding, fault = self._explained(scores, tokens, apart)
            if fault:
                moved = [distance(logits, one) for one in self._shaken(prompt, plain, place)]
                rounding, fault = self._explained(scores, tokens, apart, max(moved))
        allowed = SLACK * rounding / (sampling.temperature if scores.is_sampled else 1)
        return Parting(
            place, *tokens, scores.gap(*tokens), block.gap(*tokens), allowed, fault or None
        )

    def _explained(
        self, scores: Scores, tokens: tuple[int, int], apart: float, moved: float = 0.0
    ) -> tuple[float, str]:
        """What rounding moves a logit by at a position, and why that is no near tie, if so.

        Args:
            scores: by plain steps.
            tokens: of both answers.
            apart: distance of the logits in both geometries.
            moved: what changes of last bits move the logits by, there.
        """
        noise = self._noise()
        seen, shaken = max(noise.largest, apart), max(noise.shaken.largest, moved)
        if not seen:
            return 0.0, "The logits are equal bit for bit, so there is one choice only."
        rounding = max(min(seen, CAP * shaken), moved)
        if apart > CAP * shaken:
            how = f"a changed last bit moves them by {shaken:.2g}"
            return rounding, f"The logits lie {apart:.2g} apart, and {how}."
        if not all(scores.could_choose(token, rounding, SLACK) for token in tokens):
            return rounding, "The scores lie further apart than rounding explains."
        return rounding, ""

    def _at(
        self,
        target: Target,
        prompt: Sequence[int],
        answer: Sequence[int],
        place: int,
        geometry: Geometry = PLAIN,
    ) -> mx.array:
        return next(islice(retrace(target, prompt, answer, geometry), place, None))

    def _shaken(self, prompt: Sequence[int], answer: Sequence[int], place: int) -> list[mx.array]:
        shaken = (Shaken(self._target, seed) for seed in range(SHAKES))
        return [self._at(one, prompt, answer, place) for one in shaken]
