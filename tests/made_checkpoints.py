"""Checkpoints in the published names and layouts, of any config: their tensors' shapes, and files
with headers and no data (sparse) or with random weights, made a piece at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from published import SIZES

BYTES = {"BF16": 2, "F32": 4, "I64": 8}
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def target_tensors(config: dict[str, Any], *, towers: bool = True) -> Shapes:
    """name -> (dtype, shape) of a target as it is published, with what a text model drops."""
    text = config["text_config"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    layers, ple = text["num_hidden_layers"], text.get("hidden_size_per_layer_input") or 0
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, hidden)}
    first_shared = layers - text["num_kv_shared_layers"]
    if ple:
        found["embed_tokens_per_layer.weight"] = (vocab, layers * ple)
        found["per_layer_model_projection.weight"] = (layers * ple, hidden)
        found["per_layer_projection_norm.weight"] = (ple,)
    for index, kind in enumerate(text["layer_types"]):
        wide = 2 if text.get("use_double_wide_mlp") and index >= first_shared else 1
        layer = attention(text, kind) | mlp(hidden, wide * text["intermediate_size"])
        own = text["num_global_key_value_heads"] if text["attention_k_eq_v"] else None
        is_full = kind == "full_attention"
        heads = own if is_full and own else text["num_key_value_heads"]
        width = heads * head_width(text, kind)
        layer["self_attn.k_proj.weight"] = (width, hidden)  # in shared layers, too: not used there
        layer["self_attn.k_norm.weight"] = (head_width(text, kind),)
        if not (is_full and text["attention_k_eq_v"]):
            layer["self_attn.v_proj.weight"] = (width, hidden)
        if ple:
            layer["per_layer_input_gate.weight"] = (ple, hidden)
            layer["per_layer_projection.weight"] = (hidden, ple)
            layer["post_per_layer_input_norm.weight"] = (hidden,)
        if text.get("enable_moe_block"):
            experts, inner = text["num_experts"], text["moe_intermediate_size"]
            layer["router.proj.weight"] = (experts, hidden)
            layer["router.scale"] = (hidden,)
            layer["router.per_expert_scale"] = (experts,)
            layer["experts.gate_up_proj"] = (experts, 2 * inner, hidden)
            layer["experts.down_proj"] = (experts, hidden, inner)
            for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1"):
                layer[f"{name}.weight"] = (hidden,)
            layer["post_feedforward_layernorm_2.weight"] = (hidden,)
        found |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    found["norm.weight"] = (hidden,)
    tensors: Shapes = {
        f"model.language_model.{name}": ("BF16", shape) for name, shape in found.items()
    }
    if towers:
        tensors["model.vision_tower.patch_embedder.input_proj.weight"] = ("BF16", (768, 768))
        tensors["model.embed_vision.embedding_projection.weight"] = ("BF16", (hidden, 768))
    return tensors


def drafter_tensors(config: dict[str, Any]) -> Shapes:
    """name -> (dtype, shape) of a drafter as it is published."""
    text, backbone = config["text_config"], config["backbone_hidden_size"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    tensors: Shapes = {
        "pre_projection.weight": ("BF16", (hidden, 2 * backbone)),
        "post_projection.weight": ("BF16", (backbone, hidden)),
        "model.embed_tokens.weight": ("BF16", (vocab, hidden)),
    }
    for index, kind in enumerate(text["layer_types"]):
        layer = attention(text, kind) | mlp(hidden, text["intermediate_size"])
        for name, shape in layer.items():
            tensors[f"model.layers.{index}.{name}"] = ("BF16", shape)
    tensors["model.norm.weight"] = ("BF16", (hidden,))
    if config["use_ordered_embeddings"]:
        centroids = config["num_centroids"]
        tensors["masked_embedding.centroids.weight"] = ("BF16", (centroids, hidden))
        tensors["masked_embedding.token_ordering"] = ("I64", (vocab,))
    return tensors


def head_width(text: dict[str, Any], kind: str) -> int:
    return int(text["global_head_dim"] if kind == "full_attention" else text["head_dim"])


def attention(text: dict[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    hidden, width = text["hidden_size"], head_width(text, kind)
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return {f"{name}_layernorm.weight": (hidden,) for name in norms} | {
        "layer_scalar": (1,),
        "self_attn.q_proj.weight": (text["num_attention_heads"] * width, hidden),
        "self_attn.o_proj.weight": (hidden, text["num_attention_heads"] * width),
        "self_attn.q_norm.weight": (width,),
    }


def mlp(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: Shapes,
    *,
    data: bool = False,
    shard_bytes: int = 10**12,
) -> None:
    """A model folder; without data its weight files are all holes and take no disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards = list(_sharded(tensors, shard_bytes))
    weight_map = {}
    random = np.random.default_rng(0)
    for number, shard in enumerate(shards, start=1):
        many = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = folder / (many if len(shards) > 1 else "model.safetensors")
        weight_map |= dict.fromkeys(shard, file.name)
        with file.open("wb") as stream:
            header = _header(shard)
            stream.write(header)
            for dtype, shape in shard.values():
                if data:
                    for piece in _pieces(dtype, shape, random):
                        stream.write(piece)
            size = len(header) + sum(nbytes(*entry) for entry in shard.values())
            stream.truncate(size)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_small(folder: Path, size: str = "E4B", *, data: bool = True, scale: int = 1) -> Path:
    """A target of a real size's proportions, with few layers and a narrow width.

    ``scale`` makes it as many times as wide.
    """
    config = json.loads(json.dumps(SIZES[size][0]))
    text = config["text_config"]
    period = text["layer_types"].index("full_attention") + 1
    text |= {
        "hidden_size": 256 * scale,
        "intermediate_size": 512 * scale,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "global_head_dim": 64,
        "vocab_size": 4096 * scale,
        "vocab_size_per_layer_input": 4096 * scale,
        "num_hidden_layers": 2 * period,
        "layer_types": text["layer_types"][: 2 * period],
        "num_kv_shared_layers": period if text["num_kv_shared_layers"] else 0,
    }
    if text["num_global_key_value_heads"]:
        text["num_global_key_value_heads"] = 1
    if text.get("enable_moe_block"):
        text |= {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64 * scale}
    if text.get("hidden_size_per_layer_input"):
        text["hidden_size_per_layer_input"] = 64
    write_checkpoint(folder, config, target_tensors(config), data=data)
    return folder


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * BYTES[dtype]


def _header(tensors: Shapes) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + nbytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def _pieces(dtype: str, shape: tuple[int, ...], random: np.random.Generator) -> Iterator[bytes]:
    """Normally distributed weights of deviation 0.02, a pool of them again and again."""
    if dtype == "I64":
        yield random.permutation(shape[0]).astype(np.int64).tobytes()
        return
    left = nbytes(dtype, shape)
    if len(shape) == 1:
        yield b"\x80\x3f" * (left // 2)
        return
    data = _pool()[2 * int(random.integers(1000)) :]
    while left > 0:
        yield data[:left]
        left -= len(data)


@cache
def _pool() -> bytes:
    wide = np.random.default_rng(1).standard_normal(1 << 20, dtype=np.float32) * 0.02
    return (wide.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _sharded(tensors: Shapes, limit: int) -> Iterator[Shapes]:
    shard: Shapes = {}
    size = 0
    for name, entry in tensors.items():
        if shard and size + nbytes(*entry) > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = entry
        size += nbytes(*entry)
    yield shard
