"""Loads a pair with transformers as it is on disk and compares assisted with plain greedy ids.

    python bench/pocket/check.py DIR

DIR holds target/ and assistant/. For a target with experts it also compares the training forward
(all experts, weighted) with transformers' own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fast
import torch
import transformers as hf
from text import FREE_KINDS, STRUCTURED, held_out_prompts


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pair", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = hf.AutoTokenizer.from_pretrained(options.pair / "target")
    target, assistant = (
        hf.AutoModelForCausalLM.from_pretrained(options.pair / part, dtype=torch.float32).eval()
        for part in ("target", "assistant")
    )
    print(f"{type(target).__name__}, {sum(p.numel() for p in target.parameters()):,} parameters")
    print(f"{type(assistant).__name__}, {sum(p.numel() for p in assistant.parameters()):,}")
    same = 0
    prompts = [held_out_prompts(kind, 1)[0].prompt for kind in STRUCTURED + FREE_KINDS]
    for prompt in prompts:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=120)
        assisted = target.generate(
            **inputs, do_sample=False, max_new_tokens=120, assistant_model=assistant
        )
        same += plain.tolist() == assisted.tolist()
    print(f"assisted ids equal plain greedy ids for {same} of {len(prompts)} prompts")
    own = target(**inputs).logits
    fast.install()
    difference = (target(**inputs).logits - own).abs().max()
    print(f"the training forward differs in its logits by at most {difference:.1e}")


if __name__ == "__main__":
    main()
