"""The acceptance rule: filters against a naive reference, the noise, and the distribution."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from chi_square import assert_fits
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.decode.sampling import RowSampling, Sampler, largest, nucleus_threshold

VOCABULARY = 40


def reference_kept(logits: np.ndarray, row: RowSampling) -> np.ndarray:
    """Which tokens the filters keep, by sorting in float64; ties at a threshold stay."""
    scaled = logits.astype(np.float64) / row.temperature
    kept = np.ones(len(scaled), bool)
    if row.top_k:
        kept &= scaled >= np.sort(scaled)[::-1][min(row.top_k, len(scaled)) - 1]
    weights = np.where(kept, np.exp(scaled - scaled.max()), 0)
    if row.top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        mass = np.cumsum(weights[order]) / weights.sum()
        reached = min(int(np.sum(mass < row.top_p)), len(scaled) - 1)
        kept &= scaled >= scaled[order[reached]]
    if row.min_p:
        kept &= np.exp(scaled - scaled.max()) >= row.min_p * (1 - 1e-6)
    return kept


def kept_by(sampler: Sampler, logits: np.ndarray) -> np.ndarray:
    """The tokens that can come out: those chosen when the noise favours each in turn."""
    count = logits.shape[-1]
    noise = mx.eye(count)[None] * 1e4
    tiled = mx.broadcast_to(mx.array(logits)[None, None], (1, count, count))
    chosen = np.array(sampler.choose(tiled, noise))[0]
    return chosen == np.arange(count)


row_parameters = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 20, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


@settings(deadline=None, max_examples=150)
@given(row=row_parameters, seed=st.integers(0, 2**31), ties=st.booleans())
def test_filters_keep_what_a_sort_keeps(row: RowSampling, seed: int, ties: bool) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, VOCABULARY).astype(np.float32)
    if ties:
        logits = np.round(logits * 2) / 2
    sampler = Sampler([row], VOCABULARY)
    assert kept_by(sampler, logits).tolist() == reference_kept(logits, row).tolist()


@settings(deadline=None, max_examples=30)
@given(
    rows=st.lists(row_parameters, min_size=2, max_size=5),
    seed=st.integers(0, 2**31),
    greedy=st.integers(0, 4),
)
def test_a_rows_choice_is_its_own(rows: list[RowSampling], seed: int, greedy: int) -> None:
    """Bit for bit the same token alone, whatever the neighbours ask for."""
    rng = np.random.default_rng(seed)
    rows = [*rows]
    rows[greedy % len(rows)] = RowSampling()
    rows = [RowSampling(r.temperature, r.top_k, r.top_p, r.min_p, i) for i, r in enumerate(rows)]
    logits = mx.array(rng.normal(0, 3, (len(rows), 2, VOCABULARY)).astype(np.float32))
    positions = mx.array(rng.integers(0, 1000, (len(rows), 2)).astype(np.int32))
    sampler = Sampler(rows, VOCABULARY)
    together = sampler.choose(logits, sampler.noise(positions)).tolist()
    for i, row in enumerate(rows):
        one = Sampler([row], VOCABULARY)
        noise = one.noise(positions[i : i + 1])
        assert one.choose(logits[i : i + 1], noise).tolist() == [together[i]]


def test_candidates_draw_the_noise_of_their_tokens() -> None:
    """A draft over candidate ids in any order chooses what the full vocabulary would."""
    rng = np.random.default_rng(0)
    rows = [RowSampling(1.0, 0, 1.0, 0.0, seed) for seed in range(4)] + [RowSampling()]
    sampler = Sampler(rows, VOCABULARY)
    logits = rng.normal(0, 2, (5, 1, VOCABULARY)).astype(np.float32)
    noise = sampler.noise(mx.arange(5, dtype=mx.int32)[:, None])
    ids = np.stack([rng.permutation(VOCABULARY) for _ in range(5)])[:, None].astype(np.int32)
    shuffled = np.take_along_axis(logits, ids, axis=-1)
    expected = sampler.choose(mx.array(logits), noise).tolist()
    assert sampler.choose(mx.array(shuffled), noise, mx.array(ids)).tolist() == expected


def test_ties_go_to_the_lowest_id() -> None:
    ids = mx.array([[[7, 3, 9, 5]]], mx.int32)
    values = mx.array([[[1.0, 2.0, 2.0, 2.0]]])
    assert Sampler([RowSampling()], 10).choose(values, None, ids).item() == 3


def test_suppressed_tokens_never_come_out() -> None:
    for row in (RowSampling(), RowSampling(1.0, seed=3)):
        sampler = Sampler([row], 6, suppress=[1, 4])
        noise = sampler.noise(mx.array([[0]], mx.int32))
        logits = mx.array([[[0.0, 90.0, 1.0, 2.0, 80.0, -1.0]]])
        assert sampler.choose(logits, noise).item() not in (1, 4)
        ids = mx.array([[[4, 3, 1]]], mx.int32)
        assert sampler.choose(mx.array([[[9.0, 1.0, 9.0]]]), noise, ids).item() == 3


def test_noise_is_a_function_of_seed_and_position() -> None:
    rows = [RowSampling(1.0, seed=seed) for seed in (5, 6, 2**32 - 1)]
    positions = mx.array([[3, 4], [4, 5], [3, 4]], mx.int32)
    noise = np.array(Sampler(rows, VOCABULARY).noise(positions))
    alone = np.array(Sampler(rows[1:2], VOCABULARY).noise(mx.array([[5]], mx.int32)))
    assert np.array_equal(alone[0, 0], noise[1, 1])
    flat = noise.reshape(6, -1)
    assert len({row.tobytes() for row in flat}) == 6
    assert Sampler([RowSampling()], VOCABULARY).noise(positions[:1]) is None


@pytest.mark.parametrize("count", [1, 63, 1024, 2049, 5000])
@pytest.mark.parametrize("k", [1, 64, 700])
def test_largest_is_exact(count: int, k: int) -> None:
    values = np.random.default_rng(count).normal(size=(2, 1, count)).astype(np.float32)
    expected = np.full((2, 1, max(k, count)), -np.inf, np.float32)
    expected[..., :count] = -np.sort(-values, axis=-1)
    assert np.array_equal(np.array(largest(mx.array(values), k)), expected[..., :k])


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.95, 0.9999])
def test_nucleus_threshold_is_an_element(top_p: float) -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.normal(0, 4, 500), [0.0, -0.0, -1e-30, 1e-30]])
    values = rng.permutation(values).astype(np.float32)
    found = nucleus_threshold(mx.array(values)[None, None], mx.array([[[top_p]]])).item()
    assert found in values
    weights = np.exp(values.astype(np.float64) - values.max())
    total = weights.sum()
    assert weights[values >= found].sum() >= top_p * total * (1 - 1e-5)
    assert weights[values > found].sum() <= top_p * total * (1 + 1e-5)


def test_tokens_follow_the_target_distribution() -> None:
    """60,000 draws over seeds and positions, plain and filtered."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1.5, VOCABULARY).astype(np.float32)
    for row in (RowSampling(1.0), RowSampling(0.7, 16, 0.9), RowSampling(1.4, 0, 0.8, 0.02)):
        seeded = [
            RowSampling(row.temperature, row.top_k, row.top_p, row.min_p, s) for s in range(60)
        ]
        sampler = Sampler(seeded, VOCABULARY)
        positions = mx.broadcast_to(mx.arange(1000, dtype=mx.int32), (60, 1000))
        tiled = mx.broadcast_to(mx.array(logits), (60, 1000, VOCABULARY))
        drawn = np.array(sampler.choose(tiled, sampler.noise(positions))).ravel()
        weights = np.exp(logits.astype(np.float64) / row.temperature)
        weights *= reference_kept(logits, row)
        assert_fits(np.bincount(drawn, minlength=VOCABULARY), weights / weights.sum())
