"""One Gemma 4 decoder layer, attention apart. Owns: the order of norms, residuals and gates.

The weights are mlx-lm's own `gemma4_text.DecoderLayer`, for the target and the drafter alike; the
caller brings the attention, because masks, positions and caches are what they differ in.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.model.experts import Experts


def project_queries(attention: Any, x: mx.array, offsets: mx.array) -> mx.array:
    """Normed and roped queries.

    Args:
        attention: mlx-lm's Attention.
        x: [rows, L, H]
        offsets: int32 [rows], each row's position of its first token.

    Returns:
        [rows, heads, L, head_dim]
    """
    rows, length, _ = x.shape
    queries = attention.q_proj(x).reshape(rows, length, attention.n_heads, attention.head_dim)
    return attention.rope(attention.q_norm(queries).transpose(0, 2, 1, 3), offset=offsets)


def project_keys_values(
    attention: Any, x: mx.array, offsets: mx.array
) -> tuple[mx.array, mx.array]:
    """Normed and roped keys and normed values, as they go to the cache.

    With attention_k_eq_v (full layers of the large models) the values are the key projection
    before its norm and RoPE.

    Args:
        attention: mlx-lm's Attention of a layer that owns K/V.
        x: [rows, L, H]
        offsets: int32 [rows], each row's position of its first token.

    Returns:
        keys, values: [rows, kv_heads, L, head_dim]
    """
    rows, length, _ = x.shape
    shape = (rows, length, attention.n_kv_heads, attention.head_dim)
    raw = attention.k_proj(x).reshape(shape)
    values = raw if attention.use_k_eq_v else attention.v_proj(x).reshape(shape)
    keys = attention.rope(attention.k_norm(raw).transpose(0, 2, 1, 3), offset=offsets)
    return keys, attention.v_norm(values).transpose(0, 2, 1, 3)


def finish_layer(
    layer: Any,
    experts: Experts | None,
    residual: mx.array,
    attended: mx.array,
    per_layer_input: mx.array | None = None,
) -> mx.array:
    """Everything of a layer after its attention.

    Args:
        layer: mlx-lm's DecoderLayer.
        experts: runs the routed experts of layers that have them; None: none has.
        residual: [rows, L, H], the layer's input.
        attended: [rows, L, heads * head_dim], before the output projection.
        per_layer_input: [rows, L, P] on models with per-layer embeddings.

    Returns:
        [rows, L, H]
    """
    h = residual + layer.post_attention_layernorm(layer.self_attn.o_proj(attended))
    x = layer.mlp(layer.pre_feedforward_layernorm(h))
    if experts is not None and layer.enable_moe:
        x = layer.post_feedforward_layernorm_1(x)
        x = x + layer.post_feedforward_layernorm_2(experts(layer, h))
    h = h + layer.post_feedforward_layernorm(x)
    if per_layer_input is not None:
        gate = nn.gelu_approx(layer.per_layer_input_gate(h)) * per_layer_input
        h = h + layer.post_per_layer_input_norm(layer.per_layer_projection(gate))
    return h * layer.layer_scalar
