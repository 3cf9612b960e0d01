"""A drafter that is never right costs next to nothing: the controller stops asking it."""

from __future__ import annotations

import mlx.core as mx
from mlx.utils import tree_map
from pairs import PAIRS, load_golden

from mlx_mtp.decode.depth import DepthController
from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.request import Job
from mlx_mtp.loading import load
from mlx_mtp.types import RunStats


def test_a_random_drafter_is_left_alone() -> None:
    pair = PAIRS[2]  # dense: its drafter scores the whole vocabulary
    llm = load(pair / "target", dtype="float32")
    assert llm.drafter is not None
    mx.random.seed(1)
    model = llm.drafter.model
    model.update(tree_map(lambda a: mx.random.normal(a.shape, a.dtype), model.parameters()))
    job = Job(tuple(load_golden(pair).prompts[3]), 400)

    stats, controller = RunStats(), DepthController(llm.target.config.family)
    engine = Engine(llm.target, llm.drafter, controller, rows=1, stats=stats)
    engine.add(job)
    tokens: list[int] = []
    while len(tokens) < 50:
        tokens += engine.step()[0].token_ids
    rounds, rows, drafts = stats.rounds, stats.target_tokens, stats.drafter_forwards
    produced = len(tokens)
    while engine.has_work:
        tokens += engine.step()[0].token_ids
    rounds, rows = stats.rounds - rounds, stats.target_tokens - rows
    assert rows <= 1.01 * (len(tokens) - produced)
    assert stats.drafter_forwards - drafts <= 0.05 * rounds
    assert controller.parked

    plain = Engine(llm.target, None, controller, rows=1)
    plain.add(job)
    expected: list[int] = []
    while plain.has_work:
        expected += plain.step()[0].token_ids
    assert tokens == expected
