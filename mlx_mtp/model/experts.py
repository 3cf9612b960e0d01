"""The one seam through which a layer's experts are called. Owns: the strategies and the counting.

MLX reads an expert's weights once per (token, expert) pair below 64 tokens: the routing cost of the
26B-A4B. The strategies give the same bits; they differ in what caches can share and in how much is
launched. Which one is fastest depends on the machine, so it is measured there.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple, cast

import mlx.core as mx


class ExpertStrategy(NamedTuple):
    """How experts are run.

    Attributes:
        sort_from: pairs from which they are computed in the order of their experts, so that those
            of one expert meet in cache; mlx-lm sorts from 64.
        stacked: gate and up are one tensor, which saves a gather.
    """

    sort_from: int = 64
    stacked: bool = False

    @classmethod
    def from_json(cls, values: Any) -> ExpertStrategy:
        """From the list that JSON makes of it; the default where it is no such list."""
        match values:
            case [int(sort_from), bool(stacked)] if sort_from >= 0:
                return cls(sort_from, stacked)
        return cls()


class Experts:
    """Runs the experts of a target's layers and counts what they cost.

    Attributes:
        strategy: see there; `use` changes it.
        count_distinct: keep what was routed where, for `distinct`; costs a host read per round.
        pairs: (token, expert) pairs computed since `begin`.
    """

    def __init__(self) -> None:
        self.strategy = ExpertStrategy()
        self.count_distinct = False
        self.pairs = 0
        self._routed: list[mx.array] = []

    def use(self, strategy: ExpertStrategy, layers: list[Any]) -> None:
        """Run a target's layers so from now on, one layer's experts being there twice meanwhile."""
        for layer in layers:
            if layer.enable_moe:
                (stack if strategy.stacked else unstack)(layer.experts.switch_glu)
        self.strategy = strategy

    def begin(self) -> None:
        """Count anew."""
        self.pairs = 0
        self._routed.clear()

    def distinct(self) -> int:
        """Experts that were read at least once per layer, summed, since `begin`; 0 unless
        `count_distinct`. Waits for the forward."""
        return sum(map(distinct_in, self._routed))

    def __call__(self, layer: Any, hidden: mx.array) -> mx.array:
        """Routed experts of one layer; changes the counters only.

        Args:
            layer: mlx-lm's DecoderLayer with a router and experts.
            hidden: [rows, L, H], the residual before the dense MLP.

        Returns:
            [rows, L, H] in hidden's dtype, before post_feedforward_layernorm_2.
        """
        indices, weights = layer.router(hidden)
        self.pairs += indices.size
        if self.count_distinct:
            self._routed.append(indices)
        x = layer.pre_feedforward_layernorm_2(hidden)
        glu = layer.experts.switch_glu
        if "scales" not in glu.down_proj:
            # Unquantized experts may be held in a wider dtype than the activations (load.py).
            x = x.astype(glu.down_proj.weight.dtype)
        outs = run_glu(glu, x, indices, self.strategy.sort_from)
        return (weights[..., None] * outs).sum(-2).astype(hidden.dtype)


def distinct_in(indices: mx.array) -> int:
    """How many experts are routed to: int [...]; a host read."""
    return len(set(cast("list[int]", indices.flatten().tolist())))


def run_glu(glu: Any, x: mx.array, indices: mx.array, sort_from: int) -> mx.array:
    """Each token through each of its experts.

    Args:
        glu: mlx-lm's SwitchGLU, or one that `stack` has changed.
        x: [rows, L, H]
        indices: int [rows, L, k], the experts of each token.
        sort_from: pairs from which they are sorted by expert.

    Returns:
        [rows, L, k, H]
    """
    shape = indices.shape
    is_sorted = indices.size >= sort_from
    x = x[:, :, None, None]
    if is_sorted:
        indices = indices.flatten()
        order = mx.argsort(indices)
        x, indices = x.flatten(0, 2)[order // shape[-1]], indices[order]
    if "gate_up_proj" in glu:
        gate, up = mx.split(glu.gate_up_proj(x, indices, sorted_indices=is_sorted), 2, axis=-1)
    else:
        up = glu.up_proj(x, indices, sorted_indices=is_sorted)
        gate = glu.gate_proj(x, indices, sorted_indices=is_sorted)
    outs = glu.down_proj(glu.activation(up, gate), indices, sorted_indices=is_sorted)
    if is_sorted:
        outs = outs[mx.argsort(order)].reshape(*shape, 1, -1)
    return outs.squeeze(-2)


def stack(glu: Any) -> None:
    """Make gate and up one tensor ``gate_up_proj``, [experts, 2 * width, ...]; the two go. Changes
    nothing where they cannot be joined: one of them is quantized otherwise than the other, or has
    a scale for the whole tensor."""
    if "gate_up_proj" in glu:
        return
    gate, up = glu.gate_proj, glu.up_proj
    if type(gate) is not type(up) or _form(gate) != _form(up):
        return
    both = copy(gate)
    for name in _tensors(gate):
        both[name] = mx.concatenate([gate[name], up[name]], axis=1)
    mx.eval(both.parameters())
    glu.gate_up_proj = both
    del glu.gate_proj, glu.up_proj


def unstack(glu: Any) -> None:
    """Undo `stack`; nothing where it was not done."""
    if "gate_up_proj" not in glu:
        return
    both = glu.gate_up_proj
    gate, up = copy(both), copy(both)
    for name in _tensors(both):
        gate[name], up[name] = map(mx.contiguous, mx.split(both[name], 2, axis=1))
    mx.eval(gate.parameters(), up.parameters())
    glu.gate_proj, glu.up_proj = gate, up
    del glu.gate_up_proj


def _tensors(linear: Any) -> list[str]:
    """Names of an expert tensor's arrays, all of which have the outputs as their second axis."""
    return [name for name in ("weight", "scales", "biases") if linear.get(name) is not None]


def _form(linear: Any) -> tuple[object, ...]:
    """What two expert tensors must have in common to be one; of its own where they never can."""
    names = ("group_size", "bits", "mode")
    whole = object() if linear.get("global_scale") is not None else None
    return (*(getattr(linear, name, None) for name in names), whole, linear.weight.dtype)
