"""Requests from any thread: handles give what `generate` gives, and end in every way they can."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp import LLM, Request, Result, SamplingParams, load
from mlx_mtp.errors import UsageError
from mlx_mtp.model.target import Target

GREEDY = SamplingParams(temperature=0, max_tokens=60)
PROMPTS = [f"Count from {n} to {n + 9}." for n in range(3, 12)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load("pocket")


def test_many_threads_get_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, max_tokens=60)
    requests = [Request(prompt=p, params=(GREEDY, params)[n % 2]) for n, p in enumerate(PROMPTS)]
    expected = llm.generate(requests, draft_depth=0)

    def ask(request: Request) -> Result:
        return llm.submit(request).result(timeout=60)

    with ThreadPoolExecutor(len(requests)) as pool:
        results = list(pool.map(ask, requests))
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert [r.text for r in results] == [r.text for r in expected]


def test_chunks_make_up_the_result(llm: LLM) -> None:
    handle = llm.submit(PROMPTS[0], GREEDY)
    chunks = list(handle)
    result = handle.result(timeout=1)
    assert handle.done
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [t for chunk in chunks for t in chunk.token_ids] == result.token_ids
    assert chunks[-1].finish_reason == result.finish_reason == "stop"


def test_other_calls_run_beside(llm: LLM) -> None:
    (expected,) = llm.generate([PROMPTS[1]], GREEDY)
    handles = [llm.submit(prompt, GREEDY) for prompt in PROMPTS[2:6]]
    text = "".join(chunk.text for chunk in llm.stream(PROMPTS[1], GREEDY))
    assert text == expected.text
    assert [handle.result(timeout=60).text for handle in handles] == [
        result.text for result in llm.generate(PROMPTS[2:6], GREEDY)
    ]


def test_cancel_ends_one_and_spares_the_others(llm: LLM) -> None:
    endless = SamplingParams(temperature=1, seed=1, max_tokens=100_000, ignore_eos=True)
    long, other = llm.submit(PROMPTS[0], endless), llm.submit(PROMPTS[1], GREEDY)
    chunks = iter(long)
    next(chunks)
    long.cancel()
    result = long.result(timeout=60)
    assert result.finish_reason == "cancelled"
    assert list(chunks)[-1].finish_reason == "cancelled"
    assert other.result(timeout=60).finish_reason == "stop"
    long.cancel()  # it is over: nothing happens


def test_waiting_has_an_end(llm: LLM) -> None:
    handle = llm.submit(PROMPTS[0], SamplingParams(max_tokens=100_000, ignore_eos=True, seed=1))
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.05)
    handle.cancel()
    handle.result(timeout=60)


def test_a_bad_request_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(UsageError, match="no SamplingParams"):
        llm.submit("Hi", {"temperature": 1})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="context"):
        llm.submit(Request(token_ids=[2] * 200_000)).result(timeout=60)


def test_those_who_wait_hear_of_a_failure(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = llm.generate([PROMPTS[0]], GREEDY)

    def broken(*_: object) -> mx.array:
        raise RuntimeError("[matmul] broken")

    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward", broken)
        handle = llm.submit(PROMPTS[0], GREEDY)
        assert list(handle) == []
        with pytest.raises(RuntimeError, match="broken"):
            handle.result(timeout=60)
    assert llm.submit(PROMPTS[0], GREEDY).result(timeout=60).text == expected.text


def test_close_cancels_and_refuses(llm: LLM) -> None:
    own = load("pocket")
    handle = own.submit(PROMPTS[0], SamplingParams(max_tokens=100_000, ignore_eos=True, seed=1))
    own.close()
    own.close()
    assert handle.result(timeout=0).finish_reason == "cancelled"
    with pytest.raises(UsageError, match="closed"):
        own.submit(PROMPTS[0])
    (result,) = own.generate([PROMPTS[0]], GREEDY)  # needs no worker
    assert result.finish_reason == "stop"


def test_a_program_may_end_while_one_runs(tmp_path: Path) -> None:
    program = (
        "from mlx_mtp import load, SamplingParams\n"
        "llm = load('pocket')\n"
        "h = llm.submit('Hi', SamplingParams(max_tokens=100000, ignore_eos=True, seed=1))\n"
        "next(iter(h))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
