"""Makes a bundled pair from nothing: text, tokenizer, target, assistant, files.

    python bench/pocket/train.py [pocket|pocket-moe] --minutes 50 --out DIR [--seed 1]

    --start DIR                    goes on with a trained target, the assistant left out
    --target DIR [--assistant DIR] trains an assistant for a trained target, or goes on with one

Needs torch and transformers (extra `golden`). It uses one core; the minutes are wall-clock time,
of which the assistant takes 30 %. Training ends fully annealed however fast the machine is; a
slower one sees less text and ends with a worse model.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from time import monotonic

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from drafter import train_drafter
from shapes import PAIRS, build_target, save_drafter, save_target
from target import train_target
from tokenizers import Tokenizer
from vocabulary import save_tokenizer, template, train_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pair", choices=list(PAIRS))
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=Path, help="a trained target's folder: assistant only")
    parser.add_argument(
        "--start", type=Path, help="a trained target's folder: target only, goes on"
    )
    parser.add_argument("--assistant", type=Path, help="with --target: an assistant to go on from")
    parser.add_argument("--eager", action="store_true", help="do not compile (no C++ compiler)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = PAIRS[options.pair]
    out: Path = options.out / pair.name
    out.mkdir(parents=True, exist_ok=True)
    began = monotonic()
    name = "drafter" if options.target else "target-more" if options.start else "target"

    with (out / f"{name}.log").open("w", buffering=1) as file:

        def log(line: str) -> None:
            shown = f"{(monotonic() - began) / 60:6.1f} min  {line}"
            print(shown, flush=True)
            file.write(shown + "\n")

        log(f"{pair.name}, {name}, {options.minutes:g} minutes, seed {options.seed}")
        known = options.target or options.start
        tokenizer = (
            Tokenizer.from_file(str(known / "tokenizer.json")) if known else train_tokenizer()
        )
        seconds, compiled = 60 * options.minutes, not options.eager
        if options.target is None:
            share = 1.0 if options.start else 0.7
            target = train_target(
                pair, tokenizer, share * seconds, options.seed, log, compiled, options.start
            )
            save_target(pair, target, out / "target")
            save_tokenizer(tokenizer, out / "target", template(pair.empty_thought))
            if options.start:
                return
        folder = options.target or out / "target"
        # the assistant learns from the target as it is on disk, in bfloat16's grid
        target = type(build_target(pair)).from_pretrained(folder, dtype=torch.float32).eval()
        share = 1.0 if options.target else 0.3
        drafter = train_drafter(
            pair, target, tokenizer, share * seconds, options.seed, log, compiled, options.assistant
        )
        save_drafter(pair, drafter, out / "assistant")
        save_tokenizer(tokenizer, out / "assistant", None)


if __name__ == "__main__":
    main()
