"""What a round costs, counted: host reads, drafter forwards, copies, memory."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from pairs import OWN_PAIRS, PAIRS, Loader, load_golden

import mlx_mtp
import mlx_mtp.decode.engine as engine_module
import mlx_mtp.decode.proposer as proposer
from mlx_mtp.config_json import FULL
from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.policy import FixedDepth
from mlx_mtp.decode.request import Job
from mlx_mtp.decode.round import Drafts, Outcome
from mlx_mtp.decode.sampling import RowSampling
from mlx_mtp.model.span import ATTENDED_STEP, runs_of
from mlx_mtp.types import RunStats

READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__array__")
"""Every way in which Python waits for an array's value."""


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count the reads of arrays by any of the ways above."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(mx.array, name) for name in READS}

    def counting(name: str) -> object:
        def read(self: mx.array, *args: object) -> object:
            counts[name] += 1
            return originals[name](self, *args)

        return read

    for name in READS:
        setattr(mx.array, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(mx.array, name, original)


def engine_of(load_pair: Loader, pair: Path, depth: int, rows: int, jobs: list[Job]) -> Engine:
    llm = load_pair(pair)
    engine = Engine(llm.target, llm.drafter, FixedDepth(depth), rows=rows, stats=RunStats())
    for job in jobs:
        engine.add(job)
    return engine


@pytest.mark.parametrize(("rows", "depth"), [(1, 0), (1, 4), (3, 2), (8, 7)])
def test_one_host_read_per_round(pair: Path, load_pair: Loader, rows: int, depth: int) -> None:
    prompts = load_golden(pair).prompts if rows > 1 else load_golden(pair).prompts[:2]
    engine = engine_of(load_pair, pair, depth, rows, [Job(tuple(p), 8) for p in prompts])
    stats = engine.stats
    while engine.has_work:
        rounds, prefills = stats.rounds, stats.prefill_reads
        with counted_reads() as counts:
            engine.step()
        rounds, prefills = stats.rounds - rounds, stats.prefill_reads - prefills
        assert rounds <= 1
        assert counts["tolist"] == counts.total() == rounds + prefills
    assert stats.host_reads == stats.rounds == stats.target_forwards
    assert stats.prefill_reads <= min(len(prompts), stats.prefill_forwards)
    assert stats.prefill_tokens == sum(map(len, prompts))
    # Blocks may have been drafted ahead for rows that then ended.
    ends = len(prompts) if rows == 1 else 1
    assert 0 <= stats.drafter_forwards - depth * stats.rounds <= depth * ends


def test_arrays_are_read_in_two_places_only() -> None:
    """In the source, too: nothing else in model/ and decode/ reads or evaluates mid-round."""
    root = Path(mlx_mtp.__file__).parent
    found = Counter()
    for file in [*root.glob("model/*.py"), *root.glob("decode/*.py")]:
        if file.name == "load.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("item", "tolist", "eval"):
                found[f"{file.name}:{node.attr}"] += 1
    assert found == {
        "round.py:tolist": 1,
        "engine.py:tolist": 1,  # a finished prefill's first token
        "engine.py:eval": 1,  # a chunk that is not the prompt's last
        "experts.py:tolist": 1,  # distinct experts, where that is asked for
        "experts.py:eval": 2,  # experts stacked or taken apart, when that is chosen
        "cache.py:eval": 4,  # new, grown and moved buffers, between rounds
        "snapshot.py:eval": 2,  # prefixes and rings kept and put back, at admission
        "drafter.py:eval": 1,  # the ordered head, at load
    }


@pytest.mark.parametrize("tokens", [150, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("live", [8, 5])
def test_decoding_copies_no_cache(load_pair: Loader, live: int, tokens: int) -> None:
    """The peak stays within a few steps' activations, below the cache: no copy of it is made."""
    pair = PAIRS[0]
    prompts = load_golden(pair).prompts
    jobs = [Job(tuple(prompts[i]), tokens if i < live else 8) for i in range(8)]
    engine = engine_of(load_pair, pair, 4, 8, jobs)
    while len(engine._schedule.live) != live or engine.stats.rounds < 12:  # short rows leave first
        engine.step()
    # The sum only: whoever holds a buffer makes the next write copy it.
    cache = engine._schedule.room.cache
    assert cache is not None
    whole = sum(buffer.nbytes for buffer in cache.keys + cache.values)
    del cache
    copied, rounds = engine.stats.bytes_copied, engine.stats.rounds
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    engine.step()
    one_step = mx.get_peak_memory() - before
    mx.reset_peak_memory()
    while max(len(running.produced) for running in engine._schedule.live) < tokens - 8:
        engine.step()
    assert engine.stats.rounds > rounds + 20
    # Attended slots, and activations with them, grow from one multiple to the next.
    growth = runs_of([tokens], 1, engine._schedule.cache.ring)[FULL][0].slots / ATTENDED_STEP
    assert mx.get_peak_memory() - before <= 2 * growth * one_step
    assert mx.get_peak_memory() - before < whole
    assert engine.stats.bytes_copied == copied


def test_leaving_rows_cost_one_copied_row_each(load_pair: Loader) -> None:
    pair = PAIRS[0]
    prompts = load_golden(pair).prompts
    jobs = [Job(tuple(prompts[i]), 4 if i == 0 else 30) for i in range(4)]
    engine = engine_of(load_pair, pair, 0, 4, jobs)
    while len(engine._schedule.live) != 3:
        engine.step()
    assert engine.stats.row_copies == 1
    cache = engine._schedule.cache
    assert cache is not None
    assert engine.stats.bytes_copied == sum(b[0].nbytes for b in cache.keys + cache.values)
    # The last row leaves without a copy.
    other = engine_of(load_pair, pair, 0, 4, [*jobs[1:], jobs[0]])
    while other.stats.rounds < 6:
        other.step()
    assert other.stats.row_copies == 0


PRIMITIVES = {"e2b": 1310, "moe": 985, "dense": 970, "unified": 735}
"""Of a sampled plain round of eight rows, on the CPU backend, which takes norms and RoPE apart."""
DRAFT_STEP = 640
"""Primitives that one more draft adds."""


def primitives(*arrays: mx.array) -> int:
    """Size of the graph that is to be evaluated for these arrays."""
    graph = StringIO()
    mx.export_to_dot(graph, *arrays)
    return graph.getvalue().count("label =")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_graph_of_a_round_is_bounded(
    pair: Path, load_pair: Loader, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """What a round launches is known, hardly grows with the rows and not at all with the text."""
    sizes: list[int] = []

    def measured(outcome: Outcome | Drafts) -> None:
        if isinstance(outcome, Outcome):
            rows = outcome.rows
            sizes.append(primitives(outcome.packed, rows.tokens, rows.lengths, rows.hidden))

    monkeypatch.setattr("mlx_mtp.decode.engine.launch", measured)
    prompts = load_golden(pair).prompts
    most = {}
    for rows in (1, 8):
        for depth in (0, 1, 4):
            sampling = RowSampling(temperature, top_k=20)
            jobs = [Job(tuple(prompts[0][:20]), 60, sampling) for _ in range(rows)]
            engine = engine_of(load_pair, pair, depth, rows, jobs)
            monkeypatch.setattr(engine._proposer, "make_ahead", lambda state, *_: state)
            sizes.clear()
            for _ in range(6):
                engine.step()
            assert len(set(sizes[2:])) == 1  # the first ones join the rows
            most[rows, depth] = sizes[-1]
    assert pair.parent != OWN_PAIRS or most[8, 0] <= PRIMITIVES[pair.name]
    for depth in (1, 4):
        assert most[8, depth] - most[8, 0] <= depth * DRAFT_STEP + 100
        assert most[8, depth] <= 1.05 * most[1, depth]


def test_the_next_drafts_are_launched_before_a_round_is_read(
    load_pair: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody can join; who comes later is drafted together with the others."""
    calls: list[str] = []
    for module, name in ((engine_module, "launch"), (engine_module, "read"), (proposer, "launch")):
        original = getattr(module, name)

        def call(what: Outcome | Drafts, name: str = name, original: Any = original) -> Any:
            calls.append(name if name == "read" else type(what).__name__)
            return original(what)

        monkeypatch.setattr(module, name, call)
    pair = PAIRS[0]
    prompts = load_golden(pair).prompts
    engine = engine_of(load_pair, pair, 2, 2, [Job(tuple(prompts[0]), 30)])
    for _ in range(4):
        engine.step()
    assert calls == ["Outcome", "Drafts", "read"] * 4
    calls.clear()
    engine.add(Job(tuple(prompts[1]), 30))
    for _ in range(3):
        engine.step()
    assert calls == ["Outcome", "Drafts", "read"] * 3
    assert engine.stats.drafter_forwards == 2 * (engine.stats.rounds + 2)
