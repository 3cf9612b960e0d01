"""What a drafter that is never right costs: a random one against none, alternated in one run.

    python bench/parked.py [MODEL] [--tokens 400] [--repeat 5]

The drafter's weights are drawn at random; each turn begins with a controller that knows nothing.
The last line of stdout is one JSON document. Seconds hold for this machine only; the counts after
the first 50 tokens hold everywhere.
"""

from __future__ import annotations

import argparse
import json
import platform
from statistics import median
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

from mlx_mtp import LLM, RunStats, SamplingParams, load
from mlx_mtp.decode.depth import DepthController

PROMPT = "Multiplication table of 7."
FIRST = 50


class Turn(NamedTuple):
    """One answer.

    Attributes:
        late_seconds: the part after the first tokens.
        rounds, target_rows, draft_steps: what that part took.
    """

    ids: list[int]
    seconds: float
    late_seconds: float
    rounds: int
    target_rows: int
    draft_steps: int


def randomize(llm: LLM) -> None:
    """Fill the drafter with random weights of a usual size."""
    assert llm.drafter is not None
    mx.random.seed(1)
    model = llm.drafter.model
    model.update(
        tree_map(lambda a: 0.1 * mx.random.normal(a.shape).astype(a.dtype), model.parameters())
    )


def answer(llm: LLM, tokens: int) -> Turn:
    llm.controller = DepthController(llm.target.config.family)
    llm.reset_run_stats()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    ids: list[int] = []
    early, early_at = RunStats(), 0.0
    began = perf_counter()
    for chunk in llm.stream(PROMPT, params):
        ids += chunk.token_ids
        if len(ids) <= FIRST:
            early, early_at = RunStats(**vars(llm.run_stats)), perf_counter()
    end, stats = perf_counter(), llm.run_stats
    return Turn(
        ids,
        end - began,
        end - early_at,
        stats.rounds - early.rounds,
        stats.target_tokens - early.target_tokens,
        stats.drafter_forwards - early.drafter_forwards,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="pocket")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()

    models = {"random": load(options.model), "none": load(options.model, drafter=None)}
    randomize(models["random"])
    turns: dict[str, list[Turn]] = {name: [] for name in models}
    for number in range(options.repeat + 1):  # the first turn warms up
        for name, llm in models.items():
            turn = answer(llm, options.tokens)
            if number:
                turns[name].append(turn)
    last = turns["random"][-1]
    seconds = {name: median(turn.seconds for turn in found) for name, found in turns.items()}
    late = {name: median(turn.late_seconds for turn in found) for name, found in turns.items()}
    tokens = options.tokens - FIRST
    print(f"{options.model}, {options.tokens} tokens, medians of {options.repeat}")
    for name in models:
        print(f"drafter {name:7} {seconds[name]:6.2f} s, {late[name]:6.2f} s of them after {FIRST}")
    print(
        f"after {FIRST} tokens: {last.target_rows / tokens:.3f} target rows per token, "
        f"{last.draft_steps / last.rounds:.3f} draft steps per round"
    )
    document = {
        "model": options.model,
        "tokens": options.tokens,
        "seconds": {name: [turn.seconds for turn in found] for name, found in turns.items()},
        "late_seconds": {
            name: [turn.late_seconds for turn in found] for name, found in turns.items()
        },
        "late_ratio": late["random"] / late["none"],
        "ratio": seconds["random"] / seconds["none"],
        "late_target_rows_per_token": last.target_rows / tokens,
        "late_draft_steps_per_round": last.draft_steps / last.rounds,
        "parked": models["random"].parked,
        "same_ids": last.ids == turns["none"][-1].ids,
        "device": str(mx.default_device()),
        "machine": f"{platform.system()} {platform.machine()}",
        "mlx": mx.__version__,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
