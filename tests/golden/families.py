"""What the four small pairs look like: shapes, seeds, and the untrained models.

Each family keeps the structure of its published model and shrinks every size. This module knows
transformers' config classes; it does not train, generate or write anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from weights import Gains, randomize, seeded

SLIDING, FULL = "sliding_attention", "full_attention"
DRAFTER_LAYERS = [SLIDING, SLIDING, SLIDING, FULL]

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 2,
    "position_embedding_size": 8,
}
AUDIO = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "conv_kernel_size": 3,
    "output_proj_dims": 8,
}
UNIFIED_VISION = {
    "patch_size": 1,
    "pooling_kernel_size": 2,
    "mm_embed_dim": 16,
    "mm_posemb_size": 4,
    "output_proj_dims": 16,
}


@dataclass(frozen=True)
class Family:
    """One pair: the text configs of both models in the published flat form, and how it is made.

    `steps` is how long the assistant is trained: enough to have about a third of its drafts kept.
    """

    name: str
    seed: int
    steps: int
    gains: Gains
    target: dict[str, Any]
    drafter: dict[str, Any]
    towers: dict[str, dict[str, Any]] = field(default_factory=dict)
    centroids: tuple[int, int] | None = None  # (centroids, how many a draft step scores)
    unified: bool = False

    @property
    def window(self) -> int:
        return int(self.target["sliding_window"])


_COMMON = {
    "vocab_size": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
}
_LARGE = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}


def _pair(
    heads: dict[str, Any], target: dict[str, Any], drafter: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Adds what all families share; `heads` (window, head counts and sizes) holds for both."""
    target_config = {**_COMMON, **heads, "final_logit_softcapping": 30.0, **target}
    target_config["num_hidden_layers"] = len(target_config["layer_types"])
    drafter_config = {
        **_COMMON,
        **heads,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "layer_types": DRAFTER_LAYERS,
        "num_hidden_layers": len(DRAFTER_LAYERS),
        "num_kv_shared_layers": len(DRAFTER_LAYERS),
        **drafter,
    }
    return target_config, drafter_config


def _e2b() -> Family:
    target, drafter = _pair(
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_global_key_value_heads": None,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 20,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 256,
        },
        {"hidden_size": 32, "intermediate_size": 32},
    )
    towers = {"vision_config": {**VISION, "use_clipped_linears": True}, "audio_config": AUDIO}
    return Family(
        "e2b", 11, 700, Gains(0.4, 1.0, 5.0, 0.11), target, drafter, towers, centroids=(16, 4)
    )


def _moe() -> Family:
    target, drafter = _pair(
        {
            **_LARGE,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 12,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "layer_types": [SLIDING, SLIDING, FULL],
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "vocab_size_per_layer_input": 256,
        },
        {"hidden_size": 32, "intermediate_size": 32},
    )
    return Family(
        "moe", 12, 500, Gains(0.5, 1.5, 5.0, 0.1), target, drafter, {"vision_config": VISION}
    )


def _dense() -> Family:
    target, drafter = _pair(
        {
            **_LARGE,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "num_global_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 24,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "vocab_size_per_layer_input": 256,
        },
        {"hidden_size": 32, "intermediate_size": 32},
    )
    return Family(
        "dense", 13, 270, Gains(0.4, 1.5, 5.0, 0.11), target, drafter, {"vision_config": VISION}
    )


def _unified() -> Family:
    target, drafter = _pair(
        {
            **_LARGE,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 10,
        },
        {"hidden_size": 64, "intermediate_size": 64, "layer_types": [SLIDING, SLIDING, FULL]},
        {"hidden_size": 32, "intermediate_size": 32},
    )
    for config in (target, drafter):
        config.pop("hidden_size_per_layer_input")  # gemma4_unified_text has no such field
        config.pop("vocab_size_per_layer_input", None)
    towers = {"vision_config": UNIFIED_VISION, "audio_config": {"audio_embed_dim": 8}}
    gains = Gains(0.8, 1.5, 6.0, 0.06)
    return Family("unified", 14, 450, gains, target, drafter, towers, unified=True)


FAMILIES = {family.name: family for family in (_e2b(), _moe(), _dense(), _unified())}


def build_target(family: Family) -> hf.PreTrainedModel:
    """The target with its random weights, eager mode, float32."""
    torch.manual_seed(family.seed)  # transformers' own initialisation, kept by the towers
    if family.unified:
        text = hf.Gemma4UnifiedTextConfig(**family.target)
        config = hf.Gemma4UnifiedConfig(text_config=text, **family.towers, dtype="float32")
        model = hf.Gemma4UnifiedForConditionalGeneration(config)
    else:
        text = hf.Gemma4TextConfig(**family.target)
        config = hf.Gemma4Config(text_config=text, **family.towers, dtype="float32")
        model = hf.Gemma4ForConditionalGeneration(config)
    model.config.eos_token_id = [1, 106]
    randomize(model.model.language_model, family.gains, family.seed)
    return model.eval()


def build_drafter(family: Family) -> hf.PreTrainedModel:
    """The untrained assistant; a centroid head gets a fixed random permutation as token order."""
    text_type = hf.Gemma4UnifiedTextConfig if family.unified else hf.Gemma4TextConfig
    options: dict[str, Any] = {
        "text_config": text_type(**family.drafter),
        "backbone_hidden_size": family.target["hidden_size"],
        "use_ordered_embeddings": family.centroids is not None,
        "dtype": "float32",
    }
    if family.centroids is not None:
        options["num_centroids"], options["centroid_intermediate_top_k"] = family.centroids
    if family.unified:
        model = hf.Gemma4UnifiedAssistantForCausalLM(hf.Gemma4UnifiedAssistantConfig(**options))
    else:
        model = hf.Gemma4AssistantForCausalLM(hf.Gemma4AssistantConfig(**options))
    randomize(model, Gains(1.0, 1.0, 1.5, 0.1), family.seed + 1000)
    if family.centroids is not None:
        order = torch.randperm(family.drafter["vocab_size"], generator=seeded(family.seed))
        model.masked_embedding.token_ordering.copy_(order)
    return model
