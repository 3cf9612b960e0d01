"""Scripted drafts: the target's own text as drafts is kept whole, by rows of unequal prompts."""

from __future__ import annotations

from dataclasses import replace

from pairs import PAIRS, Loader
from test_lossless import MIXED, jobs_of, run

from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.policy import FixedDepth
from mlx_mtp.measure.replay import as_array, write_script

ROUNDS, DEPTH = 4, 4


def test_a_script_of_the_text_itself_is_kept_whole(load_pair: Loader) -> None:
    llm = load_pair(PAIRS[0])
    jobs = jobs_of(PAIRS[0], 1 + ROUNDS * (DEPTH + 1), MIXED)[:3]
    engine = Engine(llm.target, None, FixedDepth(DEPTH), rows=3)
    for job, text in zip(jobs, run(llm, jobs, 0), strict=True):
        script = as_array(write_script(text, [1.0], llm.target.config.vocab_size, "1"))
        engine.add(replace(job, script=script))
    progress = [one for _ in range(ROUNDS + 3) for one in engine.step()]
    assert not engine.has_work
    stats = [one.stats for one in progress if one.stats is not None]
    assert [(one.rounds, one.accepted) for one in stats] == [(ROUNDS, ROUNDS * DEPTH)] * 3
