"""Acceptance by kind of prompt: drafts kept by position and tokens per target forward of a pair.

    python bench/acceptance.py [MODEL] [--prompts 200] [--depth 4]

The prompts are held out: no training conversation of the bundled pairs holds their kind and values.
Each runs at temperatures 0 and 1, alone and eight at a time, and once more without a drafter, whose
ids must be the same. `right` counts greedy answers that are exactly the one right answer; free
kinds have none. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "pocket"))

from text import FREE_KINDS, Sample, held_out_prompts, structured_prompts

from mlx_mtp import LLM, Result, SamplingParams, load


@dataclass
class Tally:
    """Counts over the answers of one kind, temperature and number of rows.

    drafted_by_position: rounds, as each round drafts at every position; forwards: rounds after
    the prefill, whose token is not counted in `tokens`.
    """

    answers: int = 0
    right: int = 0
    same_ids: int = 0
    tokens: int = 0
    forwards: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    def add(self, sample: Sample, result: Result, plain: Result) -> None:
        self.answers += 1
        self.right += sample.exact and result.text.strip() == sample.answer
        self.same_ids += result.token_ids == plain.token_ids
        self.tokens += result.stats.tokens - 1
        self.forwards += result.stats.rounds
        self._count(list(result.stats.accepted_by_position))

    def merge(self, other: Tally) -> None:
        self.answers += other.answers
        self.right += other.right
        self.same_ids += other.same_ids
        self.tokens += other.tokens
        self.forwards += other.forwards
        self._count(other.accepted_by_position)

    def _count(self, accepted: list[int]) -> None:
        missing = len(accepted) - len(self.accepted_by_position)
        self.accepted_by_position += [0] * missing
        for position, number in enumerate(accepted):
            self.accepted_by_position[position] += number

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(1, self.forwards)

    @property
    def acceptance(self) -> list[float]:
        """Share of rounds whose draft at this position became part of the answer."""
        return [number / max(1, self.forwards) for number in self.accepted_by_position]


def measure(
    llm: LLM, samples: list[Sample], temperature: float, rows: int, depth: int
) -> dict[str, Tally]:
    """Tallies by kind, the drafted answers compared with plain ones of the same seed."""
    params = SamplingParams(temperature=temperature, max_tokens=200, seed=1)
    prompts: list[Any] = [sample.prompt for sample in samples]
    drafted = llm.generate(prompts, params, batch_size=rows, draft_depth=depth)
    plain = llm.generate(prompts, params, batch_size=rows, draft_depth=0)
    tallies: dict[str, Tally] = defaultdict(Tally)
    for sample, with_drafts, without in zip(samples, drafted, plain, strict=True):
        tallies[sample.kind].add(sample, with_drafts, without)
    return dict(tallies)


def total(tallies: dict[str, Tally], kinds: tuple[str, ...] | None = None) -> Tally:
    result = Tally()
    for kind, tally in tallies.items():
        if kinds is None or kind in kinds:
            result.merge(tally)
    return result


def show(title: str, tallies: dict[str, Tally]) -> None:
    print(f"\n{title}")
    print(f"{'kind':14} {'right':>8} {'tokens/forward':>15}  accepted at position 1, 2, ...")
    for kind, tally in tallies.items():
        right = "-" if kind in (*FREE_KINDS, "free") else f"{tally.right}/{tally.answers}"
        shares = " ".join(f"{share:.2f}" for share in tally.acceptance)
        print(f"{kind:14} {right:>8} {tally.tokens_per_forward:15.2f}  {shares}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="pocket")
    parser.add_argument("--prompts", type=int, default=200, help="of the structured kinds")
    parser.add_argument("--free", type=int, default=8, help="prompts of each free kind")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()

    samples = structured_prompts(options.prompts)
    for kind in FREE_KINDS:
        samples += held_out_prompts(kind, options.free)
    llm = load(options.model)
    runs = []
    for temperature in options.temperatures:
        for rows in options.rows:
            tallies = measure(llm, samples, temperature, rows, options.depth)
            structured = tuple(kind for kind in tallies if kind not in FREE_KINDS)
            tallies["structured"] = total(tallies, structured)
            tallies["free"] = total(tallies, FREE_KINDS)
            show(f"{options.model}, temperature {temperature:g}, {rows} row(s)", tallies)
            whole = total(tallies, ("structured", "free"))
            print(f"same ids as without a drafter: {whole.same_ids} of {whole.answers}")
            kinds = {
                kind: {**asdict(tally), "tokens_per_forward": tally.tokens_per_forward}
                for kind, tally in tallies.items()
            }
            runs.append({"temperature": temperature, "rows": rows, "kinds": kinds})
    print(json.dumps({"model": options.model, "depth": options.depth, "runs": runs}))


if __name__ == "__main__":
    main()
