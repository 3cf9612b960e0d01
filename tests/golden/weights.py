"""Random weights for the small models, scaled so that a random target writes lively text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gains:
    """Scales of the random target: how far the text depends on its past, and how sure it is.

    `attention` and `mlp` multiply the post-norm weights of a layer's two halves, `final` the last
    norm's (and so the logits), `embed` is the standard deviation of the embedding table.
    """

    attention: float
    mlp: float
    final: float
    embed: float


@torch.no_grad()
def randomize(model: torch.nn.Module, gains: Gains, seed: int) -> None:
    """Overwrites all parameters and layer scalars of a text model or assistant, by name."""
    generator = seeded(seed)
    tensors = dict(model.named_parameters())
    tensors |= {name: b for name, b in model.named_buffers() if name.endswith("layer_scalar")}
    for name in sorted(tensors):
        tensor = tensors[name]
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("layer_scalar"):
            tensor.copy_(1 + 0.1 * noise.clamp(-2, 2))
        elif "embed_tokens" in name:
            tensor.copy_(noise * (0.25 if "per_layer" in name else gains.embed))
        elif tensor.ndim == 1:  # norms, router.scale, router.per_expert_scale
            tensor.copy_(_norm_gain(name, gains) * (1 + 0.2 * noise.clamp(-2.5, 2.5)))
        else:
            # the router's own input is scaled by hidden**-0.5 already
            fan_in = 1 if name.endswith("router.proj.weight") else tensor.shape[-1]
            tensor.copy_(noise / math.sqrt(fan_in))


def _norm_gain(name: str, gains: Gains) -> float:
    if name.endswith("post_attention_layernorm.weight"):
        return gains.attention
    if name.endswith("post_feedforward_layernorm.weight"):
        return gains.mlp
    if name.endswith("norm.weight") and "layers." not in name and "per_layer" not in name:
        return gains.final
    if name.endswith("q_norm.weight"):
        return 0.6  # softer attention: float32 rounding stays near 1e-5 on the logits
    return 1.0


@torch.no_grad()
def round_to_bfloat16(model: torch.nn.Module) -> None:
    """Rounds the weights to bfloat16's grid: casting the pair is exact, and the files compress."""
    for tensor in model.state_dict().values():  # not the RoPE frequencies and embedding scales
        if tensor.dtype == torch.float32:
            tensor.copy_(tensor.bfloat16().float())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
