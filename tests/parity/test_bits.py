"""K/V and logits are bit-equal however a token came: prefill, verify, plain step, alone or not."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from pairs import Loader, load_golden

from mlx_mtp.llm import LLM
from mlx_mtp.model.cache import SlotCache

LENGTH = 268
"""More than one prefill chunk and more than one step of attended slots."""


def walk(
    llm: LLM, rows: list[list[int]], length: int, row: int, first_row: int = 0, held: int = 0
) -> list[np.ndarray]:
    """Feed rows of equal length, `length` tokens at a time; logits and K/V of one of them.

    Args:
        first_row: where the rows stand in the buffers.
        held: rows of the buffers; 0: just these.
    """
    target = llm.target
    cache = SlotCache(target.config, held or len(rows), target.dtype)
    logits = []
    for start in range(0, len(rows[0]), length):
        part = mx.array([ids[start : start + length] for ids in rows])
        starts = mx.full((len(rows),), start, mx.int32)
        span = cache.span(first_row, starts, part.shape[1], [start] * len(rows))
        out = target.logits(target.forward(part, cache, span))
        mx.eval(out, cache.keys, cache.values)
        logits.append(np.array(out[row].astype(mx.float32)))
    kept = [buffer[first_row + row, :, : len(rows[0])] for buffer in cache.keys + cache.values]
    return [np.concatenate(logits), *(np.array(part.astype(mx.float32)) for part in kept)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_how_a_token_came(pair: Path, load_pair: Loader, dtype: str) -> None:
    llm, golden = load_pair(pair, dtype), load_golden(pair)
    text = [token for prompt in golden.prompts for token in prompt]
    text = (text * (LENGTH // len(text) + 1))[:LENGTH]
    others = [text[::-1], text[50:] + text[:50]]
    plain = walk(llm, [text], 1, 0)
    ways = {
        "chunks of 7": walk(llm, [text], 7, 0),
        "chunks of 64": walk(llm, [text], 64, 0),
        "chunks of 256": walk(llm, [text], 256, 0),
        "a verify of 5 among 3 rows": walk(llm, [*others, text], 5, 2),
        "a verify of 8 in a larger buffer": walk(llm, [*others, text], 8, 2, first_row=1, held=5),
    }
    for name, got in ways.items():
        for expected, actual in zip(plain, got, strict=True):
            assert np.array_equal(expected, actual), name


def test_no_more_is_computed_for_the_last_token_than_it_needs(
    pair: Path, load_pair: Loader
) -> None:
    """A prompt's last hidden state and all K/V are the same bits with want "last" and "none"."""
    llm, golden = load_pair(pair), load_golden(pair)
    target, ids = llm.target, golden.prompts[6]
    whole = SlotCache(target.config, 1, target.dtype)
    span = whole.span(0, mx.array([0], mx.int32), len(ids), [0])
    hidden = target.forward(mx.array([ids]), whole, span)
    split = SlotCache(target.config, 1, target.dtype)
    half = len(ids) // 2
    span = split.span(0, mx.array([0], mx.int32), half, [0])
    assert target.forward(mx.array([ids[:half]]), split, span, "none") is None
    mx.eval(split.keys, split.values)
    span = split.span(0, mx.array([half], mx.int32), len(ids) - half, [half])
    last = target.forward(mx.array([ids[half:]]), split, span, "last")
    assert np.array_equal(np.array(hidden[:, -1:]), np.array(last))
    for one, other in zip(whole.keys + whole.values, split.keys + split.values, strict=True):
        assert np.array_equal(np.array(one), np.array(other))
