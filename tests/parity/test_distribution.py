"""Sampled text follows the target's distribution, drafts or not: first tokens and pairs of them."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from chi_square import assert_fits
from mlx_lm.models import gemma4

from mlx_mtp.config_json import FULL, SLIDING
from mlx_mtp.decode.policy import Plan
from mlx_mtp.decode.round import Rows, propose, read, run_round
from mlx_mtp.decode.sampling import RowSampling, Sampler
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.drafter import AssistantModel, Drafter
from mlx_mtp.model.target import Target
from mlx_mtp.pair import DrafterConfig, TargetConfig

VOCABULARY = 9
ROWS, BATCHES = 1024, 20
PROMPT = [1, 5, 3, 8, 2, 2]
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def tiny() -> tuple[Target, Drafter]:
    """A random pair of a few hundred parameters."""
    mx.random.seed(4)
    config = TargetConfig.from_dict(
        TEXT | {"model_type": "gemma4_text", "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
    )
    model = gemma4.Model(gemma4.ModelArgs.from_dict(config.mlx_lm_config))
    drafter_config = DrafterConfig.from_dict(
        {
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": 16,
            "text_config": TEXT
            | {
                "model_type": "gemma4_text",
                "num_hidden_layers": 4,
                "layer_types": [SLIDING] * 3 + [FULL],
            },
        }
    )
    return Target(model, config), Drafter(AssistantModel(drafter_config), drafter_config)


def probabilities(logits: np.ndarray, row: RowSampling) -> np.ndarray:
    """softmax of the filtered logits, by sorting, in float64."""
    scaled = logits.astype(np.float64) / row.temperature
    order = np.argsort(-scaled)
    weights = np.exp(scaled - scaled.max())
    if row.top_k:
        weights[order[row.top_k :]] = 0
    mass = np.cumsum(weights[order]) / weights.sum()
    weights[order[int(np.sum(mass < row.top_p)) + 1 :]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("row", "depth"), [(RowSampling(1.0), 1), (RowSampling(0.8, 7, 0.97), 2), (RowSampling(1.0), 0)]
)
def test_first_tokens_and_pairs(tiny: tuple[Target, Drafter], row: RowSampling, depth: int) -> None:
    target, drafter = tiny
    # All rows hold the same prompt; one forward fills them, each then draws with its own seed.
    cache = SlotCache(target.config, ROWS, target.dtype)
    span = cache.span(0, mx.zeros((ROWS,), mx.int32), len(PROMPT), [0] * ROWS)
    hidden = target.forward(mx.array([PROMPT] * ROWS), cache, span, "last")
    assert hidden is not None
    logits = target.logits(hidden)
    lengths = mx.full((ROWS,), len(PROMPT), mx.int32)
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    accepted = 0
    for batch in range(BATCHES):
        seeds = range(batch * ROWS, (batch + 1) * ROWS)
        sampler = Sampler(
            [RowSampling(row.temperature, row.top_k, row.top_p, seed=seed) for seed in seeds],
            VOCABULARY,
        )
        first = sampler.choose(logits, sampler.noise(lengths[:, None]))[:, 0]
        rows = Rows(first, lengths, hidden)
        committed = [len(PROMPT)] * ROWS
        drafts = propose(target, drafter, cache, rows, sampler, Plan(depth), committed)
        blocks = read(run_round(target, cache, rows, sampler, drafts, committed))
        accepted += sum(block[-1] for block in blocks)
        np.add.at(pairs, (np.array(first), [block[0] for block in blocks]), 1)
    assert 0 < accepted < depth * ROWS * BATCHES or not depth

    first_expected = probabilities(np.array(logits)[0, 0], row)
    assert_fits(pairs.sum(1), first_expected)
    expected = np.zeros_like(pairs)
    for token in range(VOCABULARY):
        alone = SlotCache(target.config, 1, target.dtype)
        ids = [*PROMPT, token]
        span = alone.span(0, mx.array([0], mx.int32), len(ids), [0])
        after = target.forward(mx.array([ids]), alone, span, "last")
        assert after is not None
        expected[token] = first_expected[token] * probabilities(
            np.array(target.logits(after))[0, 0], row
        )
    cells = list(product(range(VOCABULARY), repeat=2))
    assert_fits(
        np.array([pairs[cell] for cell in cells]), np.array([expected[cell] for cell in cells])
    )
    assert pairs.sum() >= 20_000
