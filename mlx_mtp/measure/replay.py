"""Drafts with an acceptance that was asked for. Owns: the scripts that replay a target's own text.

A script is what a drafter would have to propose for its drafts to be kept with given chances: the
target's own next tokens, spoiled now and then. A spoiled draft is another token than the target's,
so it is rejected by the same comparison as a drafter's would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import mlx.core as mx

from mlx_mtp.errors import UsageError
from mlx_mtp.types import MAX_DEPTH


def parse_acceptance(text: str) -> tuple[float, ...]:
    """``.9,.8,.7`` as the chances that draft 1, 2, ... is kept given those before it were.

    Raises UsageError.
    """
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or len(shares) > MAX_DEPTH or not all(0 <= share <= 1 for share in shares):
        raise UsageError(
            f"The acceptance to replay is {text!r}.",
            f"Give up to {MAX_DEPTH} numbers from 0 to 1, for example .9,.8,.7.",
        )
    return shares


def write_script(
    token_ids: Sequence[int], acceptance: Sequence[float], vocabulary: int, seed: str
) -> list[list[int]]:
    """Drafts for one answer: line t is what to draft after its token t, MAX_DEPTH tokens.

    Each draft is right with its position's chance and else another token. The same for the same
    seed, and at all depths: a round of depth 2 gets the first two drafts of one of depth 7.

    Args:
        token_ids: what the target writes, MAX_DEPTH tokens beyond the answer's end if there are.
        acceptance: by position, the last value repeated.
        vocabulary: number of token ids.
        seed: of the chances.
    """
    rng = Random(seed)
    chances = [acceptance[min(place, len(acceptance) - 1)] for place in range(MAX_DEPTH)]
    lines = []
    for start in range(len(token_ids)):
        following = token_ids[start + 1 : start + 1 + MAX_DEPTH]
        right = [*following, *[0] * (MAX_DEPTH - len(following))]
        lines.append(
            [
                token if rng.random() < chance else (token + 1) % vocabulary
                for token, chance in zip(right, chances, strict=True)
            ]
        )
    return lines


def as_array(script: Sequence[Sequence[int]]) -> mx.array:
    """A script as decode.request.Job takes it."""
    return mx.array([list(line) for line in script], mx.int32)
