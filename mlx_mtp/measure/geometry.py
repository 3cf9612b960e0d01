"""The same positions through the target in several ways. Owns: putting an answer through it step by
step, in blocks or beside other rows, and how far the logits then lie apart.

How many token rows a forward has, its geometry, decides which kernels compute it. Where those round
differently, the logits of a position differ, and where two tokens are nearly tied the other one may
be chosen. `measure_noise` says by how much that can be:

    spread(G)  differences of logits between plain steps and geometry G
    shaken     differences between plain steps and plain steps over embeddings of which each number
               is changed by its last bit: what rounding at one place grows to in this model
    rounding   min(largest spread, CAP * largest shaken)

over many positions, and at each the largest one among the TOP best tokens, since no other can be
nearly tied with the best. `shaken` shares no code of blocks or rows with the rest, so a fault in
those (a wrong mask, a wrong position) makes the spread large, but not the rounding that is
believed. Spreads beyond CAP times shaken are no rounding, neither the largest nor the typical one:
that is a median, because an expert that is routed otherwise moves a few positions far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, cast

import mlx.core as mx

from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.span import PREFILL_CHUNK, SPARE_SLOTS
from mlx_mtp.model.target import Target

TOP = 8
"""Best tokens of a position whose logits are compared."""
CAP = 4.0
"""How far a geometry's logits may lie from plain steps', in what a changed last bit grows to."""


class Geometry(NamedTuple):
    """Token rows of one forward: rows of a batch, tokens of each."""

    rows: int
    length: int

    def __str__(self) -> str:
        tokens = "a plain step" if self.length == 1 else f"a block of {self.length} tokens"
        return tokens if self.rows == 1 else f"{tokens} in {self.rows} rows"


PLAIN = Geometry(1, 1)


class Shaken(Target):
    """The same target, each number of its embeddings off by about its last bit.

    With fp32 it is what the rounding of a sum of as many terms as the model is wide comes to; on a
    GPU it is TF32's last bit, as matrix units may compute with that.
    """

    def __init__(self, target: Target, seed: int) -> None:
        self.__dict__.update(target.__dict__)
        self._seed = seed
        self._forwards = 0
        self._grain = float(mx.finfo(target.dtype).eps)
        if target.dtype == mx.float32:
            on_gpu = mx.default_device().type == mx.DeviceType.gpu
            self._grain *= 2.0**13 if on_gpu else target.config.hidden_size**0.5

    def embed(self, tokens: mx.array) -> mx.array:
        embedded = super().embed(tokens)
        self._forwards += 1
        key = mx.array([self._seed, self._forwards], mx.uint32)
        sign = 2.0 * mx.random.bernoulli(0.5, embedded.shape, key=key) - 1.0
        return (embedded.astype(mx.float32) * (1 + self._grain * sign)).astype(embedded.dtype)


def retrace(
    target: Target, prompt: Sequence[int], answer: Sequence[int], geometry: Geometry = PLAIN
) -> Iterator[mx.array]:
    """The logits [vocabulary] that each token of an answer is chosen from, in order.

    The prompt is prefilled alone, in every geometry. With several rows all of them hold the same;
    what the last one gets is given.

    Args:
        target: computed with, and locked meanwhile; nothing of it changes.
        prompt, answer: token ids.
        geometry: of the forwards over the answer.
    """
    rows, length = geometry
    slots = len(prompt) + len(answer) + length + SPARE_SLOTS
    cache = SlotCache(target.config, rows, target.dtype, slots)
    yield _prefill(target, prompt, cache)
    for start in range(0, len(answer) - 1, length):
        tokens = [*answer[start : start + length]]
        counted = min(length, len(answer) - 1 - start)
        tokens += [0] * (length - len(tokens))
        committed = len(prompt) + start
        with target.lock:
            starts = mx.full((rows,), committed, mx.int32)
            span = cache.span(0, starts, length, [committed] * rows)
            hidden = target.forward(mx.array([tokens] * rows), cache, span)
            assert hidden is not None
            logits = target.logits(hidden)[-1]
            mx.eval(logits, cache.keys, cache.values)
        for place in range(counted):
            yield logits[place]


def _prefill(target: Target, prompt: Sequence[int], cache: SlotCache) -> mx.array:
    """The prompt's K/V into all rows; the logits of what follows it."""
    logits = mx.array([])
    with target.lock:
        for start in range(0, len(prompt), PREFILL_CHUNK):
            part = list(prompt[start : start + PREFILL_CHUNK])
            is_last = start + len(part) == len(prompt)
            span = cache.span(0, mx.array([start], mx.int32), len(part), [start])
            hidden = target.forward(mx.array([part]), cache, span, "last" if is_last else "none")
            if hidden is not None:
                logits = target.logits(hidden)[0, -1]
            mx.eval(logits, cache.keys, cache.values)
        for row in range(1, cache.rows):
            cache.move(0, row)
    return logits


def distance(one: mx.array, other: mx.array) -> float:
    """The largest difference of two positions' logits among those that either has on top."""
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    top = min(TOP, one.shape[0] - 1)
    best = mx.argpartition(-mx.maximum(one, other), kth=top)[:top]
    return cast("float", mx.abs(one[best] - other[best]).max().item())


class Spread(NamedTuple):
    """Distances over positions: their median and the largest."""

    typical: float
    largest: float

    def exceeds(self, other: Spread, times: float) -> bool:
        pairs = zip(self, other, strict=True)
        return any(mine > times * its for mine, its in pairs)


@dataclass(frozen=True)
class Noise:
    """How much rounding moves logits on this machine; see the module.

    Attributes:
        positions: compared.
        shaken: what a changed last bit of the embeddings grows to.
        spreads: by geometry, PLAIN left out.
    """

    positions: int
    shaken: Spread
    spreads: dict[Geometry, Spread]

    @property
    def largest(self) -> float:
        """The largest spread; 0 where all geometries gave the same bits."""
        return max((one.largest for one in self.spreads.values()), default=0.0)

    @property
    def rounding(self) -> float:
        """What is believed to be rounding."""
        return min(self.largest, CAP * self.shaken.largest)

    @property
    def excessive(self) -> list[Geometry]:
        """Geometries whose logits lie further from those of plain steps than rounding explains."""
        return [one for one, found in self.spreads.items() if found.exceeds(self.shaken, CAP)]


def measure_noise(
    target: Target,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    geometries: Sequence[Geometry],
) -> Noise:
    """Compare each geometry with plain steps.

    Args:
        texts: prompts and answers, at least one.
        geometries: others than PLAIN.
    """
    shaken: list[float] = []
    found: dict[Geometry, list[float]] = {geometry: [] for geometry in geometries}
    for seed, (prompt, answer) in enumerate(texts):
        plain = list(retrace(target, prompt, answer))
        shaken += map(distance, plain, retrace(Shaken(target, seed), prompt, answer))
        for geometry in geometries:
            found[geometry] += map(distance, plain, retrace(target, prompt, answer, geometry))
    spreads = {geometry: _spread(distances) for geometry, distances in found.items()}
    return Noise(len(shaken), _spread(shaken), spreads)


def _spread(distances: Sequence[float]) -> Spread:
    return Spread(median(distances), max(distances))
