"""Acceptance. Owns: the one rule that turns logits into tokens, for drafter and target alike.

    logits in fp32 -> suppressed tokens out -> / T -> top-k, top-p, min-p -> + gumbel -> argmax

At T = 0 it is the plain argmax. The noise is a fixed function of the request's seed and the
absolute position of the token to be produced, so a token depends on the target's logits and the
seed alone: the same with or without a drafter, at any depth, alone or in a batch. The drafter
chooses with the same noise, and a draft is kept while it equals the target's own choice (coupled
sampling, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

BLOCK = 1024
"""Logits per block in the first stage of top-k."""
LEAST_TOP_P = 1e-6
"""The best of 262,144 tokens has at least this probability: a smaller top_p keeps it alone too,
and would be lost in fp32."""
LEAST_TEMPERATURE = 1e-30
"""Below it logits / T leave fp32; it is greedy."""


@dataclass(frozen=True)
class RowSampling:
    """Resolved sampling parameters of one row; see types.SamplingParams for their meaning."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


class Sampler:
    """The rule for a fixed set of rows, with each row's own parameters.

    A row's tokens depend on its own parameters only. What no row asks for is not computed.

    Args:
        rows: their parameters.
        vocabulary: number of logits.
        suppress: token ids that are never produced.
    """

    def __init__(
        self, rows: Sequence[RowSampling], vocabulary: int, suppress: Sequence[int] = ()
    ) -> None:
        self.vocabulary = vocabulary
        self._rows, self._suppress = tuple(rows), tuple(suppress)
        self._suppressed: mx.array | None = None
        if suppress:
            banned = mx.zeros((vocabulary,), mx.float32)
            banned[mx.array(list(suppress))] = -mx.inf
            self._suppressed = banned
        warm = [row.temperature >= LEAST_TEMPERATURE for row in rows]
        sampled = [row for row, is_warm in zip(rows, warm, strict=True) if is_warm]
        self.any_sampled = bool(sampled)
        self._largest_k = max((min(row.top_k, vocabulary) for row in sampled), default=0)
        self._any_top_p = any(row.top_p < 1 and row.top_k for row in sampled)
        self._any_bare_top_p = any(row.top_p < 1 and not row.top_k for row in sampled)
        self._any_min_p = any(row.min_p > 0 for row in sampled)
        temperatures = [
            row.temperature if is_warm else 0.0 for row, is_warm in zip(rows, warm, strict=True)
        ]
        self._temperature = mx.array(temperatures, mx.float32)
        self._top_k = mx.array([min(row.top_k, vocabulary) for row in rows], mx.int32)
        self._top_p = mx.array([max(row.top_p, LEAST_TOP_P) for row in rows], mx.float32)
        self._min_p = mx.array([row.min_p for row in rows], mx.float32)
        self._seeds = mx.array([row.seed for row in rows], mx.uint32)

    @cached_property
    def apart(self) -> list[Sampler]:
        """One sampler per row: what it computes has the same shapes whoever its neighbours are."""
        return [Sampler([row], self.vocabulary, self._suppress) for row in self._rows]

    def noise(self, positions: mx.array) -> mx.array | None:
        """Gumbel noise for the tokens to be produced at these positions.

        Args:
            positions: int32 [rows, L], absolute.

        Returns:
            fp32 [rows, L, vocabulary], or None where all rows are greedy.
        """
        if not self.any_sampled:
            return None
        rows, length = positions.shape
        seeds = mx.broadcast_to(self._seeds[:, None], (rows, length))
        keys = mx.stack([seeds, positions.astype(mx.uint32)], axis=-1).reshape(-1, 2)
        draw = mx.vmap(lambda key: mx.random.gumbel((self.vocabulary,), key=key))
        return draw(keys).reshape(rows, length, self.vocabulary)

    def choose(
        self, logits: mx.array, noise: mx.array | None, ids: mx.array | None = None
    ) -> mx.array:
        """The token each row produces at each of its positions.

        Args:
            logits: [rows, L, C], C the vocabulary or the candidates in ids.
            noise: of the same positions, from `noise`.
            ids: int32 [rows, L, C], the candidates' tokens; ties go to the lowest id.

        Returns:
            int32 [rows, L]
        """
        logits = logits.astype(mx.float32)
        if self._suppressed is not None:
            logits = logits + (self._suppressed if ids is None else self._suppressed[ids])
        best = _best(logits, ids, self.vocabulary)
        if noise is None:
            return best
        if ids is not None:
            noise = mx.take_along_axis(noise, ids, axis=-1)
        temperature = self._temperature[:, None, None]
        scaled = logits / mx.where(temperature > 0, temperature, 1.0)
        kept = scaled >= self._threshold(scaled)
        sampled = _best(mx.where(kept, scaled + noise, -mx.inf), ids, self.vocabulary)
        return mx.where(temperature[..., 0] > 0, sampled, best)

    def _threshold(self, scaled: mx.array) -> mx.array:
        """[rows, L, 1]: the lowest logit that top-k, top-p and min-p let through."""
        top = scaled.max(-1, keepdims=True)
        threshold = mx.full((*scaled.shape[:2], 1), -mx.inf)
        if self._largest_k:
            k = mx.minimum(self._top_k, scaled.shape[-1])[:, None, None]
            ranked = largest(scaled, self._largest_k)
            last = mx.broadcast_to(mx.maximum(k - 1, 0), threshold.shape)
            kth = mx.where(k > 0, mx.take_along_axis(ranked, last, axis=-1), -mx.inf)
            threshold = kth
            if self._any_top_p:
                # Ties at the k-th logit beyond rank k count in the mass but not in the ranks;
                # where the nucleus reaches into them its threshold is the k-th logit all the same.
                mass = mx.where(scaled >= kth, mx.exp(scaled - top), 0.0).sum(-1, keepdims=True)
                reached = mx.cumsum(mx.exp(ranked - top), axis=-1)
                enough = self._top_p[:, None, None] * mass
                short = mx.sum(reached < enough, axis=-1, keepdims=True)
                nucleus = mx.take_along_axis(ranked, mx.minimum(short, last), axis=-1)
                wanted = (self._top_p < 1)[:, None, None] & (k > 0)
                threshold = mx.where(wanted, nucleus, threshold)
        if self._any_bare_top_p:
            wanted = ((self._top_p < 1) & (self._top_k == 0))[:, None, None]
            nucleus = nucleus_threshold(scaled, self._top_p[:, None, None])
            threshold = mx.where(wanted, nucleus, threshold)
        if self._any_min_p:
            floor = top + mx.log(self._min_p)[:, None, None]  # log(0) = -inf lets all through
            threshold = mx.maximum(threshold, floor)
        return threshold


def _best(values: mx.array, ids: mx.array | None, vocabulary: int) -> mx.array:
    """The token of the largest value along the last axis; the lowest one where several tie."""
    if ids is None:
        return mx.argmax(values, axis=-1).astype(mx.int32)
    tied = values == values.max(-1, keepdims=True)
    return mx.where(tied, ids, vocabulary).min(-1)


def largest(values: mx.array, k: int) -> mx.array:
    """The k largest values of the last axis in descending order, exact, without a full sort.

    First the k best of each block, then the best of those: every one of the k largest is among
    its own block's k largest.

    Args:
        values: fp32 [..., C]
        k: at least 1; fewer than k values are padded with -inf.
    """
    shape, count = values.shape[:-1], values.shape[-1]
    if count > 2 * BLOCK and 2 * k < BLOCK:
        blocks = -(-count // BLOCK)
        short = blocks * BLOCK - count
        if short:
            fill = mx.full((*shape, short), -mx.inf, values.dtype)
            values = mx.concatenate([values, fill], axis=-1)
        values = mx.topk(values.reshape(*shape, blocks, BLOCK), k, axis=-1)
        values = values.reshape(*shape, blocks * k)
    elif count < k:
        fill = mx.full((*shape, k - count), -mx.inf, values.dtype)
        values = mx.concatenate([values, fill], axis=-1)
    return -mx.sort(-mx.topk(values, k, axis=-1), axis=-1)


def nucleus_threshold(scaled: mx.array, top_p: mx.array) -> mx.array:
    """The largest value whose tail (all values >= it) holds top_p of the probability; no sort.

    Bisection over the 32 bits of the values in an order-preserving integer form, so that the
    answer is exact. A sum of the same non-negative terms never falls when terms are added, so the
    predicate is monotone in floating point too.

    Args:
        scaled: fp32 [rows, L, C]
        top_p: fp32 [rows, 1, 1]

    Returns:
        fp32 [rows, L, 1]
    """
    scaled = scaled + 0.0  # -0.0 and 0.0 are one value
    weights = mx.exp(scaled - scaled.max(-1, keepdims=True))
    enough = top_p * weights.sum(-1, keepdims=True)
    bits = scaled.view(mx.uint32)
    sign = mx.array(1 << 31, mx.uint32)
    ordered = mx.where(bits >= sign, ~bits, bits | sign)
    found = mx.zeros_like(enough).astype(mx.uint32)
    for bit in range(31, -1, -1):
        trial = found | mx.array(1 << bit, mx.uint32)
        tail = mx.where(ordered >= trial, weights, 0.0).sum(-1, keepdims=True)
        found = mx.where(tail >= enough, trial, found)
    back = mx.where(found >= sign, found ^ sign, ~found)
    return back.view(mx.float32)
