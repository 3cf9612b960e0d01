"""Makes the small target+assistant pairs under tests/data/pairs, with golden outputs.

    python tests/golden/make_pairs.py [--out DIR] [pair ...]

Needs the extra `golden` (torch and transformers). For each family: a random target, an assistant
distilled on the target's greedy text, both written as published checkpoints are, read back, and
run by transformers. The text rows kept are those whose choices are farthest from a tie.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import torch
import transformers
from distill import NEW_TOKENS, Corpus, distill, make_corpus
from families import FAMILIES, Family, build_drafter, build_target
from reference import Gaps, Reference, forward, reference_rounds, transformers_mtp, watch_gaps
from weights import round_to_bfloat16

DEPTH = 4
CORPUS_ROWS = 12  # texts per prompt length: what the assistant learns, and the candidates
CANDIDATES = 6  # of them, how many per length are run through the cache-free loop
BATCH_ROWS, LEARNING_RATE = 10, 8e-3

# A choice nearer to a tie than this could flip by another framework's float32 rounding.
FLOORS = {"top2": 5e-3, "draft": 1e-3, "centroid": 2e-4, "router": 5e-5}

# Which rows get arrays in golden.npz (see README.md); the others are held by their ids alone.
HIDDEN_ROWS, LOGITS_ROWS, SEQUENCE_ROWS, DRAFT_ROWS = range(4), range(2), range(1), range(4)


def prompt_lengths(window: int) -> list[int]:
    """Prompt lengths by row: below, at and above the window, two of them over three windows."""
    w = window
    return [3, w + 1, 3 * w + 4, w, w - 1, 2 * w + 5, 5 * w + 3, 7]


def train(family: Family) -> tuple[Any, Any, list[Corpus]]:
    """The finished target and assistant, and the texts the assistant was trained on."""
    target = build_target(family)
    round_to_bfloat16(target)
    corpora = make_corpus(target, prompt_lengths(family.window), CORPUS_ROWS, family.seed + 1)
    drafter = build_drafter(family)
    losses = distill(target, drafter, corpora, family.steps, BATCH_ROWS, LEARNING_RATE, family.seed)
    for step, loss in enumerate(losses):
        if step % 100 == 0 or step == family.steps - 1:
            log(family, f"step {step}: loss {loss:.3f}")
    round_to_bfloat16(drafter)
    return target, drafter, corpora


def top2_gaps(target: Any, corpus: Corpus) -> list[float]:
    """For each text, the smallest top-2 distance of its greedy choices' logits."""
    with torch.no_grad():
        logits = target(corpus.tokens, use_cache=False).logits[:, corpus.prompt_length - 1 : -1]
    top = logits.topk(2, dim=-1).values
    return [float(gap) for gap in (top[..., 0] - top[..., 1]).amin(dim=1)]


def margins(top2: float, gaps: Gaps) -> dict[str, float]:
    """Every kind of gap that the pair has, by the names of FLOORS."""
    found = {"top2": top2, **vars(gaps)}
    return {kind: gap for kind, gap in found.items() if gap < float("inf")}


def choose_row(
    target: Any, drafter: Any, corpus: Corpus
) -> tuple[list[int], Reference, dict[str, float]]:
    """The text farthest from any tie, relative to FLOORS: its prompt, cache-free run and gaps."""
    top2 = top2_gaps(target, corpus)
    best: tuple[float, list[int], Reference, dict[str, float]] | None = None
    for row in sorted(range(len(top2)), key=top2.__getitem__, reverse=True)[:CANDIDATES]:
        ids = corpus.tokens[row].tolist()
        prompt, plain = ids[: corpus.prompt_length], ids[corpus.prompt_length :]
        with watch_gaps(target, drafter) as gaps:
            run = reference_rounds(target, drafter, prompt, DEPTH, NEW_TOKENS)
        assert run.ids == plain, "the cache-free loop left the target's greedy text"
        found = margins(top2[row], gaps)
        score = min(gap / FLOORS[kind] for kind, gap in found.items())
        if len(set(plain)) >= NEW_TOKENS // 4 and (best is None or score > best[0]):
            best = score, prompt, run, found
    if best is None or best[0] < 1:
        raise SystemExit(f"no text of {corpus.prompt_length} tokens is clear of ties: {best}")
    return best[1:]


def make_golden(
    family: Family, target: Any, drafter: Any, corpora: list[Corpus]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """golden.json's contents and golden.npz's arrays."""
    prompts, rows, arrays = [], [], {}
    for i, corpus in enumerate(corpora):
        prompt, run, gaps = choose_row(target, drafter, corpus)
        assert run.first is not None
        state = forward(target, prompt + run.ids[:-1])
        plain = state.logits[len(prompt) - 1 :].argmax(-1).tolist()
        mtp = transformers_mtp(target, drafter, prompt, NEW_TOKENS)
        assert plain == mtp == run.ids, f"row {i}: plain, mtp and ref differ"
        accepted = [r["accepted"] for r in run.rounds]
        prompts.append(prompt)
        rows.append(
            {
                "i": i,
                "plen": len(prompt),
                "first_bonus": plain[0],
                "draft0": run.first.tokens,
                "plain": plain,
                "mtp": mtp,
                "ref": run.ids,
                "ref_rounds": run.rounds,
                **{f"min_{kind}_gap": gap for kind, gap in gaps.items()},
            }
        )
        arrays |= row_arrays(i, len(prompt), state, run)
        mean = sum(accepted) / len(accepted)
        shown = ", ".join(f"{kind} {gap:.2g}" for kind, gap in gaps.items())
        log(family, f"row {i}: {len(prompt)} tokens, {mean:.2f} accepted a round; gaps {shown}")
    rounds = [r["accepted"] for row in rows for r in row["ref_rounds"]]
    log(family, f"{sum(rounds) / len(rounds):.2f} accepted a round over all rows")
    golden = {"pair": family.name, "window": family.window, "k": DEPTH, "prompts": prompts}
    return {**golden, "rows": rows}, arrays


def row_arrays(i: int, length: int, state: Any, run: Reference) -> dict[str, np.ndarray]:
    """The arrays kept of row i, named as README.md describes."""
    assert run.first is not None
    kept: dict[str, torch.Tensor] = {}
    if i in HIDDEN_ROWS:
        kept[f"target_hidden_{i}"] = state.hidden[:length]
    if i in LOGITS_ROWS:
        kept[f"target_logits_{i}"] = state.logits[:length]
    if i in SEQUENCE_ROWS:
        kept[f"seq_logits_{i}"] = state.logits[length - 1 :]
    if i in DRAFT_ROWS:
        kept[f"draft_logits_{i}"] = run.first.logits
        kept[f"draft_hidden_{i}"] = run.first.hidden
    return {name: tensor.numpy() for name, tensor in kept.items()}


def write_golden(out: Path, golden: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """golden.json with one line per prompt and row, and golden.npz."""
    head = {key: value for key, value in golden.items() if key not in ("prompts", "rows")}
    parts = [json.dumps(head)[1:-1]]
    for key in ("prompts", "rows"):
        lines = ",\n".join(json.dumps(item, separators=(",", ":")) for item in golden[key])
        parts.append(f'"{key}": [\n{lines}\n]')
    (out / "golden.json").write_text("{" + ",\n".join(parts) + "}\n")
    np.savez_compressed(out / "golden.npz", **arrays)


def log(family: Family, message: str) -> None:
    print(f"[{time.process_time():6.1f} s] {family.name}: {message}", flush=True)


def main() -> None:
    default = Path(__file__).resolve().parents[1] / "data" / "pairs"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="*", metavar="pair", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    if unknown := set(options.pairs) - set(FAMILIES):
        parser.error(f"no such pair: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)  # sums in another order would give other weights
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in options.pairs or FAMILIES:
        family, out = FAMILIES[name], options.out / name
        target, drafter, corpora = train(family)
        checkpoints.write_pair(family, target, drafter, out)
        target, drafter = checkpoints.read_pair(out)
        write_golden(out, *make_golden(family, target, drafter, corpora))
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        log(family, f"{size / 1e3:.0f} kB in {out}")


if __name__ == "__main__":
    main()
