"""The scores of one position. Owns: how near a token came to being the choice there.

The rule is decode.sampling's: logits / T, filters, + gumbel, argmax. Here it is asked with slack:
whether a token could have been chosen if every score were wrong by as much as rounding may move it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import cast

import mlx.core as mx

from mlx_mtp.decode.sampling import LEAST_TEMPERATURE, RowSampling, Sampler


class Scores:
    """What decides about one token of an answer.

    Args:
        logits: [vocabulary], the target's.
        sampling: of the answer.
        position: absolute, of the token to be produced.
        suppress: ids that are never produced.
    """

    def __init__(
        self, logits: mx.array, sampling: RowSampling, position: int, suppress: Sequence[int] = ()
    ) -> None:
        self.sampling = sampling
        self.is_sampled = sampling.temperature >= LEAST_TEMPERATURE
        logits = logits.astype(mx.float32)
        if suppress:
            logits[mx.array(list(suppress))] = -mx.inf
        self._scaled = logits / sampling.temperature if self.is_sampled else logits
        self._value = self._scaled
        sampler = Sampler([sampling], logits.shape[0])
        if (noise := sampler.noise(mx.array([[position]], mx.int32))) is not None:
            self._value = self._scaled + noise[0, 0]

    def gap(self, token: int, other: int) -> float:
        """The first token's score less the other's, noise included, filters left out."""
        return _number(self._value[token] - self._value[other])

    def could_choose(self, token: int, logit_noise: float, slack: float) -> bool:
        """Whether the token is the choice, or would be if scores differed by rounding.

        With e = slack * logit_noise / T, the most that two scores may move against each other, it
        could be chosen where its score passes the filters or misses their threshold by at most e,
        and no token that passes them by more than e is ahead of it by more than e. Where
        probabilities add up to top_p moves too: all odds may change by the factor exp(e).

        Args:
            token: asked for.
            logit_noise: how much rounding moves a logit.
            slack: how many times that counts for two of them.
        """
        e = slack * logit_noise
        if self.is_sampled:
            e /= self.sampling.temperature
        lenient, strict = self._thresholds(e)
        if not bool((self._scaled[token] >= lenient - e).item()):
            return False
        ahead = (self._value > self._value[token] + e) & (self._scaled >= strict + e)
        return not bool(mx.any(ahead).item())

    def _thresholds(self, e: float) -> tuple[float, float]:
        """The lowest scaled logit that the filters let through, if odds in favour of the best
        tokens are wrong by exp(e) one way or the other: never above, and never below, the true one
        for that reason."""
        if not self.is_sampled:
            return -mx.inf, -mx.inf
        top_k, top_p, min_p = self.sampling.top_k, self.sampling.top_p, self.sampling.min_p
        ranked = -mx.sort(-self._scaled)
        if top_k:
            ranked = ranked[:top_k]
        lenient = strict = _number(ranked[-1]) if top_k else -mx.inf
        if top_p < 1:
            reached = mx.cumsum(mx.softmax(ranked))
            lenient, strict = (
                _number(ranked[_place(reached, _shifted(top_p, way * e))]) for way in (1, -1)
            )
        if min_p > 0:
            floor = _number(ranked[0] + mx.log(mx.array(min_p)))
            lenient, strict = max(lenient, floor), max(strict, floor)
        return lenient, strict


def _shifted(share: float, e: float) -> float:
    """A probability whose odds are multiplied by exp(e)."""
    factor = exp(min(e, 50.0))
    return share * factor / (1 - share + share * factor)


def _place(reached: mx.array, share: float) -> int:
    """Where a running sum of probabilities first reaches a share; the last place if it does not."""
    return min(int(_number(mx.sum(reached < share))), reached.shape[0] - 1)


def _number(x: mx.array) -> float:
    return cast("float", x.item())
