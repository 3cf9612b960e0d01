"""Plain and drafted decoding of the same greedy text, alternated in one run.

    python bench/speed.py [MODEL] [--depth 4] [--rows 1] [--repeat 5]

The last line of stdout is one JSON document. Seconds hold for this machine only; tokens per target
forward hold everywhere.
"""

from __future__ import annotations

import argparse
import json
import platform
from statistics import median
from time import perf_counter

import mlx.core as mx

from mlx_mtp import SamplingParams, load

PROMPTS = [
    "Multiplication table of 7.",
    "Multiplication table of 12.",
    "A list of three fruits.",
    "Multiplication table of 3.",
    "Write a Python function that doubles a number.",
    "Multiplication table of 9.",
    "A list of four colours.",
    "Multiplication table of 5.",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="pocket")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=100)
    options = parser.parse_args()

    llm = load(options.model)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    prompts = (PROMPTS * options.rows)[: options.rows]
    seconds: dict[int, list[float]] = {0: [], options.depth: []}
    forwards: dict[int, int] = {}
    texts: dict[int, list[list[int]]] = {}
    for turn in range(options.repeat + 1):  # the first turn warms up
        for depth in seconds:
            llm.reset_run_stats()
            began = perf_counter()
            results = llm.generate(prompts, params, batch_size=options.rows, draft_depth=depth)
            if turn:
                seconds[depth].append(perf_counter() - began)
            forwards[depth] = llm.run_stats.target_forwards
            texts[depth] = [result.token_ids for result in results]
    tokens = sum(map(len, texts[0]))
    plain, drafted = median(seconds[0]), median(seconds[options.depth])
    print(f"{options.model}, {options.rows} row(s), depth {options.depth}, {tokens} tokens")
    print(f"plain    {plain:6.2f} s  {forwards[0]:4} target forwards")
    print(f"drafted  {drafted:6.2f} s  {forwards[options.depth]:4} target forwards")
    document = {
        "model": options.model,
        "rows": options.rows,
        "depth": options.depth,
        "tokens": tokens,
        "plain_seconds": seconds[0],
        "drafted_seconds": seconds[options.depth],
        "plain_forwards": forwards[0],
        "drafted_forwards": forwards[options.depth],
        "speedup": plain / drafted,
        "same_ids": texts[0] == texts[options.depth],
        "device": str(mx.default_device()),
        "machine": f"{platform.system()} {platform.machine()}",
        "mlx": mx.__version__,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
