"""How many drafts a text keeps. Owns: acceptance by position, and noticing that the text changed.

Learned from nothing but counts of kept drafts; all rows of a batch are pooled. Knows no costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import log, sqrt
from operator import mul

from mlx_mtp.types import MAX_DEPTH

FORGET = 0.994
"""Weight of a block's counts after the next one: half of it is gone after 115 blocks."""

UNSEEN_FORGET = 0.9985
"""The same for later drafts' counts in a plain round: shadows do not show them."""

FIRST_DRAFT, FIRST_DRAFT_WEIGHT = 0.8, 0.5
"""Share of first drafts expected to be kept before anything is known, and the drafts that this
counts as."""

CHANGED_DRAFT, CHANGED_DRAFT_WEIGHT = 0.5, 2.0
"""The same after the text changed."""

NEXT_DRAFT_WEIGHT = 4.0
"""Drafts that a position is worth being expected to do as well as the one before it."""

SUFFIXES = (1, 2, 3, 5, 8, 16, 32)
"""Lengths, in blocks, of the recent past that is compared with everything remembered."""

LATER = 0.95
"""A position hardly tried is expected to keep this share of what the one before it keeps."""

SUFFIX_WEIGHT = 4.0
"""First drafts, or half of its own if more, that a suffix counts as which took the memory's place:
it was picked for being extreme."""

_Counts = tuple[list[float], list[float]]


class Acceptance:
    """Share of drafts kept, by position: P(draft i is kept | those before it are).

    Conditional shares can be learned from blocks of any depth; their products are the chances that
    a block keeps at least i drafts. A slow estimate remembers hundreds of blocks; when a suffix of
    the last blocks contradicts it (generalised likelihood ratio), the suffix takes its place.

    Attributes:
        changes: how often the text was found to have changed.
        suspicion: nats by which the last blocks look better than those before them.
    """

    def __init__(self) -> None:
        self._tried = [0.0] * MAX_DEPTH
        self._kept = [0.0] * MAX_DEPTH
        self._prior, self._prior_weight = FIRST_DRAFT, FIRST_DRAFT_WEIGHT
        self._recent: deque[_Counts] = deque(maxlen=max(SUFFIXES))
        self._shares: list[float] | None = None  # what `conditional` gives, until the next counts
        self.changes = 0
        self.suspicion = 0.0
        self._suspected = FIRST_DRAFT

    def observe(self, depth: int, accepted: Sequence[int], changed_at: float) -> bool:
        """Count one block per row; True where that showed the text to have changed.

        Args:
            depth: tokens drafted for each row, at least 1.
            accepted: drafts kept, per row.
            changed_at: evidence in nats that is taken for a change.
        """
        places = range(min(depth, MAX_DEPTH))
        tried = [float(sum(count >= place for count in accepted)) for place in places]
        kept = [float(sum(count > place for count in accepted)) for place in places]
        self._recent.append((tried, kept))
        self._shares = None
        for place in range(MAX_DEPTH):
            self._tried[place] *= FORGET
            self._kept[place] *= FORGET
        for place in places:
            self._tried[place] += tried[place]
            self._kept[place] += kept[place]
        return self._follow(changed_at)

    def pass_round(self) -> None:
        """A plain round passed: what is known of later drafts, which shadows do not show, ages."""
        self._shares = None
        for place in range(1, MAX_DEPTH):
            self._tried[place] *= UNSEEN_FORGET
            self._kept[place] *= UNSEEN_FORGET

    def _follow(self, changed_at: float) -> bool:
        """Replace the memory by the suffix that contradicts it most, if one does enough."""
        tried, kept = [0.0] * MAX_DEPTH, [0.0] * MAX_DEPTH
        most: tuple[float, list[float], list[float]] = (changed_at, [], [])
        self.suspicion = 0.0
        for length, (block_tried, block_kept) in enumerate(reversed(self._recent), 1):
            for place, count in enumerate(block_tried):
                tried[place] += count
                kept[place] += block_kept[place]
            if length in SUFFIXES:
                evidence, better = self._contradiction(tried, kept)
                if evidence > most[0]:
                    most = (evidence, tried.copy(), kept.copy())
                if better and evidence > self.suspicion:
                    self.suspicion = evidence
                    self._suspected = (kept[0] + 1) / (tried[0] + 1)
        if not most[1]:
            return False
        share = min(1.0, max(SUFFIX_WEIGHT / most[1][0], 0.5))
        self._tried = [share * count for count in most[1]]
        self._kept = [share * count for count in most[2]]
        self._prior, self._prior_weight = CHANGED_DRAFT, CHANGED_DRAFT_WEIGHT
        self._recent.clear()
        self.changes += 1
        return True

    def _contradiction(self, tried: list[float], kept: list[float]) -> tuple[float, bool]:
        """How much the last counts contradict those before them, and whether they are better.

        n * KL(seen || expected), all positions pooled: kinds of text move them together. Less
        where what was before them is hardly known itself.
        """
        drafts, before, hoped = sum(tried), self._prior_weight, 0.0
        share, weight = self._prior, self._prior_weight
        for place, count in enumerate(tried):
            if not count:
                break
            known = max(self._tried[place] - count, 0.0)
            share = (max(self._kept[place] - kept[place], 0.0) + weight * share) / (known + weight)
            hoped += count * min(share, 1.0)
            before += known
            share, weight = min(share, 1.0) * LATER, NEXT_DRAFT_WEIGHT
        seen = sum(kept) / drafts
        hoped = min(max(hoped / drafts, 1e-9), 1 - 1e-9)
        evidence = 0.0
        if seen > 0:
            evidence += seen * log(seen / hoped)
        if seen < 1:
            evidence += (1 - seen) * log((1 - seen) / (1 - hoped))
        return drafts * evidence * before / (before + drafts), seen > hoped

    def conditional(self) -> list[float]:
        """P(draft i is kept | those before it are), i = 1..MAX_DEPTH."""
        if self._shares is None:
            share, weight = self._prior, self._prior_weight
            self._shares = []
            for tried, kept in zip(self._tried, self._kept, strict=True):
                share = (kept + weight * share) / (tried + weight)
                self._shares.append(share)
                share, weight = share * LATER, NEXT_DRAFT_WEIGHT
        return self._shares

    def tokens(self) -> list[float]:
        """Tokens that a row gains by a round of depth 0..MAX_DEPTH: 1 + sum of P(at least i)."""
        return _tokens(self.conditional())

    def unseen(self, places: range, depth: int, blocks: int) -> float:
        """What so many blocks would show of the tokens of a depth: standard deviation of their log.

        Args:
            places: the positions that would be learned of, from 0.
        """
        shares = self.conditional()
        reach = list(accumulate(shares[:depth], mul, initial=1.0))
        variance, gained = 0.0, sum(reach)
        for place in places:
            share, drafts = shares[place], blocks * reach[place]
            weight = self._tried[place] + (NEXT_DRAFT_WEIGHT if place else self._prior_weight)
            learned = share * (1 - share) / (weight + 1) * drafts / (weight + drafts)
            variance += learned * (sum(reach[place + 1 :]) / max(share, 1e-9) / gained) ** 2
        return sqrt(variance)

    @property
    def first_drafts(self) -> float:
        """First drafts judged that are remembered."""
        return self._tried[0]

    def suspected_tokens(self) -> list[float]:
        """As `tokens`, if the text were like the last blocks that look better than the memory."""
        return _tokens([self._suspected] * MAX_DEPTH)


def _tokens(shares: Sequence[float]) -> list[float]:
    tokens, reach = [1.0], 1.0
    for share in shares:
        reach *= share
        tokens.append(tokens[-1] + reach)
    return tokens
