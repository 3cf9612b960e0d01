"""Converted pairs: what is quantized decodes, and drafting changes nothing there either."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from pairs import PAIRS, load_golden

from mlx_mtp.convert import Options, convert
from mlx_mtp.llm import LLM
from mlx_mtp.loading import load
from mlx_mtp.model.drafter import Drafter, _OrderedHead
from mlx_mtp.types import SamplingParams

RECIPES = {
    "4-bit": {"bits": 4, "group_size": 32},
    "8-bit": {"bits": 8, "group_size": 32},
    "mxfp4": {"bits": 4, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "mode": "nvfp4"},
}
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=24, temperature=1, top_k=64, top_p=0.95, seed=3, ignore_eos=True
)


def converted(pair: Path, out: Path, recipe: str) -> LLM:
    convert(pair / "target", out, Options(**RECIPES[recipe]), verify=False)  # type: ignore[arg-type]
    return load(out, dtype="float32")


FAMILIES_BY_DEFAULT = ("e2b", "moe")


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_drafting_equals_quantized_plain(pair: Path, tmp_path: Path, recipe: str) -> None:
    llm = converted(pair, tmp_path / "out", recipe)
    prompts = load_golden(pair).prompts[1:7:2]
    for params in (GREEDY, SAMPLED):
        plain = [r.token_ids for r in llm.generate_ids(prompts, params, draft_depth=0)]
        drafted = llm.generate_ids(prompts, params, draft_depth=4)
        assert [r.token_ids for r in drafted] == plain
        (alone,) = llm.generate_ids(prompts[1:2], params, draft_depth=2)
        assert alone.token_ids == plain[1]
        assert all(r.stats.drafted for r in drafted)


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_parts_are_quantized(tmp_path: Path, recipe: str) -> None:
    pair = next(path for path in PAIRS if path.name == "e2b")
    llm = converted(pair, tmp_path / "out", recipe)
    assert isinstance(llm.drafter, Drafter)
    quantized = [m for _, m in llm.drafter.model.named_modules() if hasattr(m, "scales")]
    assert len(quantized) > 10
    assert isinstance(llm.target.body.embed_tokens, nn.QuantizedEmbedding) or recipe == "nvfp4"


@pytest.mark.parametrize("mode", [None, *RECIPES])
def test_the_ordered_head_equals_the_whole_table(mode: str | None) -> None:
    """Block gathers score just what the dense tied head scores, bit for bit."""
    centroids, per, hidden = 8, 16, 64
    mx.random.seed(0)
    table: nn.Embedding = nn.Embedding(centroids * per, hidden)
    if mode is not None:
        recipe = {"group_size": None, "mode": "affine", **RECIPES[mode]}
        table = table.to_quantized(**recipe)
    ordering = mx.array(np.random.default_rng(0).permutation(centroids * per))
    head = _OrderedHead(table, ordering, centroids)
    h = mx.random.normal((3, 1, hidden))
    best = mx.array([[1, 7, 2], [0, 3, 4], [5, 6, 1]])
    scored = np.array(head(h, best)).reshape(3, -1)
    ids = np.array(head.tokens[best]).reshape(3, -1)
    dense = np.array(table.as_linear(h))[:, 0]
    assert np.array_equal(scored, np.take_along_axis(dense, ids, axis=-1))


def test_a_quantized_centroid_layer_loads(tmp_path: Path) -> None:
    """Conversions of others may quantize the centroids too."""
    pair = next(path for path in PAIRS if path.name == "e2b")
    llm = load(pair / "target", dtype="float32")
    assert llm.drafter is not None
    head = llm.drafter.model.masked_embedding
    head.centroids = head.centroids.to_quantized(group_size=32, bits=8)
    prompts = load_golden(pair).prompts[:3]
    plain = [r.token_ids for r in llm.generate_ids(prompts, GREEDY, draft_depth=0)]
    assert [r.token_ids for r in llm.generate_ids(prompts, GREEDY, draft_depth=3)] == plain
