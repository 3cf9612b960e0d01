"""How fast this machine runs a target's experts, by strategy and by tokens. Owns: the timing, and
which strategy it speaks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from math import exp, log
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mtp.model.experts import ExpertStrategy, distinct_in, run_glu, stack, unstack
from mlx_mtp.model.target import Target

TOKENS = (1, 2, 3, 5, 8, 16, 24, 40)
"""Token rows of one forward that are timed: rows * (depth + 1)."""
TIMED_LAYERS = 4
"""Layers that take turns, so that a layer's experts are not in cache from the run before."""
LEAST_GAIN = 0.99
"""A strategy is taken where it needs at most this share of the other's time."""

NEVER = ExpertStrategy().sort_from


class ExpertTiming(NamedTuple):
    """One layer's experts on some tokens.

    Attributes:
        tokens: token rows.
        pairs: (token, expert) pairs.
        distinct: experts that they are routed to; a mean over the layers.
        seconds: of one layer by strategy, a median. From mlx-lm's own 64 pairs on all are sorted,
            and those that differ in nothing else share one time.
    """

    tokens: int
    pairs: int
    distinct: float
    seconds: dict[ExpertStrategy, float]


def time_experts(
    target: Target, tokens: Sequence[int] = TOKENS, repeat: int = 7
) -> list[ExpertTiming]:
    """Time all strategies on random tokens; empty for a target without experts. Takes memory for
    a second copy of gate and up of TIMED_LAYERS layers."""
    layers = [layer for layer in target.body.layers if layer.enable_moe][:TIMED_LAYERS]
    if not layers:
        return []
    apart = [_changed(layer.experts.switch_glu, unstack) for layer in layers]
    stacked = [_changed(layer.experts.switch_glu, stack) for layer in layers]
    wide = apart[0].down_proj.weight.dtype if "scales" not in apart[0].down_proj else target.dtype
    timings = []
    for count in tokens:
        key = mx.random.key(count)
        hidden = mx.random.normal((1, count, target.config.hidden_size), key=key).astype(wide)
        routed = [layer.router(hidden)[0] for layer in layers]
        mx.eval(hidden, routed)
        distinct = fmean(map(distinct_in, routed))
        pairs = int(routed[0].size)
        seconds = {}
        for is_stacked, glus in ((False, apart), (True, stacked)):
            starts = (0,) if pairs >= NEVER else (0, NEVER)
            for start in starts:
                took = _median_seconds(_runner(glus, hidden, routed, start), repeat)
                seconds[ExpertStrategy(start, is_stacked)] = took / len(layers)
        timings.append(ExpertTiming(count, pairs, distinct, seconds))
    return timings


def best_strategy(timings: Sequence[ExpertTiming]) -> ExpertStrategy:
    """What these times speak for; mlx-lm's own way where nothing is clearly faster."""
    if not timings:
        return ExpertStrategy()
    ratios = [
        log(_fastest(timing, stacked=True) / _fastest(timing, stacked=False)) for timing in timings
    ]
    stacked = exp(fmean(ratios)) <= LEAST_GAIN
    start = NEVER
    for timing in sorted(timings, key=lambda timing: -timing.pairs):
        unsorted = timing.seconds.get(ExpertStrategy(NEVER, stacked))
        if unsorted is None:
            continue
        if timing.seconds[ExpertStrategy(0, stacked)] > LEAST_GAIN * unsorted:
            break
        start = timing.pairs
    return ExpertStrategy(start, stacked)


def _fastest(timing: ExpertTiming, *, stacked: bool) -> float:
    return min(took for how, took in timing.seconds.items() if how.stacked == stacked)


def _changed(glu: Any, change: Callable[[Any], None]) -> Any:
    """A SwitchGLU stacked or not; the original stays as it is."""
    twin = copy(glu)
    change(twin)
    return twin


def _runner(
    glus: Sequence[Any], hidden: mx.array, routed: Sequence[mx.array], start: int
) -> Callable[[], None]:
    def run() -> None:
        mx.eval(
            [
                run_glu(glu, hidden, indices, start)
                for glu, indices in zip(glus, routed, strict=True)
            ]
        )

    return run


def _median_seconds(run: Callable[[], None], repeat: int) -> float:
    run()
    times = []
    for _ in range(repeat):
        began = perf_counter()
        run()
        times.append(perf_counter() - began)
    return median(times)
