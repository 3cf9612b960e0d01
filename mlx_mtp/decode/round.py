"""One round. Owns: draft, verify, accept, commit for all live rows, and the one host read.

    depth draft steps -> one target forward over [rows, depth + 1] -> acceptance -> commit

All control values stay on the device. Depth 0 is plain decoding through the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_mtp.decode.sampling import Sampler
from mlx_mtp.model.cache import Run, SlotCache
from mlx_mtp.model.drafter import Drafter
from mlx_mtp.model.target import Target


@dataclass(frozen=True)
class Rows:
    """The device state of the live rows, the prefix [0, n) of the cache.

    Attributes:
        tokens: int32 [n], each row's bonus token: produced, but without K/V yet.
        lengths: int32 [n], committed lengths; the bonus token stands at this position.
        hidden: [n, 1, H], the target's post-norm hidden state that predicted the bonus token.
    """

    tokens: mx.array
    lengths: mx.array
    hidden: mx.array

    def take(self, index: list[int]) -> Rows:
        """The rows of these indices, in this order."""
        rows = mx.array(index)
        return Rows(self.tokens[rows], self.lengths[rows], self.hidden[rows])

    def joined(self, other: Rows) -> Rows:
        """These rows, then the other's."""
        return Rows(
            mx.concatenate([self.tokens, other.tokens]),
            mx.concatenate([self.lengths, other.lengths]),
            mx.concatenate([self.hidden, other.hidden]),
        )


@dataclass(frozen=True)
class Outcome:
    """What a round brought, unread.

    Attributes:
        rows: the state after it.
        packed: int32 [n, depth + 2 + shadow]: the target's choices, the number of accepted drafts
            a, then shadow drafts. The first a + 1 choices are the row's new tokens.
    """

    rows: Rows
    packed: mx.array


def draft(
    target: Target,
    drafter: Drafter,
    cache: SlotCache,
    rows: Rows,
    sampler: Sampler,
    noise: mx.array | None,
    depth: int,
    runs: dict[str, tuple[Run, ...]],
) -> mx.array:
    """Propose `depth` tokens for each row; reads the cache, changes nothing.

    Args:
        noise: fp32 [n, >= depth, vocabulary] of the positions after the bonus token, or None.
        runs: of these rows, from the cache.

    Returns:
        int32 [n, depth]
    """
    context = drafter.context(cache, rows.lengths, runs)
    token, hidden = rows.tokens[:, None], rows.hidden
    drafts = []
    for step in range(depth):
        h, hidden = drafter.step(target.embed(token), hidden, context)
        scores = drafter.logits(h)
        ids = None if scores.ids is None else scores.ids[:, None]
        drawn = None if noise is None else noise[:, step : step + 1]
        token = sampler.choose(scores.values[:, None], drawn, ids)
        drafts.append(token)
    return mx.concatenate(drafts, axis=1)


def run_round(
    target: Target,
    drafter: Drafter | None,
    cache: SlotCache,
    rows: Rows,
    sampler: Sampler,
    depth: int,
    committed: Sequence[int],
    shadow: int = 0,
) -> Outcome:
    """Build one round; nothing is evaluated yet.

    Args:
        rows: state of the live rows.
        sampler: of the same rows in the same order.
        depth: tokens to draft, 0..MAX_DEPTH; 0 needs no drafter.
        committed: the rows' committed lengths, as the host knows them.
        shadow: at depth 0, tokens to draft and not to verify: the plain tokens of this and the
            next rounds will tell whether they would have been accepted.
    """
    span = cache.span(0, rows.lengths, depth + 1, committed)
    longest = max(depth + 1, shadow)
    noise = sampler.noise(rows.lengths[:, None] + mx.arange(1, longest + 1, dtype=mx.int32))
    tokens, shadows = rows.tokens[:, None], []
    if drafted := depth or shadow:
        assert drafter is not None
        drafts = draft(target, drafter, cache, rows, sampler, noise, drafted, span.runs)
        if depth:
            tokens = mx.concatenate([tokens, drafts], axis=1)
        else:
            shadows = [drafts]
    hidden = target.forward(tokens, cache, span)
    assert hidden is not None
    verified = None if noise is None else noise[:, : depth + 1]
    choices = sampler.choose(target.logits(hidden), verified)
    # A draft is kept while it and all before it equal the target's choice at its place.
    kept = (tokens[:, 1:] == choices[:, :-1]).astype(mx.int32)
    accepted = mx.cumprod(kept, axis=1).sum(axis=1, keepdims=True) if depth else tokens * 0
    after = Rows(
        mx.take_along_axis(choices, accepted, axis=1)[:, 0],
        rows.lengths + 1 + accepted[:, 0],
        mx.take_along_axis(hidden, accepted[:, :, None], axis=1),
    )
    return Outcome(after, mx.concatenate([choices, accepted, *shadows], axis=1))


def read(outcome: Outcome) -> list[list[int]]:
    """Evaluate a round and bring its packed result to the host: the one host read of a round."""
    rows = outcome.rows
    mx.eval(outcome.packed, rows.tokens, rows.lengths, rows.hidden)
    return cast("list[list[int]]", outcome.packed.tolist())
