"""One round. Owns: draft, verify, accept, commit for all live rows, and the one host read.

    depth draft steps -> one target forward over [rows, depth + 1] -> acceptance -> commit

All control values stay on the device, so the drafts of the next round can be under way before the
host has read this one. Depth 0 is plain decoding through the same code.

An exact round verifies EXACT_TOKENS tokens, padded where fewer are drafted, and each row goes
through the target apart: its kernels see the same shapes at every depth, among any neighbours, and
attention covers slots that a token's position alone decides. So a GPU whose kernels are chosen by
their shapes should compute the same bits with and without drafts; none has been tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import mlx.core as mx

from mlx_mtp.decode.policy import Plan
from mlx_mtp.decode.replay import Replay
from mlx_mtp.decode.sampling import Sampler
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.drafter import Drafter
from mlx_mtp.model.target import Target
from mlx_mtp.types import EXACT_TOKENS


class Drafts(NamedTuple):
    """What was proposed for a round; perhaps still being computed.

    Attributes:
        plan: of the round.
        tokens: int32 [n, depth], or [n, shadow]; None where nothing was drafted.
        noise: fp32 [n, longest of the tokens verified and shadow, vocabulary] that they were drawn
            with, of the positions after the bonus token; None where all rows are greedy, or not
            kept.
    """

    plan: Plan
    tokens: mx.array | None = None
    noise: mx.array | None = None


@dataclass(frozen=True)
class Rows:
    """The device state of the live rows, the prefix [0, n) of the cache.

    Attributes:
        tokens: int32 [n], each row's bonus token: produced, but without K/V yet.
        lengths: int32 [n], committed lengths; the bonus token stands at this position.
        hidden: [n, 1, H], the target's post-norm hidden state that predicted the bonus token.
        drafts: of the next round, where they were made ahead.
    """

    tokens: mx.array
    lengths: mx.array
    hidden: mx.array
    drafts: Drafts | None = None

    def take(self, index: list[int]) -> Rows:
        """The rows of these indices, in this order."""
        rows, drafts = mx.array(index), self.drafts
        if drafts is not None:
            tokens = None if drafts.tokens is None else drafts.tokens[rows]
            drafts = Drafts(drafts.plan, tokens)
        return Rows(self.tokens[rows], self.lengths[rows], self.hidden[rows], drafts)

    def joined(self, other: Rows) -> Rows:
        """These rows, then the other's; they are to be drafted together."""
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


def propose(
    target: Target,
    drafter: Drafter | None,
    cache: SlotCache,
    rows: Rows,
    sampler: Sampler,
    plan: Plan,
    committed: Sequence[int],
    replay: Replay | None = None,
    *,
    exact: bool = False,
) -> Drafts:
    """Draft for each row what a plan asks for; reads the cache, changes nothing.

    Args:
        sampler: of the same rows in the same order.
        plan: one that drafts needs a drafter, or a replay.
        committed: the rows' committed lengths, or more: as far as the host can know them.
        replay: of the same rows; its drafts take the place of the drafter's.
        exact: for an exact round.
    """
    noise = _noise(rows, sampler, plan, exact)
    tokens = None
    if depth := plan.depth or plan.shadow:
        if drafter is not None:
            tokens = _draft(target, drafter, cache, rows, sampler, noise, depth, committed)
        if replay is not None:
            tokens = replay.drafts(rows.lengths, depth, tokens)
        assert tokens is not None
    return Drafts(plan, tokens, noise)


def _draft(
    target: Target,
    drafter: Drafter,
    cache: SlotCache,
    rows: Rows,
    sampler: Sampler,
    noise: mx.array | None,
    depth: int,
    committed: Sequence[int],
) -> mx.array:
    """int32 [n, depth]: the drafter's own proposals."""
    context = drafter.context(cache, rows.lengths, cache.runs_committed(committed))
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


def tokens_verified(plan: Plan, exact: bool) -> int:
    """Tokens of each row that a round puts through the target."""
    return EXACT_TOKENS if exact else plan.depth + 1


def _noise(rows: Rows, sampler: Sampler, plan: Plan, exact: bool) -> mx.array | None:
    """Of the tokens that a round may produce."""
    longest = max(tokens_verified(plan, exact), plan.shadow)
    return sampler.noise(rows.lengths[:, None] + mx.arange(1, longest + 1, dtype=mx.int32))


def run_round(
    target: Target,
    cache: SlotCache,
    rows: Rows,
    sampler: Sampler,
    drafts: Drafts,
    committed: Sequence[int],
    *,
    exact: bool = False,
) -> Outcome:
    """Build one round, the verify of its drafts; nothing is evaluated yet.

    Args:
        rows: state of the live rows.
        sampler: of the same rows in the same order.
        drafts: of the same rows.
        committed: the rows' committed lengths, as the host knows them.
        exact: an exact round; its depth is at most EXACT_DEPTH.
    """
    depth = drafts.plan.depth
    length = tokens_verified(drafts.plan, exact)
    span = cache.span(0, rows.lengths, length, committed, apart=exact)
    noise = _noise(rows, sampler, drafts.plan, exact) if drafts.noise is None else drafts.noise
    tokens, shadows = rows.tokens[:, None], []
    if drafts.tokens is not None:
        if depth:
            tokens = mx.concatenate([tokens, drafts.tokens], axis=1)
        else:
            shadows = [drafts.tokens]
    padding = [tokens[:, -1:]] * (length - depth - 1)
    hidden = target.forward(mx.concatenate([tokens, *padding], axis=1), cache, span)
    assert hidden is not None
    logits = target.logits(hidden, apart=exact)
    choices = _choose(sampler, logits, noise, exact)[:, : depth + 1]
    # A draft is kept while it and all before it equal the target's choice at its place.
    kept = (tokens[:, 1:] == choices[:, :-1]).astype(mx.int32)
    accepted = mx.cumprod(kept, axis=1).sum(axis=1, keepdims=True) if depth else tokens * 0
    after = Rows(
        mx.take_along_axis(choices, accepted, axis=1)[:, 0],
        rows.lengths + 1 + accepted[:, 0],
        mx.take_along_axis(hidden, accepted[:, :, None], axis=1),
    )
    return Outcome(after, mx.concatenate([choices, accepted, *shadows], axis=1))


def _choose(sampler: Sampler, logits: mx.array, noise: mx.array | None, exact: bool) -> mx.array:
    """int32 [n, L]: the target's choices; noise of L or more positions."""
    if noise is not None:
        noise = noise[:, : logits.shape[1]]
    if not exact:
        return sampler.choose(logits, noise)
    rows = [slice(row, row + 1) for row in range(logits.shape[0])]
    return mx.concatenate(
        [
            own.choose(logits[row], None if noise is None else noise[row])
            for own, row in zip(sampler.apart, rows, strict=True)
        ]
    )


def launch(what: Outcome | Drafts) -> None:
    """Have a round, or drafts, computed while the host goes on."""
    if isinstance(what, Outcome):
        mx.async_eval(what.packed, what.rows.tokens, what.rows.lengths, what.rows.hidden)
    elif what.tokens is not None:
        mx.async_eval(what.tokens)


def read(outcome: Outcome) -> list[list[int]]:
    """Bring a round's packed result to the host: the one host read of a round."""
    return cast("list[list[int]]", outcome.packed.tolist())
