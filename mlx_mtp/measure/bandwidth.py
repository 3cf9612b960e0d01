"""Bytes that a round has to read. Owns: the formula, and a loaded pair's part in it.

    target forward    whole + tokens * token + rows * (full * S + sliding * min(S, ring))
    each draft step   whole + rows * row     + rows * (full * S + sliding * min(S, ring))

with tokens = rows * (depth + 1), S the slots attended (the longest row's committed tokens and a
verify, rounded up as the cache does), and all sizes in bytes:

- target, whole: every weight that a forward multiplies with, once, the output head included, which
  is the embedding table where the two are tied;
- token: the rows of the embedding table and of the per-layer embeddings that are looked up for it,
  and the experts it is routed to in all layers (each pair of token and expert reads that expert);
- draft step, whole: all the drafter's weights with a dense head; row: the target's embedding of the
  row's last token and, in a centroid head, the tokens of the centroids that are scored;
- full, sliding: keys and values of one slot in all layers of that type, those that share another
  layer's counted each, as each reads them.

That is what must be read at least once; caches may save some of it, and kernels that take many
tokens in tiles read weights more than once. Divided by a round's seconds it says how much of the
memory's bandwidth a round makes use of. Writes and activations are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mtp.config_json import FULL
from mlx_mtp.model.drafter import Drafter
from mlx_mtp.model.span import ATTENDED_STEP, SPARE_SLOTS, ring_slots, round_up
from mlx_mtp.model.target import Target
from mlx_mtp.pair import TargetConfig

_TABLE, _PER_LAYER = "model.embed_tokens.", "model.embed_tokens_per_layer."


@dataclass(frozen=True)
class Reader:
    """What one forward of a model reads, in bytes; see the formula above."""

    whole: int = 0
    token: int = 0
    full_slot: int = 0
    sliding_slot: int = 0

    def forward(self, tokens: int, rows: int, slots: int, ring: int) -> int:
        """Bytes of a forward over `tokens` tokens in `rows` rows that attend over `slots` slots."""
        attended = self.full_slot * slots + self.sliding_slot * min(slots, ring)
        return self.whole + self.token * tokens + attended * rows


@dataclass(frozen=True)
class Reads:
    """What a pair's rounds read.

    Attributes:
        target: per forward.
        drafter: per draft step, whose tokens are the rows; None where nothing drafts.
        ring: slots of a sliding layer.
    """

    target: Reader
    drafter: Reader | None
    ring: int

    @classmethod
    def of(cls, target: Target, drafter: Drafter | None) -> Reads:
        """Of loaded models, from the sizes of their arrays."""
        config = target.config
        arrays = _arrays(target.head)
        table = _size(arrays, _TABLE)
        per_layer = _size(arrays, _PER_LAYER)
        experts = sum(a.nbytes for name, a in arrays.items() if ".experts.switch_glu." in name)
        looked_up = _row(arrays, _TABLE)
        routed = config.top_k_experts * experts // max(1, config.num_experts)
        tied = table if target.head.tie_word_embeddings else 0
        whole = sum(a.nbytes for a in arrays.values()) - table - per_layer - experts + tied
        itemsize = target.dtype.size
        reader = Reader(
            whole,
            looked_up + _row(arrays, _PER_LAYER) + routed,
            *_slot_bytes(config, config.layer_types, itemsize),
        )
        steps = None
        if drafter is not None:
            own = _arrays(drafter.model)
            ordering = _size(own, "masked_embedding.token_ordering")
            scored = drafter.config.centroid_top_k * drafter.centroid_bytes
            steps = Reader(
                sum(a.nbytes for a in own.values()) - ordering,
                looked_up + scored,
                *_slot_bytes(config, drafter.config.layer_types, itemsize),
            )
        return cls(reader, steps, ring_slots(config.sliding_window))

    def round(self, rows: int, depth: int, longest: int) -> int:
        """Bytes of a round.

        Args:
            longest: committed tokens of the longest row.
        """
        slots = round_up(longest + SPARE_SLOTS, ATTENDED_STEP)
        total = self.target.forward(rows * (depth + 1), rows, slots, self.ring)
        if self.drafter is not None:
            total += depth * self.drafter.forward(rows, rows, slots, self.ring)
        return total


def _arrays(module: object) -> dict[str, mx.array]:
    parameters = module.parameters()  # type: ignore[attr-defined]
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(parameters)))


def _size(arrays: dict[str, mx.array], prefix: str) -> int:
    return sum(array.nbytes for name, array in arrays.items() if name.startswith(prefix))


def _row(arrays: dict[str, mx.array], prefix: str) -> int:
    """Bytes of one row of a table, its scales included."""
    parts = [array for name, array in arrays.items() if name.startswith(prefix)]
    return sum(part.nbytes // part.shape[0] for part in parts if part.ndim > 1)


def _slot_bytes(
    config: TargetConfig, layer_types: tuple[str, ...], itemsize: int
) -> tuple[int, int]:
    """Bytes of one slot's keys and values in all full and in all sliding layers of these."""
    sizes = {True: 0, False: 0}
    for kind in layer_types:
        heads, width = config.kv_shape(kind)
        sizes[kind == FULL] += 2 * heads * width * itemsize
    return sizes[True], sizes[False]
