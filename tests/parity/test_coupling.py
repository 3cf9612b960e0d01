"""Drafter and target draw with the same noise: a draft takes that of the place it would have."""

from __future__ import annotations

from pathlib import Path

from pairs import Loader, load_golden
from test_golden import start

from mlx_mtp.decode.policy import Plan
from mlx_mtp.decode.round import propose
from mlx_mtp.decode.sampling import RowSampling, Sampler

DEPTH = 4


def test_a_draft_takes_the_noise_of_its_own_position(pair: Path, load_pair: Loader) -> None:
    llm, golden = load_pair(pair), load_golden(pair)
    drafter = llm.drafter
    assert drafter is not None
    cache, rows = start(llm, golden, 0)
    committed = [golden.rows[0].plen]
    sampler = Sampler([RowSampling(3.0, seed=5)], llm.target.config.vocab_size)
    drafts = propose(llm.target, drafter, cache, rows, sampler, Plan(DEPTH), committed).tokens
    assert drafts is not None
    context = drafter.context(cache, rows.lengths, cache.runs_committed(committed))
    token, hidden = rows.tokens[:, None], rows.hidden
    for step in range(DEPTH):
        h, hidden = drafter.step(llm.target.embed(token), hidden, context)
        scores = drafter.logits(h)
        ids = None if scores.ids is None else scores.ids[:, None]
        # The bonus token stands at position `lengths`, the first draft behind it.
        noise = sampler.noise(rows.lengths[:, None] + 1 + step)
        token = sampler.choose(scores.values[:, None], noise, ids)
        assert token.item() == drafts[0, step].item()
