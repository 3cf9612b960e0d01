"""A long conversation costs no more per turn than attention over what was said: work is counted."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import pytest

from mlx_mtp import LLM, SamplingParams, load
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.span import ATTENDED_STEP, FULL, SLOT_STEP, SPARE_SLOTS
from mlx_mtp.types import Message

SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
DEPTH = 1


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load("pocket")


def turn_of(llm: LLM, session: Any, messages: list[Message]) -> dict[str, int]:
    """Say something of the same length as ever; what the turn took, by the counters."""
    messages.append({"role": "user", "content": f"{len(messages):03}."})
    before = replace(llm.run_stats)
    for _ in session.send(messages, SHORT, draft_depth=DEPTH):
        pass
    messages.append(session.reply())
    names = ("prefill_tokens", "prefill_forwards", "rounds", "target_tokens", "drafter_forwards")
    return {name: getattr(llm.run_stats, name) - getattr(before, name) for name in names}


@pytest.mark.parametrize("turns", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_the_work_of_a_turn_does_not_grow(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    encode, span = llm.tokenizer.encode, SlotCache.span
    encoded, attended = 0, 0

    def counting(text: str) -> list[int]:
        nonlocal encoded
        encoded += len(text)
        return encode(text)

    def noting(self: SlotCache, *arguments: Any, **options: Any) -> Any:
        nonlocal attended
        found = span(self, *arguments, **options)
        attended = max(attended, *(run.slots for run in found.runs[FULL]))
        return found

    monkeypatch.setattr(llm.tokenizer, "encode", counting)
    monkeypatch.setattr(SlotCache, "span", noting)
    llm.reset_run_stats()
    session, messages, work = llm.session(), list[Message](), []
    for _ in range(turns):
        encoded = attended = 0
        work.append(turn_of(llm, session, messages))
        assert encoded < 200  # characters: what is new and what the template writes around it
        assert attended <= session.turn.prompt_tokens + SPARE_SLOTS + ATTENDED_STEP
    assert session.turn.prompt_tokens > 10 * turns
    assert all(turn == work[1] for turn in work[1:])
    # Buffers grow by doubling, and rings are copied when a turn would put a start out of reach.
    tokens, kv = session.turn.prompt_tokens, llm.memory.kv
    assert llm.run_stats.bytes_copied <= kv.total(1, tokens + SLOT_STEP) + kv.ring * tokens // 256


@pytest.mark.slow
def test_200_turns_slow_down_by_attention_only(llm: LLM) -> None:
    """Generous: a turn that prefilled everything would take ten times as long at the end."""
    session, messages, seconds = llm.session(), list[Message](), []
    for _ in range(200):
        began = perf_counter()
        turn_of(llm, session, messages)
        seconds.append(perf_counter() - began)
    assert median(seconds[150:]) < 4 * median(seconds[10:60])
