"""A target and its drafter as their configs describe them. Owns: the two configs, translated once
from config.json, the generation defaults, and the check that the two belong together.

Knows no files and no arrays: everything here follows from JSON objects.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_mtp.config_json import (
    FULL,
    MAX_SIZE,
    Fields,
    declared_dtype,
    flat_text_config,
    kept_keys,
)
from mlx_mtp.errors import IncompatibleError
from mlx_mtp.generation_config import GenerationDefaults
from mlx_mtp.plain import quoted
from mlx_mtp.quantization import quantization_block

__all__ = ["DrafterConfig", "Family", "GenerationDefaults", "TargetConfig", "check_pair"]

Family = Literal["e-series", "dense", "experts", "unified"]

TARGET_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
DRAFTER_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")

# hidden size of the published targets -> their name (facts of the published configs)
_PUBLISHED = {1536: "E2B", 2560: "E4B", 3840: "12B", 2816: "26B-A4B", 5376: "31B"}


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What a target's and a drafter's config have in common; see the two."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    num_global_kv_heads: int
    head_dim: int
    global_head_dim: int
    sliding_window: int
    vocab_size: int
    dtype: str | None
    quantization: dict[str, Any] | None = field(hash=False)
    text: dict[str, Any] = field(repr=False, hash=False)
    extra: dict[str, Any] = field(repr=False, hash=False)

    def kv_shape(self, layer_type: str) -> tuple[int, int]:
        """(KV heads, head width) of the K and V that layers of a type work with."""
        if layer_type == FULL:
            return self.num_global_kv_heads, self.global_head_dim
        return self.num_kv_heads, self.head_dim


@dataclass(frozen=True, kw_only=True)
class TargetConfig(_Model):
    """What a target is. Built by `from_dict` only, from any writing of its config.json.

    Attributes:
        model_type: as the file says it.
        family: "e-series" (E2B, E4B), "dense" (31B), "experts" (26B-A4B) or "unified" (12B).
        layer_types: "sliding_attention" or "full_attention" for each of num_layers.
        num_global_kv_heads: KV heads of full layers, resolved (never None).
        num_kv_shared_layers: layers at the end that have no K and V of their own.
        num_experts, top_k_experts: 0 where there are no experts.
        hidden_size_per_layer_input: 0 where there are no per-layer embeddings.
        dtype: what the checkpoint declares, e.g. "bfloat16", or None.
        quantization: MLX's quantization block, or None.
        text: the text model's keys as mlx-lm reads them; take `mlx_lm_config` for a copy.
        extra: top-level keys kept for a converted model.
    """

    family: Family
    num_kv_shared_layers: int
    max_position_embeddings: int
    num_experts: int
    top_k_experts: int
    hidden_size_per_layer_input: int
    attention_k_eq_v: bool

    @classmethod
    def from_dict(cls, config: dict[str, Any], source: str = "") -> TargetConfig:
        """Translate a config.json. ``source`` (a hub id or folder) only serves messages.

        Raises IncompatibleError: a drafter's config, an unknown model type, a missing or
        ill-typed key, a checkpoint quantized by another tool than MLX.
        """
        fields = Fields(config, "config.json")
        model_type = fields.text("model_type")
        if model_type in DRAFTER_TYPES:
            raise IncompatibleError(
                f"{source or 'This model'} is a drafter ({model_type}), not a target.",
                _use_target(fields, source),
            )
        if model_type not in TARGET_TYPES:
            raise _unknown_type(source, model_type, TARGET_TYPES)
        text = flat_text_config(fields)
        types = text["layer_types"]
        owning = text["num_hidden_layers"] - text["num_kv_shared_layers"]
        if owning < 1 or set(types[owning:]) - set(types[:owning]):
            raise fields.fail("num_kv_shared_layers", "leaves no layer to share K and V with")
        moe = text["enable_moe_block"]
        return cls(
            **_common(fields, text),
            family=_family(model_type, text),
            num_kv_shared_layers=text["num_kv_shared_layers"],
            max_position_embeddings=text["max_position_embeddings"],
            num_experts=text["num_experts"] if moe else 0,
            top_k_experts=text["top_k_experts"] if moe else 0,
            hidden_size_per_layer_input=text["hidden_size_per_layer_input"],
            attention_k_eq_v=text["attention_k_eq_v"],
        )

    @property
    def num_kv_layers(self) -> int:
        """Layers that own K and V; they come first."""
        return self.num_layers - self.num_kv_shared_layers

    @property
    def donors(self) -> dict[str, int]:
        """layer type -> the last KV-owning layer of that type: what the drafter reads."""
        return {name: index for index, name in enumerate(self.layer_types[: self.num_kv_layers])}

    def kv_source(self, layer: int) -> int:
        """The KV-owning layer whose K and V a layer attends to; itself where it owns some."""
        return layer if layer < self.num_kv_layers else self.donors[self.layer_types[layer]]

    def kv_heads(self, layer: int) -> int:
        """KV heads of a layer."""
        return self.kv_shape(self.layer_types[layer])[0]

    def kv_head_dim(self, layer: int) -> int:
        """Width of one head of a layer, queries and keys alike."""
        return self.kv_shape(self.layer_types[layer])[1]

    @property
    def mlx_lm_config(self) -> dict[str, Any]:
        """A complete config.json as mlx-lm's ``gemma4.ModelArgs`` reads it, without quantization.

        A fresh copy at each call: mlx-lm writes into the one it gets. ``vocab_size`` stands at the
        top because mlx-lm takes it from there. The unified family stays visible in
        ``text_config.model_type``.
        """
        config = deepcopy(self.extra) | {
            "model_type": "gemma4",
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.text["tie_word_embeddings"],
            "text_config": deepcopy(self.text),
        }
        if self.dtype is not None:
            config["dtype"] = self.dtype
        return config


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(_Model):
    """What a drafter (assistant) is. Built by `from_dict` only.

    Attributes:
        backbone_hidden_size: hidden size of the target it was trained with.
        num_global_kv_heads: KV heads it expects of the full donor layer, resolved.
        use_ordered_embeddings: it has a centroid head; num_centroids and centroid_top_k count
            only then (the large drafters declare them without having one).
        quantization: MLX's quantization block, or None.
        text: the layers' keys as mlx-lm reads them; take `text_config` for a copy.
    """

    backbone_hidden_size: int
    use_ordered_embeddings: bool
    num_centroids: int
    centroid_top_k: int

    @classmethod
    def from_dict(cls, config: dict[str, Any], source: str = "") -> DrafterConfig:
        """Translate an assistant's config.json. ``source`` only serves messages.

        Raises IncompatibleError: a target's config, an unknown model type, a missing or
        ill-typed key.
        """
        fields = Fields(config, "the drafter's config.json")
        model_type = fields.text("model_type")
        if model_type in TARGET_TYPES:
            raise IncompatibleError(
                f"{source or 'This model'} is a target ({model_type}), not a drafter.",
                f"Its drafter is {source}-assistant."
                if "/gemma-4-" in source.lower() and not source.startswith(("/", "."))
                else "Drafters are named like their target with -assistant added.",
            )
        if model_type not in DRAFTER_TYPES:
            raise _unknown_type(source, model_type, DRAFTER_TYPES)
        text = flat_text_config(fields)
        # all of its layers read the target's K and V; files may say 0 here
        text["num_kv_shared_layers"] = text["num_hidden_layers"]
        text["hidden_size_per_layer_input"] = 0
        ordered = fields.flag("use_ordered_embeddings", False)
        centroids = fields.integer("num_centroids", 2048, low=1)
        top_k = fields.integer("centroid_intermediate_top_k", 32, low=1)
        if ordered and (text["vocab_size"] % centroids or top_k > centroids):
            vocab = text["vocab_size"]
            raise fields.fail("num_centroids", f"is {centroids} for {vocab} tokens and top {top_k}")
        return cls(
            **_common(fields, text),
            backbone_hidden_size=fields.integer("backbone_hidden_size", low=1, high=MAX_SIZE // 2),
            use_ordered_embeddings=ordered,
            num_centroids=centroids,
            centroid_top_k=top_k,
        )

    @property
    def text_config(self) -> dict[str, Any]:
        """The layers' keys for mlx-lm's ``gemma4_text.ModelArgs``; a fresh copy at each call."""
        return deepcopy(self.text)


def check_pair(
    target: TargetConfig, drafter: DrafterConfig, target_name: str = "", drafter_name: str = ""
) -> list[str]:
    """Whether a drafter can draft for a target.

    Args:
        target_name, drafter_name: hub ids or folder names; only they tell a QAT checkpoint.

    Returns:
        Warnings, one sentence each: the pair runs, but fewer drafts may be accepted.

    Raises:
        IncompatibleError: names what differs.
    """
    if (drafter.model_type == "gemma4_unified_assistant") != (target.family == "unified"):
        raise _mismatch("model type", target.model_type, drafter.model_type)
    pairs: list[tuple[str, Any, Any]] = [
        ("hidden size", target.hidden_size, drafter.backbone_hidden_size),
        ("vocabulary size", target.vocab_size, drafter.vocab_size),
        ("sliding window", target.sliding_window, drafter.sliding_window),
    ]
    for layer_type in sorted(set(drafter.layer_types)):
        kind = layer_type.replace("_", " ")
        if layer_type not in target.donors:
            raise _mismatch("layer types", f"without {kind}", f"with {kind}")
        ours, theirs = target.kv_shape(layer_type), drafter.kv_shape(layer_type)
        pairs.append((f"KV heads of {kind}", ours[0], theirs[0]))
        pairs.append((f"head width of {kind}", ours[1], theirs[1]))
    for what, of_target, of_drafter in pairs:
        if of_target != of_drafter:
            raise _mismatch(what, of_target, of_drafter)

    warnings = []
    if target.dtype and drafter.dtype and target.dtype != drafter.dtype:
        warnings.append(
            f"The target declares {target.dtype}, the drafter {drafter.dtype}; "
            "the drafter runs in the target's."
        )
    qat = ["qat" in name.lower() for name in (target_name, drafter_name)]
    if target_name and drafter_name and qat[0] != qat[1]:
        one, other = ("target", "drafter") if qat[0] else ("drafter", "target")
        warnings.append(
            f"The {one} is a QAT checkpoint and the {other} is not; "
            "expect fewer drafts to be accepted."
        )
    return warnings


def _mismatch(what: str, target: Any, drafter: Any) -> IncompatibleError:
    return IncompatibleError(
        f"This drafter belongs to another target: {what} is {target} in the target "
        f"and {drafter} in the drafter.",
        "Use the -assistant checkpoint of the same target.",
    )


def _unknown_type(source: str, model_type: str, known: tuple[str, ...]) -> IncompatibleError:
    return IncompatibleError(
        f"{source or 'This model'} is of type {quoted(model_type)}, which this program cannot run.",
        f"Known types: {', '.join(known)}.",
    )


def _use_target(fields: Fields, source: str) -> str:
    """Name the target of a drafter: by its own name, else by the size it was trained with."""
    name = source.rstrip("/")
    if "-assistant" in name:
        return f"Use {name.replace('-assistant', '', 1)} as the target and this as its drafter."
    size = _PUBLISHED.get(fields.integer("backbone_hidden_size", 0))
    if size is not None:
        return f"Use google/gemma-4-{size}-it as the target and this as its drafter."
    return "Give the target it was trained for, and this as its drafter."


def _family(model_type: str, text: dict[str, Any]) -> Family:
    if "unified" in model_type or "unified" in text["model_type"]:
        return "unified"
    if text["enable_moe_block"]:
        return "experts"
    return "e-series" if text["hidden_size_per_layer_input"] else "dense"


def _common(fields: Fields, text: dict[str, Any]) -> dict[str, Any]:
    """The values of `_Model`'s fields."""
    own_kv_heads = text["num_global_key_value_heads"]
    kv_heads = text["num_key_value_heads"]
    return {
        "model_type": fields.text("model_type"),
        "hidden_size": text["hidden_size"],
        "intermediate_size": text["intermediate_size"],
        "num_layers": text["num_hidden_layers"],
        "layer_types": tuple(text["layer_types"]),
        "num_heads": text["num_attention_heads"],
        "num_kv_heads": kv_heads,
        "num_global_kv_heads": kv_heads if own_kv_heads is None else own_kv_heads,
        "head_dim": text["head_dim"],
        "global_head_dim": text["global_head_dim"],
        "sliding_window": text["sliding_window"],
        "vocab_size": text["vocab_size"],
        "dtype": declared_dtype(fields),
        "quantization": quantization_block(fields),
        "text": text,
        "extra": kept_keys(fields),
    }
