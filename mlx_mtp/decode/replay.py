"""Drafts that were written down before. Owns: looking them up on the device, for the live rows.

They stand in for the drafter's own, to measure what a given acceptance would bring; the target
judges them like any others. Does not know how they were made.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_mtp.decode.request import Running
from mlx_mtp.types import MAX_DEPTH


class Replay:
    """The scripts of the live rows.

    Args:
        scripts: int32 [T, MAX_DEPTH] for each row: at [t], what to draft after the answer's token
            number t. Past the end its last line goes on.
        prompts: prompt tokens of each row.
    """

    def __init__(self, scripts: Sequence[mx.array], prompts: Sequence[int]) -> None:
        longest = max(script.shape[0] for script in scripts)
        padded = [mx.pad(s, [(0, longest - s.shape[0]), (0, 0)], mode="edge") for s in scripts]
        self._lines = mx.stack(padded)
        self._prompts = mx.array(list(prompts), mx.int32)

    def drafts(self, lengths: mx.array, depth: int, drafted: mx.array | None) -> mx.array:
        """What the scripts draft after each row's bonus token; stays on the device.

        Args:
            lengths: int32 [n], committed lengths; the bonus token stands at this position.
            depth: tokens to draft, 1..MAX_DEPTH.
            drafted: int32 [n, depth], the drafter's own proposals. They are thrown away, but
                computed before: a round costs what it costs with that drafter. None: no drafter.

        Returns:
            int32 [n, depth]
        """
        place = mx.clip(lengths - self._prompts, 0, self._lines.shape[1] - 1)
        index = mx.broadcast_to(place[:, None, None], (lengths.shape[0], 1, MAX_DEPTH))
        lines = mx.take_along_axis(self._lines, index, axis=1)[:, 0, :depth]
        return lines if drafted is None else mx.depends([lines], [drafted])[0]


def replay_of(rows: Sequence[Running]) -> Replay | None:
    """The scripts of live rows; None where they have none."""
    scripts = [row.job.script for row in rows if row.job.script is not None]
    return Replay(scripts, [len(row.job.token_ids) for row in rows]) if scripts else None
