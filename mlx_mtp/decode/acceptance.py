"""How many drafts a text keeps. Owns: acceptance by position, and noticing that the text changed.

Learned from nothing but counts of kept drafts; all rows of a batch are pooled. Knows no costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import log

from mlx_mtp.types import MAX_DEPTH

FORGET = 0.993
"""Weight of a round's counts after the next one: half of it is gone after 100 rounds."""

FIRST_DRAFT = 0.8
"""Share of first drafts expected to be kept before anything is known; counts as one draft."""

FIRST_DRAFT_AFTER_CHANGE = 0.5
"""The same after the text changed: what was just seen should speak."""

NEXT_DRAFT_WEIGHT = 4.0
"""Drafts that a position is worth being expected to do as well as the one before it."""

SUFFIXES = (1, 2, 4, 8, 16, 32)
"""Lengths, in blocks, of the recent past that is compared with everything remembered."""

CHANGED = 7.0
"""Log-likelihood (nats) by which the recent past must contradict the memory to replace it."""

_Counts = tuple[list[float], list[float]]


class Acceptance:
    """Share of drafts kept, by position: P(draft i is kept | those before it are).

    Conditional shares can be learned from blocks of any depth; their products are the chances that
    a block keeps at least i drafts. A slow estimate remembers hundreds of blocks; when a suffix of
    the last blocks contradicts it (generalised likelihood ratio), the suffix takes its place.
    """

    def __init__(self) -> None:
        self._tried = [0.0] * MAX_DEPTH
        self._kept = [0.0] * MAX_DEPTH
        self._prior = FIRST_DRAFT
        self._recent: deque[_Counts] = deque(maxlen=max(SUFFIXES))
        self.changes = 0

    def observe(
        self,
        depth: int,
        accepted: Sequence[int],
        changed_at: float = CHANGED,
        forget: float = FORGET,
    ) -> bool:
        """Count one block per row; True where that showed the text to have changed.

        Args:
            depth: tokens drafted for each row, at least 1.
            accepted: drafts kept, per row.
            changed_at: evidence in nats that is taken for a change.
        """
        places = range(min(depth, MAX_DEPTH))
        tried = [float(sum(count >= place for count in accepted)) for place in places]
        kept = [float(sum(count > place for count in accepted)) for place in places]
        expected = self.conditional()
        self._recent.append((tried, kept))
        for place in range(MAX_DEPTH):
            self._tried[place] *= forget
            self._kept[place] *= forget
        for place in places:
            self._tried[place] += tried[place]
            self._kept[place] += kept[place]
        return self._follow(changed_at, expected)

    def _follow(self, changed_at: float, expected: list[float]) -> bool:
        """Replace the memory by the suffix that contradicts it most, if one does enough."""
        tried, kept = [0.0] * MAX_DEPTH, [0.0] * MAX_DEPTH
        most: tuple[float, list[float], list[float]] = (changed_at, [], [])
        for length, (block_tried, block_kept) in enumerate(reversed(self._recent), 1):
            for place, count in enumerate(block_tried):
                tried[place] += count
                kept[place] += block_kept[place]
            if length in SUFFIXES:
                evidence = _contradiction(tried, kept, expected)
                if evidence > most[0]:
                    most = (evidence, tried.copy(), kept.copy())
        if not most[1]:
            return False
        self._tried, self._kept = most[1], most[2]
        self._prior = FIRST_DRAFT_AFTER_CHANGE
        self._recent.clear()
        self.changes += 1
        return True

    def conditional(self, doubt: float = 0.0) -> list[float]:
        """P(draft i is kept | those before it are), i = 1..MAX_DEPTH.

        Args:
            doubt: standard deviations to stay below what is expected; a position hardly tried has
                the doubt of the one before it.
        """
        share, weight = self._prior, 1.0
        shares = []
        for place, (tried, kept) in enumerate(zip(self._tried, self._kept, strict=True)):
            share = (kept + weight * share) / (tried + weight)
            if doubt:
                told = tried / (tried + weight) if place else 1.0
                spread = (share * (1 - share) / (tried + weight + 1)) ** 0.5
                share = min(max(share - doubt * told * spread, 0.0), 1.0)
            weight = NEXT_DRAFT_WEIGHT
            shares.append(share)
        return shares

    def tokens(self, doubt: float = 0.0) -> list[float]:
        """Tokens that a row gains by a round of depth 0..MAX_DEPTH: 1 + sum of P(at least i)."""
        return _tokens(self.conditional(doubt))

    @property
    def first_drafts(self) -> float:
        """First drafts judged that are remembered."""
        return self._tried[0]

    def recent_tokens(self, blocks: int) -> list[float]:
        """As `tokens`, if every position did as well as first drafts did in the last few blocks."""
        last = list(self._recent)[-blocks:]
        tried, kept = sum(block[0][0] for block in last), sum(block[1][0] for block in last)
        share = (kept + 0.5 * self.conditional()[0]) / (tried + 0.5)
        return _tokens([share] * MAX_DEPTH)


def _tokens(shares: Sequence[float]) -> list[float]:
    tokens, reach = [1.0], 1.0
    for share in shares:
        reach *= share
        tokens.append(tokens[-1] + reach)
    return tokens


def _contradiction(tried: list[float], kept: list[float], expected: list[float]) -> float:
    """n * KL(seen || expected), all positions pooled: kinds of text move them together."""
    drafts = sum(tried)
    if not drafts:
        return 0.0
    seen = sum(kept) / drafts
    hoped = sum(count * share for count, share in zip(tried, expected, strict=True)) / drafts
    hoped = min(max(hoped, 1e-9), 1 - 1e-9)
    evidence = 0.0
    if seen > 0:
        evidence += seen * log(seen / hoped)
    if seen < 1:
        evidence += (1 - seen) * log((1 - seen) / (1 - hoped))
    return drafts * evidence
