"""transformers runs the bundled pairs as they are: its assisted ids equal plain ones and ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import mlx_mtp
from mlx_mtp import LLM, SamplingParams, load
from mlx_mtp.hub import BUNDLED

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "pocket"))

from text import FREE_KINDS, STRUCTURED, held_out_prompts

pytestmark = [pytest.mark.golden, pytest.mark.filterwarnings("default")]
MAX_TOKENS = 120


@pytest.fixture(scope="module", params=sorted(BUNDLED))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(name: str) -> tuple[Any, Any, Any]:
    """Tokenizer, target and assistant as transformers loads them, nothing renamed or added."""
    import torch
    import transformers as hf

    torch.set_num_threads(1)
    folder = Path(mlx_mtp.__file__).parent / "data" / name
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / "target")
    loaded = []
    for part in ("target", "assistant"):
        model, report = hf.AutoModelForCausalLM.from_pretrained(
            folder / part, dtype=torch.float32, output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert not report["mismatched_keys"]
        loaded.append(model.eval())
    return tokenizer, *loaded


def test_assisted_ids_equal_greedy_ones_and_ours(name: str, models: tuple[Any, Any, Any]) -> None:
    tokenizer, target, assistant = models
    llm: LLM = load(name, dtype="float32")
    prompts = [held_out_prompts(kind, 1)[0].prompt for kind in STRUCTURED + FREE_KINDS]
    ours = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    for prompt, result in zip(prompts, ours, strict=True):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        options = {"do_sample": False, "max_new_tokens": MAX_TOKENS}
        plain = target.generate(**inputs, **options)[0].tolist()
        assisted = target.generate(**inputs, **options, assistant_model=assistant)[0].tolist()
        assert assisted == plain, prompt
        assert plain[inputs["input_ids"].shape[1] :] == result.token_ids, prompt
