"""Models that are incomplete, damaged, foreign or hostile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bad_hints import (
    AGAIN,
    BELONGS,
    ORIGINAL,
    SAFE,
    THERE,
    TYPES,
)
from mistakes import (
    ASSISTANT,
    CONFIG,
    GENERATION,
    INDEX,
    JINJA,
    TARGET,
    WEIGHTS,
    Case,
    cut,
    edit,
    entry,
    grow,
    header,
    link,
    pocket,
    remove,
    rename,
    resized,
    tensors,
    tiny,
    write,
)

Q = "model.language_model.layers.0.self_attn.q_proj.weight"


def pipe() -> None:
    GENERATION.unlink(missing_ok=True)
    os.mkfifo(GENERATION)


def index(name: str) -> Callable[[], None]:
    return write(TARGET / INDEX, {"weight_map": {"a": name}})


CONFIGS_AND_WEIGHTS: dict[str, Case] = {
    "no config": Case(
        3, "pair/target holds no config.json.", "Give a model's folder.", tiny(remove(CONFIG))
    ),
    "an empty folder": Case(
        3,
        "pair/target holds no config.json.",
        "Give a model's folder.",
        lambda: Path("pair/target").mkdir(parents=True),
    ),
    "an adapter only": Case(
        3,
        "pair/target holds an adapter and no model.",
        "Merge it into the model that it was trained on.",
        write(TARGET / "adapter_config.json", {"r": 8}),
    ),
    "a config cut off": Case(
        3, "pair/target/config.json is not valid JSON.", AGAIN, tiny(cut(CONFIG, 300))
    ),
    "an empty config": Case(
        3, "pair/target/config.json is not valid JSON.", AGAIN, tiny(cut(CONFIG, 0))
    ),
    "a config that is a list": Case(
        3, "pair/target/config.json holds no JSON object.", AGAIN, tiny(write(CONFIG, [1]))
    ),
    "a config of nothing": Case(
        4, "config.json: model_type is missing.", ORIGINAL, tiny(write(CONFIG, {}))
    ),
    "a config of 2 GB": Case(
        3,
        "pair/target/config.json is larger than 64 MiB, which no config is.",
        AGAIN,
        tiny(grow(CONFIG, 2 * 10**9)),
    ),
    "a config nested deeply": Case(
        3,
        "pair/target/config.json is nested deeper than 50.",
        AGAIN,
        tiny(write(CONFIG, '{"a":' * 400 + "1" + "}" * 400)),
    ),
    "a config nested beyond Python": Case(
        3, "pair/target/config.json is not valid JSON.", AGAIN, tiny(write(CONFIG, "[" * 10**5))
    ),
    "an unknown architecture": Case(
        4,
        "pair/target is of type 'llama', which this program cannot run.",
        TYPES,
        tiny(edit(CONFIG, model_type="llama")),
    ),
    "an architecture with escapes": Case(
        4,
        "pair/target is of type '\\x1b]0;owned\\x07\\u202ex', which this program cannot run.",
        TYPES,
        tiny(edit(CONFIG, model_type="\x1b]0;owned\x07\u202ex")),
    ),
    "an architecture that is a novel": Case(
        4,
        "pair/target is of type 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..., which this program cannot run.",
        TYPES,
        tiny(edit(CONFIG, model_type="x" * 10**6)),
    ),
    "a size that is text": Case(
        4,
        "config.json: text_config: hidden_size is '64', not a whole number of at least 1.",
        ORIGINAL,
        tiny(edit(CONFIG, "text_config", hidden_size="64")),
    ),
    "a size that is missing": Case(
        4,
        "config.json: text_config: head_dim is missing.",
        ORIGINAL,
        tiny(edit(CONFIG, "text_config", head_dim=...)),
    ),
    "a size beyond any": Case(
        4,
        "config.json: text_config: head_dim x num_attention_heads needs a matrix of 34,359,738,352 rows, more than MLX can hold.",
        ORIGINAL,
        tiny(edit(CONFIG, "text_config", num_attention_heads=2**31 - 1)),
    ),
    "layers beyond any": Case(
        4,
        "config.json: text_config: num_hidden_layers is 1000000000, more than 1024.",
        ORIGINAL,
        tiny(edit(CONFIG, "text_config", num_hidden_layers=10**9, layer_types=None)),
    ),
    "layer types too few": Case(
        4,
        "config.json: text_config: layer_types names 1 layers, num_hidden_layers 4.",
        ORIGINAL,
        tiny(edit(CONFIG, "text_config", layer_types=["full_attention"])),
    ),
    "layer types unknown": Case(
        4,
        "config.json: text_config: layer_types is not a list of sliding_attention and full_attention.",
        ORIGINAL,
        tiny(edit(CONFIG, "text_config", layer_types=["mamba"] * 6)),
    ),
    "another activation": Case(
        4,
        "config.json: text_config: hidden_activation is 'silu', not Gemma 4's own.",
        ORIGINAL,
        tiny(edit(CONFIG, "text_config", hidden_activation="silu")),
    ),
    "more experts than there are": Case(
        4,
        "config.json: text_config: top_k_experts is 99 of 6.",
        ORIGINAL,
        tiny(edit(CONFIG, "text_config", top_k_experts=99), pair="moe"),
    ),
    "quantized by others": Case(
        4,
        "config.json: the weights were quantized by gptq, not by MLX.",
        "Use the unquantized checkpoint or an MLX conversion of it.",
        tiny(edit(CONFIG, quantization_config={"quant_method": "gptq"})),
    ),
    "an unknown mode": Case(
        4,
        "config.json: quantization: mode is 'q4_k', not one of affine, mxfp4, nvfp4, mxfp8.",
        ORIGINAL,
        tiny(edit(CONFIG, quantization={"mode": "q4_k", "bits": 4, "group_size": 32})),
    ),
    "no weights": Case(
        3, "pair/target holds no model*.safetensors.", SAFE, tiny(remove(TARGET / WEIGHTS))
    ),
    "pickles only": Case(
        3,
        "pair/target holds no model*.safetensors (only pytorch_model.bin).",
        SAFE,
        tiny(rename(TARGET / WEIGHTS, "pytorch_model.bin")),
    ),
    "a pickle by another name": Case(
        3,
        "pair/target holds no model*.safetensors (only consolidated.pth).",
        SAFE,
        tiny(rename(TARGET / WEIGHTS, "consolidated.pth")),
    ),
    "GGUF only": Case(
        3,
        "pair/target holds no model*.safetensors (only model-Q4_K_M.gguf).",
        SAFE,
        tiny(rename(TARGET / WEIGHTS, "model-Q4_K_M.gguf")),
    ),
    "GGUF to convert": Case(
        4,
        "pair/target holds GGUF weights, which cannot be read.",
        "Give the original checkpoint in safetensors, e.g. google/gemma-4-E4B-it.",
        tiny(rename(TARGET / WEIGHTS, "model-Q4_K_M.gguf")),
        ("convert", "pair/target", "-o", "out"),
    ),
    "weights cut off": Case(
        3,
        "pair/target/model.safetensors is damaged: 1,000 bytes are missing at its end.",
        AGAIN,
        tiny(cut(TARGET / WEIGHTS, -1000)),
    ),
    "weights too long": Case(
        3,
        "pair/target/model.safetensors is damaged: 706,808 bytes at its end belong to no tensor.",
        AGAIN,
        tiny(grow(TARGET / WEIGHTS, 10**6)),
    ),
    "weights without a byte": Case(
        3,
        "pair/target/model.safetensors is damaged: it does not begin like a safetensors file.",
        AGAIN,
        tiny(cut(TARGET / WEIGHTS, 0)),
    ),
    "a header cut off": Case(
        3,
        "pair/target/model.safetensors is damaged: 8,468 bytes of its header are missing.",
        AGAIN,
        tiny(cut(TARGET / WEIGHTS, 100)),
    ),
    "a header of a terabyte": Case(
        3,
        "pair/target/model.safetensors is damaged: it does not begin like a safetensors file.",
        AGAIN,
        tiny(write(TARGET / WEIGHTS, header(b"{}", 2**40))),
    ),
    "a header that is none": Case(
        3,
        "pair/target/model.safetensors is damaged: its header is not valid JSON.",
        AGAIN,
        tiny(write(TARGET / WEIGHTS, header(b"{nope}"))),
    ),
    "metadata that is no text": Case(
        3,
        "pair/target/model.safetensors is damaged: its metadata is not text.",
        AGAIN,
        tiny(write(TARGET / WEIGHTS, header(b'{"__metadata__": 7}'))),
    ),
    "a header with a name twice": Case(
        3,
        "pair/target/model.safetensors is damaged: its header is not valid JSON.",
        AGAIN,
        tiny(write(TARGET / WEIGHTS, header(b'{"a": 1, "a": 2}'))),
    ),
    "an unknown dtype": Case(
        3,
        "pair/target/model.safetensors is damaged: a is of the unknown dtype 'Q4_0'.",
        AGAIN,
        tiny(write(TARGET / WEIGHTS, header({"a": entry("Q4_0")}))),
    ),
    "offsets that overlap": Case(
        3,
        "pair/target/model.safetensors is damaged: the data of b do not follow the tensor before.",
        AGAIN,
        tiny(
            write(TARGET / WEIGHTS, header({"a": entry(), "b": entry(shape=[3], offsets=[12, 24])}))
        ),
    ),
    "offsets that run backwards": Case(
        3,
        "pair/target/model.safetensors is damaged: a has -24 bytes where its shape needs 24.",
        AGAIN,
        tiny(write(TARGET / WEIGHTS, header({"a": entry(offsets=[24, 0])}))),
    ),
    "a shape of a million dimensions": Case(
        3,
        "pair/target/model.safetensors is damaged: a has a shape or offsets that no tensor has.",
        AGAIN,
        tiny(write(TARGET / WEIGHTS, header({"a": entry(shape=[2**60] * 10**5)}))),
    ),
    "a pickle called safetensors": Case(
        3,
        "pair/target/model.safetensors is damaged: it does not begin like a safetensors file.",
        AGAIN,
        tiny(write(TARGET / WEIGHTS, b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")),
    ),
    "a tensor of another shape": Case(
        4,
        "pair/target: language_model.model.layers.0.self_attn.q_proj.weight has shape [3, 5] where the config needs [96, 32].",
        BELONGS,
        tiny(resized(Q)),
    ),
    "a tensor missing": Case(
        4,
        "pair/target lacks language_model.model.layers.0.self_attn.q_proj.weight.",
        BELONGS,
        tiny(tensors(lambda w: w.pop(Q))),
    ),
    "a tensor too many": Case(
        4,
        "pair/target holds, beyond what its config needs, language_model.model.extra.",
        BELONGS,
        tiny(tensors(lambda w: w.update({"model.language_model.extra": w[Q]}))),
    ),
    "an index that names an absent shard": Case(
        3,
        "pair/target lacks model-00001-of-00002.safetensors.",
        "Download the model again.",
        tiny(index("model-00001-of-00002.safetensors")),
    ),
    "an index that leads up": Case(
        3,
        "pair/target/model.safetensors.index.json names '../assistant/model.safetensors', which is not a weight file of that folder.",
        AGAIN,
        tiny(index("../assistant/model.safetensors")),
    ),
    "an index that leads anywhere": Case(
        3,
        "pair/target/model.safetensors.index.json names '/etc/passwd', which is not a weight file of that folder.",
        AGAIN,
        tiny(index("/etc/passwd")),
    ),
    "an index without a map": Case(
        3,
        "pair/target/model.safetensors.index.json has no weight_map.",
        AGAIN,
        tiny(write(TARGET / INDEX, {"metadata": {}})),
    ),
    "an index cut off": Case(
        3,
        "pair/target/model.safetensors.index.json is not valid JSON.",
        AGAIN,
        tiny(write(TARGET / INDEX, '{"weight_map": {"a": ')),
    ),
    "a shard missing": Case(
        3,
        "pair/target lacks model-00002-of-00002.safetensors.",
        "Download the model again.",
        tiny(rename(TARGET / WEIGHTS, "model-00001-of-00002.safetensors")),
    ),
    "a link to weights elsewhere": Case(
        3,
        "pair/target/model.safetensors is a link that leads out of its folder.",
        THERE,
        tiny(
            rename(TARGET / WEIGHTS, "elsewhere"),
            link(TARGET / WEIGHTS, "../assistant/model.safetensors"),
        ),
    ),
    "a link to a config elsewhere": Case(
        3,
        "pair/target/generation_config.json is a link that leads out of its folder.",
        THERE,
        pocket(link(GENERATION, "/etc/passwd")),
    ),
    "a template linked from elsewhere": Case(
        3,
        "pair/target/chat_template.jinja is a link that leads out of its folder.",
        THERE,
        pocket(link(JINJA, "/etc/passwd")),
    ),
    "a licence linked from elsewhere": Case(
        3,
        "pair/target/LICENSE is a link that leads out of its folder.",
        THERE,
        pocket(link(TARGET / "LICENSE", "/etc/passwd")),
        ("convert", "pair/target", "-o", "out"),
    ),
    "a link to itself": Case(
        3,
        "pair/target/chat_template.jinja is a link that leads out of its folder.",
        THERE,
        pocket(link(JINJA, "chat_template.jinja")),
    ),
    "a drafter with a link": Case(
        3,
        "{here}/pair/assistant/generation_config.json is a link that leads out of its folder.",
        THERE,
        pocket(link(ASSISTANT / "generation_config.json", "/etc/passwd")),
    ),
    "a pipe for a config": Case(
        3, "pair/target/generation_config.json is not a regular file.", AGAIN, tiny(pipe)
    ),
}
