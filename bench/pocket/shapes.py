"""The shapes of the two pairs, and how their files are written: the published flat layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from vocabulary import BOS, EOS, PAD, STOP_IDS, VOCAB_SIZE

SLIDING, FULL = "sliding_attention", "full_attention"
DRAFTER_LAYERS = [SLIDING, SLIDING, SLIDING, FULL]

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "max_position_embeddings": 4096,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
}


@dataclass(frozen=True)
class Pair:
    """One pair. `centroids`: their number and how many a draft step scores, or None (dense head).

    `empty_thought`: the template opens an answer with an empty thought, as the large models' do.
    """

    name: str
    heads: dict[str, Any]
    target: dict[str, Any]
    drafter: dict[str, Any]
    centroids: tuple[int, int] | None
    empty_thought: bool

    def target_config(self) -> dict[str, Any]:
        config = {**_COMMON, **self.heads, "final_logit_softcapping": 30.0, **self.target}
        return {**config, "num_hidden_layers": len(config["layer_types"])}

    def drafter_config(self) -> dict[str, Any]:
        return {
            **_COMMON,
            **self.heads,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "layer_types": DRAFTER_LAYERS,
            "num_hidden_layers": len(DRAFTER_LAYERS),
            "num_kv_shared_layers": len(DRAFTER_LAYERS),
            **self.drafter,
        }


POCKET = Pair(
    "pocket",
    {"num_key_value_heads": 1, "num_global_key_value_heads": None, "sliding_window": 32},
    {
        "intermediate_size": 256,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    {"intermediate_size": 256},
    centroids=(64, 8),
    empty_thought=False,
)

POCKET_MOE = Pair(
    "pocket-moe",
    {
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "use_bidirectional_attention": "vision",
        "sliding_window": 64,
    },
    {
        "intermediate_size": 128,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    {"intermediate_size": 256},
    centroids=None,
    empty_thought=True,
)

PAIRS = {pair.name: pair for pair in (POCKET, POCKET_MOE)}


def build_target(pair: Pair) -> hf.Gemma4ForConditionalGeneration:
    """A fresh target, text only, float32."""
    text = hf.Gemma4TextConfig(**pair.target_config())
    config = hf.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    config.eos_token_id, config.bos_token_id, config.pad_token_id = STOP_IDS, BOS, PAD
    return hf.Gemma4ForConditionalGeneration(config).float()


def build_drafter(pair: Pair) -> hf.Gemma4AssistantForCausalLM:
    """A fresh assistant, float32; a centroid head's token order is the identity at first."""
    options: dict[str, Any] = {
        "text_config": hf.Gemma4TextConfig(**pair.drafter_config()),
        "backbone_hidden_size": pair.target_config()["hidden_size"],
        "use_ordered_embeddings": pair.centroids is not None,
    }
    if pair.centroids is not None:
        options["num_centroids"], options["centroid_intermediate_top_k"] = pair.centroids
    model = hf.Gemma4AssistantForCausalLM(hf.Gemma4AssistantConfig(**options)).float()
    if pair.centroids is not None:
        model.masked_embedding.token_ordering.copy_(torch.arange(VOCAB_SIZE))
    return model


def save_target(pair: Pair, model: hf.PreTrainedModel, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors in bfloat16."""
    generation = {
        "bos_token_id": BOS,
        "eos_token_id": STOP_IDS,
        "pad_token_id": PAD,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }
    _save(model, pair.target_config(), generation, folder)


def save_drafter(pair: Pair, model: hf.PreTrainedModel, folder: Path) -> None:
    """As `save_target`, for the assistant."""
    generation = {
        "bos_token_id": BOS,
        "eos_token_id": STOP_IDS,
        "pad_token_id": PAD,
        "num_assistant_tokens": 4,
        "num_assistant_tokens_schedule": "constant",
    }
    _save(model, pair.drafter_config(), generation, folder)


def _save(
    model: hf.PreTrainedModel, shapes: dict[str, Any], generation: dict[str, Any], folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config = {k: v for k, v in config.items() if not k.startswith("_")}
    text = config["text_config"]
    text.pop("per_layer_config", None)
    for key in ("global_head_dim", "num_global_key_value_heads", "hidden_size_per_layer_input"):
        text[key] = shapes[key]
    text["dtype"] = "bfloat16"
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    config["vocab_size"] = text["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    tensors = {
        name: tensor.to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
