"""Muon for the matrices (Jordan 2024, kellerjordan.github.io/posts/muon), AdamW for the rest.

Matrices of one shape are orthogonalised together, which is what makes it cheap on a CPU.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch


def orthogonalize(update: torch.Tensor) -> torch.Tensor:
    """[n, rows, columns] -> nearest (semi-)orthogonal matrices, by five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = x.bfloat16() / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Steps all parameters of a model at a share of their peak rates.

    Args:
        model: embeddings, norms and vectors go to AdamW, all other parameters to Muon.
        matrix_rate, rate: peak rates of Muon and of AdamW.
    """

    def __init__(
        self, model: torch.nn.Module, matrix_rate: float, rate: float, decay: float = 0.02
    ) -> None:
        self.groups: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
        others = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim >= 2 and "embed" not in name and "router" not in name:
                self.groups[parameter.shape].append(parameter)
            else:
                others.append(parameter)
        self.momentum = {
            shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()
        }
        self.adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.97), weight_decay=0.0)
        self.matrix_rate, self.rate, self.decay = matrix_rate, rate, decay
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Applies the gradients at `share` of the peak rates and clears them."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.rate * share
        self.adam.step()
        for shape, group in self.groups.items():
            gradients = torch.stack([p.grad for p in group])
            momentum = self.momentum[shape].mul_(0.95).add_(gradients)
            update = gradients + 0.95 * momentum
            flat = orthogonalize(update.view(-1, *shape[-2:])).view_as(update)
            flat *= self.matrix_rate * share * math.sqrt(max(1.0, shape[-2] / shape[-1]))
            for parameter, change in zip(group, flat, strict=True):
                parameter.mul_(1 - self.decay * self.matrix_rate * share).sub_(change)
        for parameter in self.parameters:
            parameter.grad = None


def schedule(elapsed: float, plateau: float = 0.4) -> float:
    """Share of the peak rate at an elapsed fraction: a short rise, a plateau, a linear fall."""
    if elapsed < 0.02:
        return 0.1 + 0.9 * elapsed / 0.02
    return max(0.02, min(1.0, (1.0 - elapsed) / (1.0 - plateau)))
