"""However a layer's experts are run, the bits are the same; what they cost is counted."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from pairs import PAIRS, load_golden
from test_quantized import RECIPES, converted

from mlx_mtp.llm import LLM
from mlx_mtp.loading import load
from mlx_mtp.model.experts import Experts, ExpertStrategy, run_glu
from mlx_mtp.types import SamplingParams

PAIR = next(pair for pair in PAIRS if pair.name == "moe")
GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
STRATEGIES = [
    ExpertStrategy(start, stacked) for stacked in (False, True, False) for start in (0, 64, 999)
]


def moe_layers(llm: LLM) -> list[object]:
    return [layer for layer in llm.target.body.layers if layer.enable_moe]


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_all_strategies_give_the_bits_of_mlx_lm(tmp_path: Path, recipe: str | None) -> None:
    llm = load(PAIR / "target") if recipe is None else converted(PAIR, tmp_path / "out", recipe)
    layers = moe_layers(llm)
    assert layers
    hidden = [
        mx.random.normal((rows, length, llm.target.config.hidden_size), key=mx.random.key(length))
        for rows, length in ((1, 1), (1, 5), (3, 4), (8, 5), (8, 8))
    ]
    expected = []
    for layer in layers:
        for x in hidden:
            indices, weights = layer.router(x)  # type: ignore[attr-defined]
            normed = layer.pre_feedforward_layernorm_2(x)  # type: ignore[attr-defined]
            expected.append(layer.experts(normed, indices, weights))  # type: ignore[attr-defined]
    mx.eval(expected)
    for strategy in STRATEGIES:
        experts = Experts()
        experts.use(strategy, layers)
        stacked = ["gate_up_proj" in layer.experts.switch_glu for layer in layers]  # type: ignore[attr-defined]
        # A scale for a whole tensor cannot be shared by two.
        assert set(stacked) <= ({strategy.stacked} if recipe != "nvfp4" else {True, False})
        found = [experts(layer, x) for layer in layers for x in hidden]
        for one, other in zip(found, expected, strict=True):
            assert mx.array_equal(one, other)


def test_a_token_has_the_bits_it_has_alone(tmp_path: Path) -> None:
    """Whatever the strategy: plain decoding and verifies are computed alike."""
    llm = converted(PAIR, tmp_path / "out", "4-bit")
    glu = moe_layers(llm)[0].experts.switch_glu  # type: ignore[attr-defined]
    config = llm.target.config
    x = mx.random.normal((8, 5, config.hidden_size), key=mx.random.key(0))
    indices, _ = moe_layers(llm)[0].router(x)  # type: ignore[attr-defined]
    for start in (0, 999):
        together = run_glu(glu, x, indices, start)
        for row in range(8):
            for place in range(5):
                at = (slice(row, row + 1), slice(place, place + 1))
                assert mx.array_equal(run_glu(glu, x[at], indices[at], start), together[at])


def test_ids_do_not_depend_on_the_strategy() -> None:
    prompts = load_golden(PAIR).prompts[:5]
    ids = []
    for strategy in STRATEGIES[::-2]:
        llm = load(PAIR / "target")
        llm.target.experts.use(strategy, llm.target.body.layers)
        ids += [
            [r.token_ids for r in llm.generate_ids(prompts, GREEDY, draft_depth=depth)]
            for depth in (0, 3)
        ]
    assert all(each == ids[0] for each in ids)


def test_pairs_and_distinct_experts_are_counted() -> None:
    llm = load(PAIR / "target")
    layers = len(moe_layers(llm))
    router = moe_layers(llm)[0].router.config  # type: ignore[attr-defined]
    prompts = load_golden(PAIR).prompts[:4]
    llm.generate_ids(prompts, GREEDY, draft_depth=2)
    stats = llm.run_stats
    assert stats.expert_pairs == stats.target_tokens * router.top_k_experts * layers
    assert stats.distinct_experts == 0
    llm.reset_run_stats()
    llm.target.experts.count_distinct = True
    llm.generate_ids(prompts, GREEDY, draft_depth=2)
    stats = llm.run_stats
    # At least the experts of one token, at most all of them, in each layer of each round.
    assert stats.rounds * layers * router.top_k_experts < stats.distinct_experts
    assert stats.distinct_experts <= stats.rounds * layers * router.num_experts
    assert stats.distinct_experts <= stats.expert_pairs
