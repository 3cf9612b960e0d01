"""The bundled pairs: right answers in the forms the README names, and drafting changes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlx_mtp import LLM, Request, SamplingParams, load
from mlx_mtp.convert import Options, convert
from mlx_mtp.hub import BUNDLED

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "pocket"))

from text import FREE_KINDS, conversations, held_out_prompts, key, structured_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=200)
NAMED = {
    "Count from 7 to 21.": ", ".join(map(str, range(7, 22))),
    "Multiplication table of 7.": "\n".join(f"7 x {i} = {7 * i}" for i in range(1, 11)),
    "Spell banana.": "b-a-n-a-n-a",
}
PAIRS = sorted(BUNDLED)


@pytest.fixture(scope="module", params=PAIRS)
def llm(request: pytest.FixtureRequest) -> LLM:
    return load(request.param)


def test_the_named_forms_are_answered_right(llm: LLM) -> None:
    results = llm.generate(list(NAMED), GREEDY)
    assert [result.text for result in results] == list(NAMED.values())
    assert all(result.finish_reason == "stop" for result in results)


@pytest.mark.parametrize(
    ("number", "share"), [(17, 0.8), pytest.param(200, 0.9, marks=pytest.mark.slow)]
)
def test_held_out_prompts(llm: LLM, number: int, share: float) -> None:
    """Most structured answers are exactly right, drafts pay, and no token changes."""
    samples = structured_prompts(number)
    requests = [Request(prompt=sample.prompt) for sample in samples]
    drafted = llm.generate(requests, GREEDY, draft_depth=4)
    plain = llm.generate(requests, GREEDY, draft_depth=0)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    right = sum(r.text == sample.answer for r, sample in zip(drafted, samples, strict=True))
    assert right >= share * number
    forwards = sum(result.stats.rounds for result in drafted)
    assert sum(result.stats.tokens - 1 for result in drafted) >= 4.0 * forwards


def test_free_text_is_drafted_too(llm: LLM) -> None:
    prompts = [s.prompt for kind in FREE_KINDS for s in held_out_prompts(kind, 3)]
    params = SamplingParams(temperature=1, seed=1, max_tokens=100)
    results = llm.generate(prompts, params, draft_depth=4)
    plain = llm.generate(prompts, params, draft_depth=0)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    forwards = sum(result.stats.rounds for result in results)
    assert sum(result.stats.tokens - 1 for result in results) >= 1.5 * forwards


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("pocket-moe", 4),
        pytest.param("pocket", 4, marks=pytest.mark.slow),
        pytest.param("pocket", 8, marks=pytest.mark.slow),
        pytest.param("pocket-moe", 8, marks=pytest.mark.slow),
    ],
)
def test_converted_pairs_draft_what_they_decode(name: str, bits: int, tmp_path: Path) -> None:
    convert(name, tmp_path / "out", Options(bits=bits), verify=False)
    llm = load(tmp_path / "out")
    prompts = [sample.prompt for sample in structured_prompts(4)]
    short = SamplingParams(temperature=0, max_tokens=40)
    drafted = llm.generate(prompts, short, draft_depth=4)
    plain = llm.generate(prompts, short, draft_depth=0)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert sum(r.stats.accepted for r in drafted) > 0


def test_no_training_text_holds_a_held_out_prompt() -> None:
    """The split is by a hash of kind and values, the same on every machine."""
    samples = structured_prompts(200)
    assert all(sample.held_out and key(sample.kind, sample.values) % 10 == 0 for sample in samples)
    prompts = {sample.prompt for sample in samples}
    source = conversations(seed=1)
    for _ in range(2000):
        assert not prompts & {message["content"] for message in next(source)}
