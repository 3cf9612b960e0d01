"""Target and drafter against golden data that transformers made (fp32)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from pairs import Golden, Loader, load_golden

from mlx_mtp.decode.policy import Plan
from mlx_mtp.decode.round import Rows, propose, read, run_round
from mlx_mtp.decode.sampling import RowSampling, Sampler
from mlx_mtp.llm import LLM
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.span import PREFILL_CHUNK, runs_of
from mlx_mtp.types import SamplingParams

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)


def prefill(llm: LLM, cache: SlotCache, row: int, ids: Sequence[int]) -> mx.array:
    """Put a prompt into a row; the post-norm hidden state of all its tokens [1, L, H]."""
    states = []
    for start in range(0, len(ids), PREFILL_CHUNK):
        part = ids[start : start + PREFILL_CHUNK]
        span = cache.span(row, mx.array([start], mx.int32), len(part), [start])
        states.append(llm.target.forward(mx.array([part]), cache, span))
    return mx.concatenate(states, axis=1)


def greedy(llm: LLM, rows: int) -> Sampler:
    return Sampler([RowSampling()] * rows, llm.target.config.vocab_size)


def start(llm: LLM, golden: Golden, index: int) -> tuple[SlotCache, Rows]:
    """One prompt, prefilled, with its bonus token."""
    ids = golden.prompts[index]
    cache = SlotCache(llm.target.config, 1, llm.target.dtype, len(ids) + 128)
    hidden = prefill(llm, cache, 0, ids)[:, -1:]
    first = mx.argmax(llm.target.logits(hidden), axis=-1)[:, 0].astype(mx.int32)
    return cache, Rows(first, mx.array([len(ids)], mx.int32), hidden)


def test_target_logits_and_hidden(pair: Path, load_pair: Loader) -> None:
    llm, golden = load_pair(pair), load_golden(pair)
    lengths = []
    for index, ids in enumerate(golden.prompts):
        expected = golden.array("target_logits", index)
        if expected is None:
            continue
        cache = SlotCache(llm.target.config, 1, llm.target.dtype)
        hidden = prefill(llm, cache, 0, ids)
        logits = np.array(llm.target.logits(hidden))[0]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
        hidden_expected = golden.array("target_hidden", index)
        np.testing.assert_allclose(np.array(hidden)[0], hidden_expected, rtol=0, atol=TOLERANCE)
        lengths.append(len(ids))
    assert min(lengths) < golden.window < max(lengths)


def test_logits_along_the_greedy_text(pair: Path, load_pair: Loader) -> None:
    llm, golden = load_pair(pair), load_golden(pair)
    for index, ids in enumerate(golden.prompts):
        expected = golden.array("seq_logits", index)
        if expected is None:
            continue
        cache = SlotCache(llm.target.config, 1, llm.target.dtype)
        hidden = prefill(llm, cache, 0, ids + golden.rows[index].plain[:-1])
        logits = np.array(llm.target.logits(hidden))[0, len(ids) - 1 :]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def test_first_block_of_drafts(pair: Path, load_pair: Loader) -> None:
    llm, golden = load_pair(pair), load_golden(pair)
    assert llm.drafter is not None
    for index, row in enumerate(golden.rows):
        cache, rows = start(llm, golden, index)
        runs = runs_of([row.plen], 1, cache.ring)
        context = llm.drafter.context(cache, rows.lengths, runs)
        drafts = propose(
            llm.target, llm.drafter, cache, rows, greedy(llm, 1), Plan(golden.k), [row.plen]
        ).tokens
        assert drafts is not None
        assert tuple(drafts[0].tolist()) == row.ref_rounds[0].draft
        logits_expected = golden.array("draft_logits", index)
        hidden_expected = golden.array("draft_hidden", index)
        if logits_expected is None or hidden_expected is None:
            continue
        # Each step from the golden state before it: a step's error is not fed into the next.
        token, hidden = rows.tokens[:, None], rows.hidden
        for step in range(golden.k):
            h, after = llm.drafter.step(llm.target.embed(token), hidden, context)
            scores = llm.drafter.logits(h)
            ids = np.arange(scores.values.shape[-1]) if scores.ids is None else scores.ids[0]
            for actual, expected in (
                (np.array(after)[0, 0], hidden_expected[step]),
                (np.array(scores.values)[0], logits_expected[step][np.array(ids)]),
            ):
                np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
            token = drafts[:, step : step + 1]
            hidden = mx.array(hidden_expected[step])[None, None]


def test_rounds_equal_the_cache_free_reference(pair: Path, load_pair: Loader) -> None:
    """Drafts and accepted counts, round by round, of a loop that recomputes everything."""
    llm, golden = load_pair(pair), load_golden(pair)
    for index, row in enumerate(golden.rows):
        cache, rows = start(llm, golden, index)
        committed, text = row.plen, [int(rows.tokens.item())]
        for expected in row.ref_rounds:
            assert committed == expected.committed
            sampler, plan = greedy(llm, 1), Plan(golden.k)
            drafts = propose(llm.target, llm.drafter, cache, rows, sampler, plan, [committed])
            assert drafts.tokens is not None
            assert tuple(drafts.tokens[0].tolist()) == expected.draft
            outcome = run_round(llm.target, cache, rows, sampler, drafts, [committed])
            (block,) = read(outcome)
            assert block[-1] == expected.accepted
            text += block[: block[-1] + 1]
            committed += block[-1] + 1
            rows = outcome.rows
        assert tuple(text[:64]) == row.ref[:64] == row.plain


@pytest.mark.parametrize("depth", [0, 4])
def test_greedy_ids_equal_transformers(pair: Path, load_pair: Loader, depth: int) -> None:
    llm, golden = load_pair(pair), load_golden(pair)
    results = llm.generate_ids(golden.prompts, GREEDY, draft_depth=depth)
    for result, row in zip(results, golden.rows, strict=True):
        assert tuple(result.token_ids) == row.plain
        assert result.finish_reason == "length"


def test_some_drafts_are_accepted_and_some_are_not(pair: Path, load_pair: Loader) -> None:
    llm, golden = load_pair(pair), load_golden(pair)
    results = llm.generate_ids(golden.prompts, GREEDY, draft_depth=golden.k)
    accepted = sum(result.stats.accepted for result in results)
    assert 0 < accepted < sum(result.stats.drafted for result in results)
