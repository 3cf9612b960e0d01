"""What sharing a pass does for the routing cost, counted: experts that rounds read.

    python bench/experts.py [--rows 1,4,8] [--depths 0,1,2,4] [--tokens 60]

Two targets: pocket-moe with its own drafter (8 experts, top-2; trained), and one with random
weights and the 26B-A4B's routing, 128 experts and top-8, whose drafts are replayed at the
acceptance of ACCEPTANCE. Per layer: pairs are what MLX reads below 64 tokens where nothing is
shared, distinct experts what it would read at best. GB are those of the 26B-A4B at 4 bit: 30
layers of experts of 3.345 MB each, and 1.352 GB per forward for all that is not an expert. The last
line of stdout is one JSON document; all figures are counts and hold on every machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4

from mlx_mtp import LLM, SamplingParams, load
from mlx_mtp.decode.policy import FixedDepth
from mlx_mtp.files import read_json
from mlx_mtp.hub import BUNDLED
from mlx_mtp.measure.prompts import built_in
from mlx_mtp.measure.replay import as_array, write_script
from mlx_mtp.measure.run import run_prompts
from mlx_mtp.pair import TargetConfig
from mlx_mtp.types import MAX_DEPTH

ACCEPTANCE = (0.84, 0.71, 0.65, 0.69)
"""Chance of each draft after those before it: .84, .60, .39 and .27 of blocks keep as many."""

EXPERT_GB, LAYERS, DENSE_GB = 0.003345, 30, 1.352
"""The 26B-A4B at 4 bit."""


class Count(NamedTuple):
    """Per layer and target forward, and per layer and token of an answer."""

    pairs: float
    distinct: float
    pairs_per_token: float
    distinct_per_token: float
    tokens_per_forward: float


def write_random_target(folder: Path) -> None:
    """A target with the 26B-A4B's routing and random weights, else of pocket-moe's shape."""
    source = BUNDLED["pocket-moe"]
    raw = read_json(source / "config.json")
    raw["text_config"] |= {"num_experts": 128, "top_k_experts": 8}
    folder.mkdir()
    for file in source.glob("*.json"):
        if not file.name.startswith("model"):
            shutil.copy(file, folder)
    for file in source.glob("*.jinja"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(raw))
    config = TargetConfig.from_dict(raw, "random")
    mx.random.seed(0)
    model = gemma4.Model(gemma4.ModelArgs.from_dict(config.mlx_lm_config))
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def params_of(tokens: int, *, replayed: bool) -> SamplingParams:
    """Random weights repeat themselves in greedy text, and a repeated token goes to the same
    experts: theirs is sampled, and goes on whatever it says."""
    temperature = 1.0 if replayed else 0.0
    return SamplingParams(max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=replayed)


def write_scripts(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> list[mx.array]:
    """Drafts of the text that will be sampled, of which ACCEPTANCE are kept."""
    plain = llm.generate_ids(prompts, params_of(tokens + MAX_DEPTH, replayed=True), draft_depth=0)
    vocabulary = llm.target.config.vocab_size
    return [
        as_array(write_script(result.token_ids, ACCEPTANCE, vocabulary, str(number)))
        for number, result in enumerate(plain)
    ]


def count(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    rows: int,
    depth: int,
    scripts: list[mx.array] | None,
) -> Count:
    """Experts of one run of all prompts."""
    llm.target.experts.count_distinct = True
    run = run_prompts(llm, prompts, params, rows, FixedDepth(depth), scripts)
    stats, layers = run.stats, sum(layer.enable_moe for layer in llm.target.body.layers)
    decoded = stats.tokens - len(prompts)  # the first token of each comes from its prefill
    return Count(
        stats.expert_pairs / stats.target_forwards / layers,
        stats.distinct_experts / stats.target_forwards / layers,
        stats.expert_pairs / decoded / layers,
        stats.distinct_experts / decoded / layers,
        decoded / stats.target_forwards,
    )


def measure(llm: LLM, options: argparse.Namespace, *, replayed: bool) -> list[dict[str, Any]]:
    """All numbers of rows and depths."""
    texts = built_in("pocket-moe", BUNDLED["pocket-moe"]).prompts[: max(options.rows)]
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": one.text}]) for one in texts]
    scripts = write_scripts(llm, prompts, options.tokens) if replayed else None
    params = params_of(options.tokens, replayed=replayed)
    found = []
    for rows in options.rows:
        for depth in options.depths:
            figures = count(llm, prompts, params, rows, depth, scripts)
            found.append({"rows": rows, "depth": depth, **figures._asdict()})
    return found


def show(name: str, found: list[dict[str, Any]], *, in_gb: bool) -> None:
    print(f"{name}, per layer")
    print(
        "rows  depth  tokens/forward  pairs/forward  distinct  pairs/token  distinct/token", end=""
    )
    print("  GB/token: none, all shared" if in_gb else "")
    for one in found:
        print(
            f"{one['rows']:4}  {one['depth']:5}  {one['tokens_per_forward']:14.2f}"
            f"  {one['pairs']:13.1f}  {one['distinct']:8.1f}  {one['pairs_per_token']:11.2f}"
            f"  {one['distinct_per_token']:14.2f}",
            end="",
        )
        dense = DENSE_GB / one["tokens_per_forward"]
        none, all_shared = (
            dense + EXPERT_GB * LAYERS * one[name]
            for name in ("pairs_per_token", "distinct_per_token")
        )
        print(f"  {none:14.2f} {all_shared:11.2f}" if in_gb else "")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Experts that shared passes read, counted.")
    parser.add_argument("--rows", type=numbers, default=[1, 4, 8])
    parser.add_argument("--depths", type=numbers, default=[0, 1, 2, 4])
    parser.add_argument("--tokens", type=int, default=60, help="of each answer")
    options = parser.parse_args()

    trained = measure(load("pocket-moe"), options, replayed=False)
    show("pocket-moe, 8 experts, top-2, its own drafter", trained, in_gb=False)
    with TemporaryDirectory() as folder:
        write_random_target(Path(folder) / "target")
        random = measure(load(Path(folder) / "target", drafter=None), options, replayed=True)
    show("random weights, 128 experts, top-8, acceptance replayed", random, in_gb=True)
    document = {
        "tokens": options.tokens,
        "replayed_acceptance": ACCEPTANCE,
        "pocket-moe": trained,
        "random": random,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
