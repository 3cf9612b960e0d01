"""The Python API on the bundled trained pair: text, stops, streaming, results, errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from mlx_mtp import LLM, Request, SamplingParams, load
from mlx_mtp.errors import IncompatibleError, ModelNotFoundError, UsageError
from mlx_mtp.hub import BUNDLED

GREEDY = SamplingParams(temperature=0, max_tokens=200)
TABLE = "Multiplication table of 7."
ANSWER = "\n".join(f"7 x {i} = {7 * i}" for i in range(1, 11))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load("pocket")


def test_the_main_job(llm: LLM) -> None:
    (result,) = llm.generate([TABLE], GREEDY, draft_depth=4)
    assert result.text == ANSWER
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] in llm.defaults.eos_token_ids
    stats = result.stats
    assert stats.tokens == len(result.token_ids)
    assert stats.accepted + stats.rounds + 1 >= stats.tokens  # a first token, a bonus per round
    assert stats.tokens / stats.rounds > 3  # tokens per target forward: the drafter drafts
    assert sum(stats.accepted_by_position) == stats.accepted
    assert sorted(stats.accepted_by_position, reverse=True) == list(stats.accepted_by_position)
    assert len(stats.accepted_by_position) == 4
    assert stats.drafted == 4 * stats.rounds


@pytest.mark.parametrize("depth", [0, 1, 3, 7])
def test_streaming_gives_the_same_text(llm: LLM, depth: int) -> None:
    chunks = list(llm.stream(TABLE, GREEDY, draft_depth=depth))
    (result,) = llm.generate([TABLE], GREEDY, draft_depth=0)
    assert "".join(chunk.text for chunk in chunks) == result.text == ANSWER
    assert [list(chunk.token_ids) for chunk in chunks] == [[i] for i in result.token_ids]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.tokens == len(result.token_ids)


@pytest.mark.parametrize("stop", ["= 21", "21\n7 x", "1", "7 x 1 = 7\n7 x 2"])
@pytest.mark.parametrize("depth", [0, 4, 7])
def test_stop_strings_cut_the_text_wherever_blocks_end(llm: LLM, stop: str, depth: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, stop=(stop,))
    (result,) = llm.generate([TABLE], params, draft_depth=depth)
    assert result.text == ANSWER[: ANSWER.index(stop)]
    assert result.finish_reason == "stop"
    (plain,) = llm.generate([TABLE], params, draft_depth=0)
    assert result.token_ids == plain.token_ids
    streamed = list(llm.stream(TABLE, params, draft_depth=depth))
    assert "".join(chunk.text for chunk in streamed) == result.text


@pytest.mark.parametrize("tokens", [1, 2, 5, 23])
def test_drafts_never_count_towards_max_tokens(llm: LLM, tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    for depth in (0, 7):
        (result,) = llm.generate([TABLE], params, draft_depth=depth)
        assert len(result.token_ids) == result.stats.tokens == tokens
        assert result.finish_reason == "length"
        assert ANSWER.startswith(result.text)


def test_stop_token_ids_and_ignore_eos(llm: LLM) -> None:
    (plain,) = llm.generate([TABLE], GREEDY, draft_depth=0)
    stop = plain.token_ids[9]
    (result,) = llm.generate([TABLE], SamplingParams(temperature=0, stop_token_ids=(stop,)))
    assert result.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    past = SamplingParams(temperature=0, max_tokens=len(plain.token_ids) + 5, ignore_eos=True)
    (result,) = llm.generate([TABLE], past)
    assert result.finish_reason == "length"
    assert result.token_ids[: len(plain.token_ids)] == plain.token_ids


def test_a_mixed_batch_in_input_order(llm: LLM) -> None:
    requests: list[str | Request | list[dict[str, str]]] = [
        Request(prompt=TABLE, id="a", params=SamplingParams(temperature=0)),
        [{"role": "user", "content": "Multiplication table of 8."}],
        Request(token_ids=[2, 5000], id="bad"),
        Request(prompt="Tell me about a river.", params=SamplingParams(seed=7), id="c"),
        "Multiplication table of 3.",
    ]
    results = llm.generate(requests, SamplingParams(max_tokens=60), batch_size=3)
    assert [result.id for result in results] == ["a", None, "bad", "c", None]
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": TABLE}])
    assert llm.generate([Request(token_ids=ids)], GREEDY)[0].text == ANSWER
    assert ANSWER.startswith(results[0].text)
    assert results[2].finish_reason == "error"
    assert results[2].error is not None
    assert "outside the vocabulary" in results[2].error
    assert results[3].seed == 7
    (alone,) = llm.generate([requests[3]], SamplingParams(max_tokens=60), draft_depth=0)
    assert alone.token_ids == results[3].token_ids


def test_a_requests_own_parameters_win_over_the_calls(llm: LLM) -> None:
    own = Request(prompt=TABLE, params=SamplingParams(max_tokens=3, stop_token_ids=(5,)))
    both = SamplingParams(temperature=0, max_tokens=7, seed=4)
    results = llm.generate([own, TABLE], both)
    assert [(len(result.token_ids), result.seed) for result in results] == [(3, 4), (7, 4)]


def test_results_come_as_they_are_completed(llm: LLM) -> None:
    """Prompts are taken a few at a time from a source that may be endless."""
    taken = 0

    def source() -> Iterator[Request]:
        nonlocal taken
        for i in count():
            taken += 1
            yield Request(
                prompt=f"Multiplication table of {i % 9 + 2}.",
                params=SamplingParams(max_tokens=40 if i % 3 == 0 else 6),
                id=None if i % 2 else f"r{i}",
            )

    results = llm.as_completed(source(), SamplingParams(temperature=0), batch_size=3)
    first = [next(results) for _ in range(12)]
    assert taken <= 12 + 3 * 3 + 9  # finished, running and waiting, and the look-ahead
    ids = [result.id for result in first]
    assert len(set(ids)) == 12
    assert set(ids) != {f"r{i}" if i % 2 == 0 else str(i) for i in range(12)}  # not in order
    assert first[0].stats.tokens == 6
    with pytest.raises(UsageError, match="batch_size is 0"):
        llm.as_completed(source(), batch_size=0)


def test_the_seed_is_reported_and_reproduces(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, max_tokens=40)
    (first,) = llm.generate(["Say something."], params)
    (second,) = llm.generate(["Say something."], params)
    assert first.seed != second.seed
    again = SamplingParams(**{**vars(params), "seed": first.seed})
    (third,) = llm.generate(["Say something."], again, draft_depth=1)
    assert third.token_ids == first.token_ids != second.token_ids


def test_model_defaults_hold_where_nothing_is_said(llm: LLM) -> None:
    defaults = llm.defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (1.0, 64, 0.95)
    said = SamplingParams(temperature=1.0, top_k=64, top_p=0.95, seed=1, max_tokens=30)
    left = SamplingParams(seed=1, max_tokens=30)
    prompt = "Tell me about a river."
    assert llm.generate([prompt], said)[0].token_ids == llm.generate([prompt], left)[0].token_ids


def test_closing_a_stream_stops_it(llm: LLM) -> None:
    llm.reset_run_stats()
    stream = llm.stream(TABLE, GREEDY)
    for _ in range(8):
        next(stream)
    rounds = llm.run_stats.rounds
    stream.close()
    assert llm.run_stats.rounds == rounds
    assert llm.generate([TABLE], GREEDY)[0].text == ANSWER


def test_a_stream_that_is_stopped_ends_with_its_figures(llm: LLM) -> None:
    stream = llm.stream(TABLE, GREEDY, draft_depth=2)
    chunks = [next(stream)]
    stream.stop()
    chunks += stream
    assert chunks[-1].finish_reason == "cancelled"
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.drafted > 0
    assert chunks[-1].stats.tokens == sum(len(chunk.token_ids) for chunk in chunks) <= 7


def test_run_stats_count_everything(llm: LLM) -> None:
    llm.reset_run_stats()
    results = llm.generate([TABLE, "Multiplication table of 5."], GREEDY, draft_depth=4)
    stats = llm.run_stats
    assert stats.row_rounds == sum(result.stats.rounds for result in results)
    assert stats.prefill_tokens == sum(result.stats.prompt_tokens for result in results)
    assert stats.prefill_reads == stats.prefill_forwards == 1  # both prompts in one
    assert stats.target_tokens == 5 * stats.row_rounds
    assert stats.tokens == sum(result.stats.tokens for result in results)
    assert stats.drafted == 4 * stats.row_rounds
    assert stats.accepted == sum(result.stats.accepted for result in results)
    assert stats.host_reads == stats.rounds == stats.target_forwards
    # one block is drafted before it is known that the rows had ended
    assert stats.drafter_forwards in (4 * stats.rounds, 4 * stats.rounds + 4)
    assert stats.peak_bytes > 0


def test_a_prompt_longer_than_the_context(llm: LLM) -> None:
    long = "word " * 5000
    with pytest.raises(UsageError, match=r"The prompt has \d+ tokens and the model's context hold"):
        llm.stream(long)
    result, other = llm.generate([long, TABLE], GREEDY)
    assert result.finish_reason == "error"
    assert other.text == ANSWER


def test_what_cannot_be_served_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="draft_depth is 8"):
        llm.generate([TABLE], draft_depth=8)
    with pytest.raises(UsageError, match="batch_size is 9"):
        llm.generate([TABLE], batch_size=9)
    with pytest.raises(UsageError, match="batch_size is 0"):
        llm.generate([TABLE], batch_size=0)
    with pytest.raises(UsageError, match="Stop strings need text"):
        llm.generate_ids([[2]], SamplingParams(stop=("x",)))
    plain = load("pocket", drafter=None)
    with pytest.raises(UsageError, match="no drafter is loaded"):
        plain.generate([TABLE], draft_depth=2)
    assert plain.generate([TABLE], GREEDY)[0].text == ANSWER
    assert plain.run_stats.drafter_forwards == 0


def test_nothing_to_do(llm: LLM) -> None:
    assert llm.generate([]) == []
    with pytest.raises(UsageError, match="The prompt is empty"):
        llm.stream(Request(token_ids=[]))


def test_a_target_alone_says_that_it_decodes_plainly(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED["pocket"], tmp_path / "alone")
    llm = load(tmp_path / "alone")
    assert llm.drafter_name is None
    assert len(llm.warnings) == 1
    assert "decodes plainly" in llm.warnings[0]
    assert llm.generate([TABLE], GREEDY)[0].text == ANSWER


def test_wrong_pairs_are_errors() -> None:
    target = BUNDLED["pocket"]
    with pytest.raises(IncompatibleError, match="is a drafter"):
        load(target.parent / "assistant")
    with pytest.raises(IncompatibleError, match="is a target"):
        load(target, drafter=target)
    with pytest.raises(ModelNotFoundError):
        load(target, drafter=target.parent / "nowhere")
