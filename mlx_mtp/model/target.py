"""The target's forward pass. Owns: masks, positions and K/V around mlx-lm's Gemma 4 modules.

The weights live in mlx-lm's `gemma4.Model`; we drive its layers over our slot caches, because
masks, positions and attention are what drafting and ragged batches need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.gemma4_text import logit_softcap

from mlx_mtp.model.attention import attend
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.experts import Experts
from mlx_mtp.model.layer import finish_layer, project_keys_values, project_queries
from mlx_mtp.model.span import Span
from mlx_mtp.pair import TargetConfig

Want = Literal["all", "last", "none"]


class Target:
    """A Gemma 4 target of any family.

    Args:
        model: mlx-lm's gemma4.Model with weights.
        config: the checkpoint's.

    Attributes:
        dtype: of activations and K/V.
        experts: runs and counts the routed experts.
        lock: held by whoever computes with it, so that several threads take turns.
    """

    def __init__(self, model: Any, config: TargetConfig) -> None:
        self.config = config
        self.head = model.language_model
        self.body = model.language_model.model
        self.dtype: mx.Dtype = self.body.norm.weight.dtype
        self.experts = Experts()
        self.lock = RLock()

    def embed(self, tokens: mx.array) -> mx.array:
        """Scaled embeddings: int [...] -> [..., H] in the activation dtype."""
        return self.body.embed_tokens(tokens).astype(self.dtype) * self.body.embed_scale

    def logits(self, hidden: mx.array, *, apart: bool = False) -> mx.array:
        """Softcapped logits: post-norm hidden [rows, L, H] -> [rows, L, vocabulary].

        Args:
            apart: each row for itself, as in `Span`.
        """
        head = self.body.embed_tokens.as_linear
        if not self.head.tie_word_embeddings:
            head = self.head.lm_head
        logits = _over_rows(head, hidden, apart=apart)
        cap = self.head.final_logit_softcapping
        return logits if cap is None else logit_softcap(cap, logits)

    def forward(
        self, tokens: mx.array, cache: SlotCache, span: Span, want: Want = "all"
    ) -> mx.array | None:
        """Put tokens through the target and their K/V into the cache; commits nothing.

        Layers that share K/V write none, and what follows the last K/V of a prompt matters for
        its last token only: "last" and "none" run no more than that.

        Args:
            tokens: int32 [rows, L]
            cache: written at span's slots.
            span: of these rows and this L.
            want: whose hidden states to compute.

        Returns:
            The hidden state after the final norm: [rows, L, H] for "all", [rows, 1, H] for
            "last" (each row's last token), None for "none".
        """
        apart = span.apart
        h = self.embed(tokens)
        per_layer = self.per_layer_inputs(tokens, h, apart=apart)
        last_owner = self.config.num_kv_layers - 1
        for index, layer in enumerate(self.body.layers):
            x = layer.input_layernorm(h)
            if index <= last_owner:
                keys, values = _over_rows(
                    partial(project_keys_values, layer.self_attn), x, span.starts, apart=apart
                )
                cache.write(index, span, keys, values)
            if index == last_owner and want != "all":
                if want == "none":
                    return None
                h, x = span.take_last(h), span.take_last(x)
                per_layer = None if per_layer is None else span.take_last(per_layer)
                span = span.last()
            queries = _over_rows(
                partial(project_queries, layer.self_attn), x, span.starts, apart=apart
            )
            attended = attend(queries, cache.seen_by_target(self.config.kv_source(index), span))
            own = () if per_layer is None else (per_layer[:, :, index],)
            finish = partial(finish_layer, layer, self.experts)
            h = _over_rows(finish, h, attended, *own, apart=apart)
        return self.body.norm(h)

    def per_layer_inputs(
        self, tokens: mx.array, embedded: mx.array, *, apart: bool = False
    ) -> mx.array | None:
        """[rows, L, layers, P] on models with per-layer embeddings, else None.

        Args:
            tokens: int32 [rows, L]
            embedded: [rows, L, H], of the same tokens.
            apart: each row for itself, as in `Span`.
        """
        body = self.body
        if not self.config.hidden_size_per_layer_input:
            return None
        shape = (self.config.num_layers, self.config.hidden_size_per_layer_input)
        looked_up = body.embed_tokens_per_layer(tokens).astype(self.dtype)
        looked_up = mx.unflatten(looked_up * body.embed_tokens_per_layer_scale, -1, shape)
        projected = _over_rows(body.per_layer_model_projection, embedded, apart=apart)
        projected = projected * body.per_layer_projection_scale
        projected = body.per_layer_projection_norm(mx.unflatten(projected, -1, shape))
        return (projected + looked_up) * body.per_layer_input_scale


def _over_rows(compute: Callable[..., Any], *arrays: mx.array, apart: bool) -> Any:
    """compute(*arrays), all [rows, ...]; or one call per row, its results joined."""
    if not apart or arrays[0].shape[0] == 1:
        return compute(*arrays)
    each = [
        compute(*(array[row : row + 1] for array in arrays)) for row in range(arrays[0].shape[0])
    ]
    if isinstance(each[0], tuple):
        return tuple(mx.concatenate(list(parts)) for parts in zip(*each, strict=True))
    return mx.concatenate(each)
