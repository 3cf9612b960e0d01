"""Configs of the five published sizes, as their checkpoints have them; no weights.

SIZES: name -> (config.json, family, donors by layer type, K/V-owning layers, their full KV heads).
"""

ROPE = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}


def published(
    hidden, layers, heads, kv, global_kv, inter, period, shared=0, window=1024, moe=False, ple=0
):
    """A config.json of a real size: the values of the published checkpoints, no weights."""
    kinds = ["sliding_attention"] * (period - 1) + ["full_attention"]
    text = {
        "model_type": "gemma4_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_global_key_value_heads": global_kv,
        "head_dim": 256,
        "global_head_dim": 512,
        "intermediate_size": inter,
        "use_double_wide_mlp": hidden == 1536,
        "sliding_window": window,
        "layer_types": kinds * (layers // period),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": ple,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "attention_k_eq_v": global_kv is not None,
        "enable_moe_block": moe,
        "num_experts": 128 if moe else None,
        "top_k_experts": 8 if moe else None,
        "moe_intermediate_size": 704 if moe else None,
        "rope_parameters": ROPE,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }
    return {"model_type": "gemma4", "text_config": text, "eos_token_id": [1, 106]}


def unified_12b():
    config = published(3840, 48, 16, 8, 1, 15360, 6)
    config["model_type"] = "gemma4_unified"
    text = config["text_config"]
    text["model_type"] = "gemma4_unified_text"
    for key in list(text):
        if "experts" in key or "per_layer" in key or "moe" in key:
            del text[key]
    return config


SIZES = {
    "E2B": (
        published(1536, 35, 8, 1, None, 6144, 5, 20, 512, ple=256),
        "e-series",
        {"sliding_attention": 13, "full_attention": 14},
        15,
        1,
    ),
    "E4B": (
        published(2560, 42, 8, 2, None, 10240, 6, 18, 512, ple=256),
        "e-series",
        {"sliding_attention": 22, "full_attention": 23},
        24,
        2,
    ),
    "12B": (unified_12b(), "unified", {"sliding_attention": 46, "full_attention": 47}, 48, 1),
    "26B-A4B": (
        published(2816, 30, 16, 8, 2, 2112, 6, moe=True),
        "experts",
        {"sliding_attention": 28, "full_attention": 29},
        30,
        2,
    ),
    "31B": (
        published(5376, 60, 32, 16, 4, 21504, 6),
        "dense",
        {"sliding_attention": 58, "full_attention": 59},
        60,
        4,
    ),
}

PARAMETERS = {
    "E2B": (4_628_569_344, 77_731_328),
    "E4B": (7_463_013_376, 78_517_760),
    "12B": (11_907_350_272, 422_856_960),
    "26B-A4B": (25_233_141_760, 419_711_232),
    "31B": (30_697_345_280, 469_518_592),
}
"""Of target and drafter, as transformers 5.24 counts them: text alone, a tied table once."""


def assistant(size):
    """The config.json of a size's drafter."""
    target = SIZES[size][0]["text_config"]
    small = (
        target["hidden_size"] < 3000 and not target["enable_moe_block"]
        if ("enable_moe_block" in target)
        else False
    )
    unified = size == "12B"
    text = {
        "model_type": "gemma4_unified_text" if unified else "gemma4_text",
        "hidden_size": 256 if small else 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4 if small else target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "num_global_key_value_heads": target["num_global_key_value_heads"],
        "head_dim": 256,
        "global_head_dim": 512,
        "intermediate_size": 2048 if small else 8192,
        "sliding_window": target["sliding_window"],
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size": 262144,
        "attention_k_eq_v": target["attention_k_eq_v"],
        "final_logit_softcapping": None,
        "rope_parameters": ROPE,
        "dtype": "bfloat16",
    }
    return {
        "model_type": "gemma4_unified_assistant" if unified else "gemma4_assistant",
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": small,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "text_config": text,
    }
