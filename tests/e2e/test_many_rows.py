"""Many unequal requests through eight rows: each gets what it gets alone at depth 0."""

from __future__ import annotations

from random import Random

import pytest

from mlx_mtp import LLM, Request, Result, SamplingParams, load
from mlx_mtp.hub import BUNDLED

DEPTH = 3


@pytest.fixture(scope="module", params=sorted(BUNDLED))
def llm(request: pytest.FixtureRequest) -> LLM:
    return load(request.param)


def requests_of(llm: LLM, number: int, longest: int) -> list[Request]:
    """Prompts of 1..longest tokens that are no text, at temperatures 0 and 1, all with a seed."""
    rng = Random(7)
    found = []
    for name in range(number):
        length = rng.choice((rng.randint(1, 40), rng.randint(1, longest)))
        ids = [2, *(rng.randrange(20, llm.target.config.vocab_size) for _ in range(length - 1))]
        params = SamplingParams(
            temperature=rng.choice((0, 1)),
            top_k=rng.choice((0, 20, 64)),
            seed=rng.randrange(2**32),
            max_tokens=rng.choice((1, rng.randint(2, 12), rng.randint(2, 30))),
            ignore_eos=rng.random() < 0.5,
        )
        found.append(Request(token_ids=ids, params=params, id=str(name)))
    return found


@pytest.mark.parametrize(
    ("number", "longest"), [(12, 120), pytest.param(1000, 600, marks=pytest.mark.slow)]
)
def test_each_gets_what_it_gets_alone(llm: LLM, number: int, longest: int) -> None:
    requests = requests_of(llm, number, longest)
    plain = {r.id: r for r in llm.generate(requests, batch_size=1, draft_depth=0)}
    alone = {r.id: r for r in llm.generate(requests, batch_size=1, draft_depth=DEPTH)}
    for order in range(3 if number >= 1000 else 1):
        shuffled = Random(order).sample(requests, len(requests))
        llm.reset_run_stats()
        results: list[Result] = list(llm.as_completed(shuffled, draft_depth=DEPTH))
        assert sorted(r.id or "" for r in results) == sorted(plain)
        for result in results:
            assert result.token_ids == plain[result.id].token_ids
            assert result.finish_reason == plain[result.id].finish_reason
            assert result.stats.rounds == alone[result.id].stats.rounds
            assert result.stats.accepted == alone[result.id].stats.accepted
