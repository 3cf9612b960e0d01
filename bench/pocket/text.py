"""Training text and held-out prompts of the bundled pairs: all generated, none from elsewhere.

    python bench/pocket/text.py [--seed 1] [--conversations 5]     prints some conversations

A prompt belongs to the held-out part where the hash of its kind and values says so; no training
conversation holds such a prompt, whatever its wording. `conversation` asserts it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Any

from skills import SKILLS
from stories import FREE, small_talk

Message = dict[str, str]

STRUCTURED = tuple(SKILLS)
FREE_KINDS = tuple(FREE)
UNORDERED = ("sort_numbers", "sort_words", "compare", "add")
TALK_WEIGHT, FREE_WEIGHT = 3.0, 1.0  # the latter for each free kind

SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are Pocket, a demonstration model.",
    "Be friendly and exact.",
)


@dataclass(frozen=True)
class Sample:
    """One prompt and an answer; `exact`: the answer is the only right one."""

    kind: str
    values: tuple[Any, ...]
    prompt: str
    answer: str
    exact: bool

    @property
    def held_out(self) -> bool:
        return self.kind != "talk" and key(self.kind, self.values) % 10 == 0


def key(kind: str, values: tuple[Any, ...]) -> int:
    """A canonical hash of what is asked, the same on every machine and for every wording.

    Where the order of the values does not matter for the answer, it does not for the hash.
    """
    if kind in UNORDERED:
        values = tuple(sorted(values))
    return int.from_bytes(sha256(repr((kind, values)).encode()).digest()[:8], "big")


def draw(rng: Random, kind: str) -> Sample:
    """A sample of the kind, from either part."""
    if kind == "talk":
        prompt, answer = small_talk(rng)
        return Sample(kind, (prompt,), prompt, answer, exact=True)
    if kind in FREE:
        draw_values, phrase, answer_of = FREE[kind]
        values = draw_values(rng)
        prompt = phrase.format(*values)
        return Sample(kind, values, prompt, answer_of(rng, *values), exact=False)
    skill = SKILLS[kind]
    values = skill.draw(rng)
    phrase = rng.choice((skill.phrases[0], rng.choice(skill.phrases)))
    prompt = phrase.format(**skill.fields(*values))
    return Sample(kind, values, prompt, skill.answer(*values), exact=True)


def draw_part(rng: Random, kind: str, held_out: bool) -> Sample:
    """A sample of the kind from one part."""
    while True:
        sample = draw(rng, kind)
        if sample.held_out == held_out:
            return sample


_WEIGHTS = {kind: skill.weight for kind, skill in SKILLS.items()}
_WEIGHTS |= dict.fromkeys(FREE, FREE_WEIGHT) | {"talk": TALK_WEIGHT}


def conversation(rng: Random) -> list[Message]:
    """A training conversation of one to three turns, sometimes with a system turn."""
    messages: list[Message] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0]):
        kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        sample = draw_part(rng, kind, held_out=False)
        assert not sample.held_out
        messages.append({"role": "user", "content": sample.prompt})
        messages.append({"role": "assistant", "content": sample.answer})
    return messages


def conversations(seed: int) -> Iterator[list[Message]]:
    """Training conversations without end; the same for the same seed."""
    rng = Random(seed)
    while True:
        yield conversation(rng)


def held_out_prompts(kind: str, number: int, seed: int = 0) -> list[Sample]:
    """Up to `number` held-out samples with different prompts; fewer where a kind has no more."""
    rng = Random(f"{kind} {seed}")
    found: dict[str, Sample] = {}
    for _ in range(number * 200):
        sample = draw(rng, kind)
        if sample.held_out:
            found.setdefault(sample.prompt, sample)
        if len(found) == number:
            break
    return list(found.values())


def structured_prompts(number: int = 200, seed: int = 0) -> list[Sample]:
    """Held-out samples of the structured kinds, as even as their numbers of values allow."""
    pools = {kind: held_out_prompts(kind, number // 4, seed) for kind in STRUCTURED}
    chosen: list[Sample] = []
    for index in range(number):
        for pool in pools.values():
            if index < len(pool) and len(chosen) < number:
                chosen.append(pool[index])
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=5)
    options = parser.parse_args()
    source = conversations(options.seed)
    for _ in range(options.conversations):
        for message in next(source):
            print(f"{message['role']}: {message['content']}")
        print()


if __name__ == "__main__":
    main()
