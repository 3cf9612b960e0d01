"""The MTP drafter. Owns: its modules, its forward pass over the target's K/V, its centroid head.

Four query-only layers cross-attend to the K/V of the target's last K/V-owning layer of each type.
The input is the target's embedding of the last token beside a hidden state: the target's own at
the first step, the drafter's projected one afterwards. The position is the same at every step.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlx_mtp.model.attention import Seen, attend
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.layer import finish_layer, project_queries
from mlx_mtp.model.span import Runs
from mlx_mtp.pair import DrafterConfig

DraftPosition = Literal["bonus", "previous"]


class _Body(nn.Module):
    """The parameters under ``model.`` of an assistant checkpoint."""

    def __init__(self, args: gemma4_text.ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [gemma4_text.DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class _CentroidHead(nn.Module):
    """The parameters under ``masked_embedding.``"""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.centroids = nn.Linear(config.hidden_size, config.num_centroids, bias=False)
        self.token_ordering = mx.arange(config.vocab_size, dtype=mx.int32)


class AssistantModel(nn.Module):
    """The modules of a `gemma4_assistant`; parameter names are those of its checkpoints."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        args = gemma4_text.ModelArgs.from_dict(config.text_config)
        self.pre_projection = nn.Linear(
            2 * config.backbone_hidden_size, config.hidden_size, bias=False
        )
        self.post_projection = nn.Linear(
            config.hidden_size, config.backbone_hidden_size, bias=False
        )
        self.model = _Body(args)
        if config.use_ordered_embeddings:
            self.masked_embedding = _CentroidHead(config)


class DraftLogits(NamedTuple):
    """What a draft step scores.

    Attributes:
        values: [rows, C] logits.
        ids: int32 [rows, C], the token of each; None where C is the whole vocabulary in order.
    """

    values: mx.array
    ids: mx.array | None


class DraftContext(NamedTuple):
    """What all steps of one block share; holds views of the cache, so it lives for one block.

    Attributes:
        offsets: int32 [rows], the position of every query.
        seen: by layer type, what the queries attend to.
    """

    offsets: mx.array
    seen: dict[str, list[Seen]]


class Drafter:
    """A drafter that is loaded and ready to propose tokens.

    Args:
        model: with weights, in the target's activation dtype.
        config: the checkpoint's.
        position: "bonus" puts queries at the bonus token's own position (transformers, LiteRT-LM),
            "previous" one before it, at the last committed slot (vLLM, SGLang). It can change
            which drafts are accepted, never the text.
    """

    def __init__(
        self, model: AssistantModel, config: DrafterConfig, position: DraftPosition = "bonus"
    ) -> None:
        self.model = model
        self.config = config
        self.position = position
        self._head: _OrderedHead | None = None
        if config.use_ordered_embeddings:
            ordering = model.masked_embedding.token_ordering
            self._head = _OrderedHead(model.model.embed_tokens, ordering, config.num_centroids)
            del model.model.embed_tokens  # the ordered copy is the only one that is read

    @property
    def centroid_bytes(self) -> int:
        """Bytes of one centroid's tokens in the centroid head; 0 with a dense head."""
        return 0 if self._head is None else self._head.nbytes // self.config.num_centroids

    def context(self, cache: SlotCache, lengths: mx.array, runs: Runs) -> DraftContext:
        """What the live rows' queries see: the committed prefix in the donor layers' K/V.

        Args:
            cache: the target's.
            lengths: int32 [rows], committed lengths of the live rows; the bonus token of each
                stands at this position and has no K/V yet.
            runs: the cache's, for the same lengths.
        """
        offsets = lengths if self.position == "bonus" else lengths - 1
        return DraftContext(offsets, cache.seen_by_drafter(lengths, runs))

    def step(
        self, embedded: mx.array, hidden: mx.array, context: DraftContext
    ) -> tuple[mx.array, mx.array]:
        """One forward for all rows.

        Args:
            embedded: [rows, 1, H], the target's scaled embedding of each row's last token.
            hidden: [rows, 1, H], the target's post-norm hidden state at the position before it,
                or `next_hidden` of the step before.

        Returns:
            h: [rows, 1, drafter hidden] after the final norm, for `logits`.
            next_hidden: [rows, 1, H] for the next step.
        """
        h = self.model.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in self.model.model.layers:
            queries = project_queries(layer.self_attn, layer.input_layernorm(h), context.offsets)
            attended = attend(queries, context.seen[layer.layer_type])
            h = finish_layer(layer, None, h, attended)
        h = self.model.model.norm(h)
        return h, self.model.post_projection(h)

    def logits(self, h: mx.array) -> DraftLogits:
        """Scores over the vocabulary, or over the tokens of each row's best centroids.

        Args:
            h: [rows, 1, drafter hidden]
        """
        if self._head is None:
            return DraftLogits(self.model.model.embed_tokens.as_linear(h)[:, 0], None)
        centroids = self.model.masked_embedding.centroids(h)[:, 0]
        best = mx.argpartition(-centroids, kth=self.config.centroid_top_k - 1, axis=-1)
        best = best[:, : self.config.centroid_top_k]
        values = self._head(h, best)
        rows = h.shape[0]
        return DraftLogits(values.reshape(rows, -1), self._head.tokens[best].reshape(rows, -1))


class _OrderedHead:
    """The tied table in centroid order, so that a centroid's tokens are one contiguous block.

    Attributes:
        tokens: int32 [centroids, tokens per centroid], the token of each place.
        nbytes: of the table.
    """

    def __init__(self, table: Any, ordering: mx.array, centroids: int) -> None:
        self.tokens = ordering.astype(mx.int32).reshape(centroids, -1)
        self._quantized = isinstance(table, nn.QuantizedEmbedding)
        parts = [table.weight]
        if self._quantized:
            parts += [table.scales, *([] if table.get("biases") is None else [table.biases])]
            self._format = {
                "group_size": table.group_size,
                "bits": table.bits,
                "mode": getattr(table, "mode", "affine"),
            }
        self._parts = [part[ordering].reshape(centroids, -1, part.shape[-1]) for part in parts]
        mx.eval(self.tokens, self._parts)
        self.nbytes = sum(part.nbytes for part in self._parts)

    def __call__(self, h: mx.array, best: mx.array) -> mx.array:
        """[rows, 1, hidden], int [rows, T] -> [rows, T, tokens per centroid]."""
        if self._quantized:
            weight, scales, *biases = self._parts
            scored = mx.gather_qmm(
                h[:, :, None],
                weight,
                scales,
                biases[0] if biases else None,
                rhs_indices=best,
                transpose=True,
                **self._format,
            )
            return scored[:, :, 0]
        # Take and multiply: gather_mm is fp32 only on the CPU.
        return (self._parts[0][best] @ h.swapaxes(-1, -2)[:, None])[..., 0]
