"""What `mlx-mtp verify` is built of: the near-tie rule, geometries, the kernel probe."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from pairs import Loader, load_golden

from mlx_mtp.decode.sampling import RowSampling, Sampler
from mlx_mtp.measure.geometry import PLAIN, Geometry, Noise, Spread, measure_noise, retrace
from mlx_mtp.measure.judge import first_difference
from mlx_mtp.measure.probe import COUNTS, last_places, probe
from mlx_mtp.measure.prompts import BenchPrompt, PromptSet
from mlx_mtp.measure.scores import Scores
from mlx_mtp.measure.verify import Way, chosen_prompts

VOCABULARY = 50
SAMPLINGS = [
    RowSampling(),
    RowSampling(1.0, seed=1),
    RowSampling(0.7, top_k=5, seed=2),
    RowSampling(1.5, top_p=0.8, seed=3),
    RowSampling(1.0, top_k=8, top_p=0.9, seed=4),
    RowSampling(2.0, min_p=0.2, seed=5),
    RowSampling(1.0, top_k=20, top_p=0.7, min_p=0.05, seed=6),
]


# The near-tie rule


def choose(logits: mx.array, sampling: RowSampling, position: int) -> int:
    sampler = Sampler([sampling], logits.shape[0])
    noise = sampler.noise(mx.array([[position]], mx.int32))
    return int(sampler.choose(logits[None, None], noise).item())


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_whatever_noise_makes_the_choice_is_near(sampling: RowSampling) -> None:
    """No choice of logits that are wrong by up to `wrong` is called a fault, filters included."""
    rng, wrong, others = np.random.default_rng(0), 0.3, 0
    for position in range(60):
        logits = mx.array(rng.normal(0, 1.5, VOCABULARY).astype(np.float32))
        scores, own = Scores(logits, sampling, position), choose(logits, sampling, position)
        assert scores.could_choose(own, 0.0, 2.0)
        for _ in range(4):
            moved = logits + mx.array(rng.uniform(-wrong, wrong, VOCABULARY).astype(np.float32))
            other = choose(moved, sampling, position)
            others += other != own
            assert scores.could_choose(other, wrong, 2.0)
    assert others  # or else this shows nothing


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_without_noise_there_is_one_choice(sampling: RowSampling) -> None:
    rng = np.random.default_rng(1)
    for position in range(20):
        logits = mx.array(rng.normal(0, 3, VOCABULARY).astype(np.float32))
        scores = Scores(logits, sampling, position)
        possible = [token for token in range(VOCABULARY) if scores.could_choose(token, 0.0, 2.0)]
        assert possible == [choose(logits, sampling, position)]


def test_a_token_far_behind_is_no_near_tie() -> None:
    logits = mx.array([5.0, 4.8, 4.0, 0.0])
    scores = Scores(logits, RowSampling(), 3)
    near = [token for token in range(4) if scores.could_choose(token, 0.1, 2.0)]
    assert near == [0, 1]
    assert scores.gap(0, 2) == 1.0


def test_where_the_nucleus_just_closes_the_next_token_is_near() -> None:
    """0.8005 of 0.8 is reached by the best token; were it 0.7995, another one would be in."""
    logits = mx.log(mx.array([0.8005, 0.15, 0.0495]))
    seed = next(n for n in range(99) if choose(logits, RowSampling(1.0, seed=n), 3) == 1)
    found = []
    for top_p in (0.8, 0.6):
        scores = Scores(logits, RowSampling(1.0, top_p=top_p, seed=seed), 3)
        found.append([scores.could_choose(1, noise, 2.0) for noise in (0.0, 0.01)])
    assert found == [[False, True], [False, False]]


def test_suppressed_tokens_are_never_near() -> None:
    scores = Scores(mx.array([5.0, 4.9, 4.9]), RowSampling(), 3, suppress=[1])
    assert [scores.could_choose(token, 0.1, 2.0) for token in range(3)] == [True, False, True]


def test_the_first_difference_may_be_an_end() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [1]) == 0


# Geometries


def test_all_geometries_give_the_plain_logits(pair: Path, load_pair: Loader) -> None:
    """What is retraced is what plain decoding chose from, in every geometry (on a CPU)."""
    llm, golden = load_pair(pair), load_golden(pair)
    prompt, answer = golden.prompts[2], golden.rows[2].plain[:13]
    plain = [np.array(logits) for logits in retrace(llm.target, prompt, answer)]
    assert tuple(int(logits.argmax()) for logits in plain) == answer
    for geometry in (Geometry(1, 5), Geometry(3, 1), Geometry(2, 4)):
        found = [np.array(logits) for logits in retrace(llm.target, prompt, answer, geometry)]
        assert np.array_equal(plain, found), geometry


def test_noise_is_none_on_a_cpu_but_last_bits_matter(pair: Path, load_pair: Loader) -> None:
    llm, golden = load_pair(pair, "bfloat16"), load_golden(pair)
    text = golden.prompts[2], golden.rows[2].plain[:9]
    noise = measure_noise(llm.target, [text], [Geometry(1, 4), Geometry(2, 1)])
    assert noise.positions == 9
    assert noise.largest == noise.rounding == 0
    assert noise.excessive == []
    assert 0 < noise.shaken.typical <= noise.shaken.largest < 5


def test_what_rounding_does_not_explain_is_not_believed() -> None:
    usual, far, often = Geometry(1, 2), Geometry(1, 5), Geometry(4, 1)
    spreads = {usual: Spread(0.1, 0.9), far: Spread(0.1, 9.0), often: Spread(0.9, 0.9)}
    noise = Noise(100, Spread(0.2, 0.5), spreads)
    assert noise.excessive == [far, often]
    assert noise.rounding == 2.0


def test_a_way_knows_its_geometry_and_reference() -> None:
    assert Way(1, 0).geometry == PLAIN
    assert Way(4, 3).geometry == Geometry(4, 4)
    assert Way(4, "auto").geometry == Geometry(4, 8)
    assert Way(4, 3, exact=True).reference == Way(1, 0, exact=True)


# The probe


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_are_equal_on_a_cpu(pair: Path, load_pair: Loader, dtype: str) -> None:
    llm, golden = load_pair(pair, dtype), load_golden(pair)
    found = probe(llm.target, golden.prompts[6])
    assert [one for one in found if not one.is_equal] == []
    names = {one.name for one in found}
    config = llm.target.config
    assert {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "head"} < names
    assert {"attention, sliding", "attention, full", "rms_norm"} < names
    assert ("per_layer_proj" in names) == bool(config.hidden_size_per_layer_input)
    assert ("experts" in names) == any(layer.enable_moe for layer in llm.target.body.layers)


def test_the_probe_sees_one_last_bit(
    load_pair: Loader, monkeypatch: pytest.MonkeyPatch, pair: Path
) -> None:
    """From five token rows on one number of a linear is a last place higher: nothing else is."""
    llm, golden, real = load_pair(pair), load_golden(pair), nn.Linear.__call__

    def call(self: nn.Linear, x: mx.array) -> mx.array:
        out = real(self, x)
        if self is not llm.target.body.layers[0].mlp.down_proj or x.size // x.shape[-1] < 5:
            return out
        bumped = out + mx.abs(out) * float(mx.finfo(out.dtype).eps)
        return mx.where(mx.arange(out.shape[-1]) == 3, bumped, out)

    monkeypatch.setattr(nn.Linear, "__call__", call)
    found = probe(llm.target, golden.prompts[6])
    (differing,) = [one for one in found if not one.is_equal]
    assert differing.name == "down_proj"
    for places in (differing.tokens, differing.rows):
        assert [count for count in COUNTS if places[count]] == [5, 8]
    assert 0 < differing.worst <= 2


def test_last_places_are_those_of_the_larger_number() -> None:
    one = mx.array([[[1.0, 1.0, 0.0]]])
    assert last_places(one, one) == 0
    assert last_places(one, one + mx.array([0, 2**-23, 0])) == 1
    assert last_places(2 * one, 2 * one + mx.array([0, 2**-22, 0])) == 1
    # Where terms cancelled, the token's typical size counts.
    assert last_places(one, one + mx.array([0, 0, 2**-40])) < 0.001
    half = one.astype(mx.bfloat16)
    assert last_places(half, half + mx.array([0, 2**-7, 0], mx.bfloat16)) == 1


# Prompts


def test_built_in_prompts_have_long_ones_among_them() -> None:
    short = tuple(BenchPrompt(f"kind {n % 5}", f"Prompt {n}.") for n in range(20))
    chosen = chosen_prompts(PromptSet(short, 10, "general"), 24)
    long = [prompt for prompt in chosen if prompt.kind == "long"]
    assert len(chosen) == len(set(chosen)) == 24
    assert len(long) == 4
    assert long[0].text.splitlines() == [prompt.text for prompt in short]
    assert set(short) < set(chosen)
    assert chosen_prompts(PromptSet(short, 10, "general"), 4) == chosen[:4]
