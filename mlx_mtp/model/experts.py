"""The one seam through which a layer's experts are called. Owns: how, and what is counted.

MLX reads an expert's weights once per (token, expert) pair below 64 tokens: the routing cost of
the 26B-A4B. Strategies with equal results are chosen here; today there is mlx-lm's.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class Experts:
    """Runs the experts of a target's layers and counts what they cost.

    Attributes:
        pairs: (token, expert) pairs computed so far.
    """

    def __init__(self) -> None:
        self.pairs = 0

    def __call__(self, layer: Any, hidden: mx.array) -> mx.array:
        """Routed experts of one layer; changes the counter only.

        Args:
            layer: mlx-lm's DecoderLayer with a router and experts.
            hidden: [rows, L, H], the residual before the dense MLP.

        Returns:
            [rows, L, H] in hidden's dtype, before post_feedforward_layernorm_2.
        """
        indices, weights = layer.router(hidden)
        self.pairs += indices.size
        x = layer.pre_feedforward_layernorm_2(hidden)
        experts = layer.experts.switch_glu
        if "scales" not in experts.up_proj:
            # Unquantized experts may be held in a wider dtype than the activations (load.py).
            x = x.astype(experts.up_proj.weight.dtype)
        return layer.experts(x, indices, weights).astype(hidden.dtype)
