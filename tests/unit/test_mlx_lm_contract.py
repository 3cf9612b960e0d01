"""All of mlx-lm that we touch, in the shape we rely on: an upgrade that breaks us fails here."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gemma4, gemma4_text
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
    TokenizerWrapper,
    load,
)
from mlx_lm.utils import infer_quant_config

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "mlx_mtp" / "data" / "pocket" / "target"
IMPORTED = {
    "mlx_lm.models.gemma4",
    "mlx_lm.models.gemma4_text",
    "mlx_lm.models.gemma4_text.logit_softcap",
    "mlx_lm.tokenizer_utils.BPEStreamingDetokenizer",
    "mlx_lm.tokenizer_utils.SPMStreamingDetokenizer",
    "mlx_lm.tokenizer_utils.StreamingDetokenizer",
    "mlx_lm.tokenizer_utils.TokenizerWrapper",
    "mlx_lm.tokenizer_utils.load",
    "mlx_lm.utils.infer_quant_config",
}
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "sliding_window": 8,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}


@pytest.fixture(scope="module")
def model() -> Any:
    """A model with every part that any size has."""
    args = {"model_type": "gemma4", "text_config": dict(TINY), "vocab_size": 64}
    return gemma4.Model(gemma4.ModelArgs.from_dict(args))


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_nothing_else_is_imported() -> None:
    found = set()
    for file in [*(ROOT / "mlx_mtp").rglob("*.py"), *(ROOT / "convert").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {a.name for a in node.names if a.name.split(".")[0] == "mlx_lm"}
    assert found == IMPORTED


def test_the_model_has_the_parts_we_drive(model: Any) -> None:
    head, body = model.language_model, model.language_model.model
    assert head.tie_word_embeddings is True
    assert head.final_logit_softcapping == 30.0
    assert body.embed_scale == 32**0.5
    assert body.embed_tokens_per_layer_scale == 8**0.5
    assert body.per_layer_input_scale == 2**-0.5
    assert body.per_layer_projection_scale == 32**-0.5
    assert body.embed_tokens.as_linear(body.norm(body.embed_tokens(mx.array([1])))).shape == (1, 64)
    x = mx.zeros((1, 32))
    projected = body.per_layer_model_projection(x)
    assert projected.shape == body.embed_tokens_per_layer(mx.array([1])).shape == (1, 3 * 8)
    assert body.per_layer_projection_norm(projected.reshape(1, 3, 8)).shape == (1, 3, 8)
    args = gemma4_text.ModelArgs.from_dict({"tie_word_embeddings": False, **TINY})
    assert isinstance(gemma4_text.Model(args).lm_head, nn.Linear)


def test_a_layer_has_the_parts_we_drive(model: Any) -> None:
    sliding, full, sharing = model.language_model.model.layers
    x = mx.zeros((1, 2, 32))
    for layer in (sliding, full, sharing):
        for norm in (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.pre_feedforward_layernorm,
            layer.post_feedforward_layernorm,
            layer.pre_feedforward_layernorm_2,
            layer.post_feedforward_layernorm_1,
            layer.post_feedforward_layernorm_2,
            layer.post_per_layer_input_norm,
        ):
            assert norm(x).shape == x.shape
        assert layer.mlp(x).shape == x.shape
        gate = layer.per_layer_input_gate(x)
        assert gate.shape == (1, 2, 8)
        assert layer.per_layer_projection(gate).shape == x.shape
        assert layer.layer_scalar.shape == (1,)
        assert layer.enable_moe is True
    assert [layer.layer_type for layer in (sliding, full, sharing)] == TINY["layer_types"]


def test_attention_has_the_parts_we_drive(model: Any) -> None:
    sliding, full, sharing = (layer.self_attn for layer in model.language_model.model.layers)
    for attention, head_dim in ((sliding, 16), (full, 32), (sharing, 32)):
        assert attention.scale == 1.0
        assert (attention.n_heads, attention.head_dim) == (2, head_dim)
        assert attention.q_proj.weight.shape == attention.o_proj.weight.shape[::-1]
        queries = mx.zeros((2, 2, 3, head_dim))
        # a position for each row
        roped = attention.rope(attention.q_norm(queries), offset=mx.array([0, 5]))
        assert roped.shape == queries.shape
    for attention in (sliding, full):
        assert attention.n_kv_heads == 1
        assert attention.k_norm(attention.k_proj(mx.zeros((1, 32)))).shape[-1] == attention.head_dim
        assert not attention.v_norm.parameters()
    assert (sliding.use_k_eq_v, full.use_k_eq_v) == (False, True)
    assert "v_proj" in sliding
    assert "v_proj" not in full
    assert "k_proj" not in sharing


def test_experts_have_the_parts_we_drive(model: Any) -> None:
    layer = model.language_model.model.layers[0]
    hidden = mx.zeros((2, 3, 32))
    indices, weights = layer.router(hidden)
    assert indices.shape == weights.shape == (2, 3, 2)
    assert layer.router.config.num_experts == 4
    assert layer.experts(hidden, indices, weights).shape == hidden.shape
    glu = layer.experts.switch_glu
    assert {"up_proj", "gate_proj", "down_proj"} <= set(glu)
    assert glu.up_proj.weight.shape == (4, 16, 32)
    assert hasattr(glu.up_proj, "to_quantized")


def test_a_drafter_can_be_built_of_its_layers() -> None:
    config = {**TINY, "num_kv_shared_layers": 3, "enable_moe_block": False}
    args = gemma4_text.ModelArgs.from_dict(config)
    layer = gemma4_text.DecoderLayer(args, 0)
    assert "k_proj" not in layer.self_attn
    assert args.rms_norm_eps == 1e-6


def test_sanitize_splits_experts_and_drops_what_sharing_layers_do_not_use(model: Any) -> None:
    layers = "language_model.model.layers"
    stored = {
        f"{layers}.0.experts.gate_up_proj": mx.zeros((4, 32, 32)),
        f"{layers}.0.experts.down_proj": mx.zeros((4, 32, 16)),
        f"{layers}.1.self_attn.k_proj.weight": mx.zeros((32, 32)),
        f"{layers}.2.self_attn.k_proj.weight": mx.zeros((32, 32)),
    }
    names = set(model.sanitize(stored))
    glu = f"{layers}.0.experts.switch_glu"
    assert names == {
        f"{glu}.gate_proj.weight",
        f"{glu}.up_proj.weight",
        f"{glu}.down_proj.weight",
        f"{layers}.1.self_attn.k_proj.weight",
    }


def test_functions_take_what_we_give_them() -> None:
    assert parameters(gemma4_text.logit_softcap)[:2] == ["softcap", "x"]
    assert parameters(infer_quant_config) == ["path", "module", "weights"]
    assert parameters(load)[0] == "model_path"
    assert "eos_token_ids" in parameters(load)


def test_a_packed_weight_tells_how_it_was_packed() -> None:
    linear = nn.Linear(64, 8, bias=False)
    packed = nn.QuantizedLinear.from_linear(linear, group_size=32, bits=4)
    weights = {"a.weight": packed.weight, "a.scales": packed.scales}
    assert infer_quant_config("a", linear, weights) == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
    }


def test_the_tokenizer_wrapper_has_what_we_use() -> None:
    wrapper = load(POCKET, eos_token_ids=[1, 5])
    assert isinstance(wrapper, TokenizerWrapper)
    assert wrapper.has_chat_template is True
    assert wrapper.eos_token_ids == {1, 5}
    assert wrapper.detokenizer is not wrapper.detokenizer
    messages = [{"role": "user", "content": "Hi"}]
    text = wrapper.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert text == "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"


@pytest.mark.parametrize("kind", [BPEStreamingDetokenizer, SPMStreamingDetokenizer])
def test_detokenizers_keep_their_text_in_a_plain_attribute(kind: type[Any]) -> None:
    # We shorten `text`, `tokens` and `offset` between tokens, see mlx_mtp.tokenizer.Detokenizer.
    assert issubclass(kind, StreamingDetokenizer)
    assert not hasattr(kind, "text")
    wrapper = load(POCKET)
    letter = wrapper.get_vocab()["C"]
    detokenizer = kind(wrapper._tokenizer)
    detokenizer.add_token(letter)
    assert (detokenizer.text, detokenizer.tokens, detokenizer.offset) == ("C", [letter], 0)
    assert detokenizer.last_segment == "C"
    assert detokenizer.offset == 1


def test_the_byte_level_detokenizer_still_has_the_faults_we_work_around() -> None:
    wrapper = load(POCKET)
    vocabulary = wrapper.get_vocab()
    detokenizer = wrapper.detokenizer
    assert isinstance(detokenizer, BPEStreamingDetokenizer)
    detokenizer.add_token(vocabulary["Ġ"])  # a single space
    assert detokenizer.last_segment == ""  # held back
    detokenizer.add_token(vocabulary["C"])
    assert detokenizer.last_segment == "C"  # and then dropped
