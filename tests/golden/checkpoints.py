"""Writes and reads a pair's checkpoint files as the published ones are laid out.

`config.json` has the published flat keys, `config.transformers5.json` is what transformers 5
itself writes (`per_layer_config`); both describe the same model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from families import Family
from safetensors.torch import load_file, save_file

EOS = [1, 106, 50]  # <eos>, <turn|> and <|tool_response>, as the published targets list them


def write_pair(family: Family, target: Any, drafter: Any, out: Path) -> None:
    """Replaces the checkpoint files of `out/target` and `out/assistant`."""
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}
    tokens = {"bos_token_id": 2, "pad_token_id": 0}
    target.generation_config = hf.GenerationConfig(eos_token_id=EOS, **tokens, **sampling)
    drafter.generation_config = hf.GenerationConfig(
        **tokens, num_assistant_tokens=4, num_assistant_tokens_schedule="constant"
    )
    for model, shapes, folder in (
        (target, family.target, out / "target"),
        (drafter, family.drafter, out / "assistant"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        (folder / "config.json").rename(folder / "config.transformers5.json")
        write_flat_config(folder, shapes)
    add_unused_tensors(family, out / "target" / "model.safetensors")
    for path in out.rglob("model.safetensors"):
        path.chmod(0o644)


def write_flat_config(folder: Path, shapes: dict[str, Any]) -> None:
    """Writes config.json: `config.transformers5.json` with the published flat keys instead."""
    config = json.loads((folder / "config.transformers5.json").read_text())
    text = config["text_config"]
    del text["per_layer_config"]
    for key in ("global_head_dim", "num_global_key_value_heads"):
        text[key] = shapes[key]
    text.setdefault("hidden_size_per_layer_input", 0)
    if folder.name == "target":
        config["vocab_size"] = text["vocab_size"]  # mlx-lm reads it here
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def add_unused_tensors(family: Family, path: Path) -> None:
    """Gives KV-shared layers the key and value tensors that published E-series files carry."""
    config = family.target
    layers, shared = config["layer_types"], config.get("num_kv_shared_layers", 0)
    if not shared:
        return
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(family.seed + 2)
    for layer in range(len(layers) - shared, len(layers)):
        donor = max(i for i in range(len(layers) - shared) if layers[i] == layers[layer])
        prefix = "model.language_model.layers.{}.self_attn.{}.weight"
        for name in ("k_proj", "v_proj", "k_norm"):
            shape = tensors[prefix.format(donor, name)].shape
            noise = torch.randn(shape, generator=generator)
            tensors[prefix.format(layer, name)] = noise.bfloat16().float()
    save_file(tensors, path, metadata={"format": "pt"})


def read_pair(out: Path) -> tuple[Any, Any]:
    """Loads both models from `config.json`, having checked that both config files agree."""
    models = []
    for folder in (out / "target", out / "assistant"):
        flat, nested = (
            hf.AutoConfig.for_model(**json.loads((folder / name).read_text()))
            for name in ("config.json", "config.transformers5.json")
        )
        agree(flat.get_text_config().to_dict(), nested.get_text_config().to_dict(), folder)
        architecture = getattr(hf, flat.architectures[0])
        models.append(architecture.from_pretrained(folder, dtype=torch.float32).eval())
    return models[0], models[1]


def agree(flat: dict[str, Any], nested: dict[str, Any], folder: Path) -> None:
    flat.setdefault("hidden_size_per_layer_input", 0)
    nested.setdefault("hidden_size_per_layer_input", 0)
    different = {k for k in flat | nested if flat.get(k) != nested.get(k)}
    assert not different, f"{folder}: the two configs differ in {sorted(different)}"
