"""Memory of a loaded pair. Owns: what K/V and activations of so many rows and slots take, and how
many rows fit into a limit. Arithmetic on the config; it allocates nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.config_json import FULL
from mlx_mtp.errors import UsageError
from mlx_mtp.model.span import PREFILL_CHUNK, SPARE_SLOTS, ring_slots, round_up
from mlx_mtp.pair import TargetConfig

SCORE_COPIES = 3
"""Arrays as large as the attention scores that are alive at once: scores, masked, softmax."""
LOGIT_COPIES = 4
"""fp32 arrays as large as a round's logits that are alive at once: logits, scaled, noise, kept."""


@dataclass(frozen=True)
class KVSize:
    """Bytes of a target's K/V buffers.

    Attributes:
        ring: one row of all sliding layers.
        slot: one slot of one row of all full layers.
        widest: one slot of one row of a single full layer's keys (or values).
    """

    ring: int
    slot: int
    widest: int

    @classmethod
    def of(cls, config: TargetConfig, itemsize: int) -> KVSize:
        """For a target whose K/V take `itemsize` bytes per number."""
        owning = config.layer_types[: config.num_kv_layers]
        width = [
            config.kv_heads(layer) * config.kv_head_dim(layer) * itemsize
            for layer in range(config.num_kv_layers)
        ]
        full = [size for size, kind in zip(width, owning, strict=True) if kind == FULL]
        return cls(
            ring=2 * (sum(width) - sum(full)) * ring_slots(config.sliding_window),
            slot=2 * sum(full),
            widest=max(full, default=0),
        )

    def total(self, rows: int, slots: int) -> int:
        """Bytes of a `SlotCache` of these rows whose full layers hold `slots` slots."""
        return rows * (self.ring + round_up(slots) * self.slot)


def activation_bytes(config: TargetConfig, itemsize: int, rows: int, slots: int) -> int:
    """An upper estimate of what a forward keeps alive besides weights and K/V.

    The larger of a prefill chunk of one row and a verify of SPARE_SLOTS tokens in all rows. Layers
    are evaluated one after the other, so one layer's arrays count, whatever the depth.
    """
    wide = 2 * config.intermediate_size + 4 * config.hidden_size
    wide += config.num_heads * (config.head_dim + config.global_head_dim)
    wide += config.num_layers * config.hidden_size_per_layer_input
    scores = SCORE_COPIES * config.num_heads * round_up(slots)
    per_token = 2 * (wide + scores) * itemsize
    verified = rows * SPARE_SLOTS
    logits = verified * LOGIT_COPIES * config.vocab_size * 4
    return max(PREFILL_CHUNK * per_token, verified * per_token + logits)


class Needed(NamedTuple):
    """Bytes at the peak of so many rows and slots, by what takes them.

    Attributes:
        weights: of the target and the drafter.
        rings: K/V of all sliding layers.
        full: K/V of all full layers.
        growth: the buffer that growth copies one layer's keys into.
        activations: what a forward keeps alive besides.
    """

    weights: int
    rings: int
    full: int
    growth: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


class MemoryBudget:
    """How many rows of which length fit.

    Args:
        config: the target's.
        itemsize: bytes per number of activations and K/V.
        weights: bytes of the weights, the drafter's included.
        limit: bytes that all of it may take.
    """

    def __init__(self, config: TargetConfig, itemsize: int, weights: int, limit: int) -> None:
        self.config = config
        self.itemsize = itemsize
        self.weights = weights
        self.limit = limit
        self.kv = KVSize.of(config, itemsize)

    def needed(self, rows: int, slots: int) -> int:
        """Bytes at the peak: weights, K/V, activations and the buffer that growth copies into."""
        return self.parts(rows, slots).total

    def parts(self, rows: int, slots: int) -> Needed:
        """The same, by what takes them."""
        slots = round_up(slots)
        return Needed(
            weights=self.weights,
            rings=rows * self.kv.ring,
            full=self.kv.total(rows, slots) - rows * self.kv.ring,
            growth=rows * slots * self.kv.widest,
            activations=activation_bytes(self.config, self.itemsize, rows, slots),
        )

    def rows_at(self, slots: int, most: int, taken: int = 0) -> int:
        """The largest number of rows, up to `most`, that fit with `slots` slots each.

        Args:
            slots: of the full layers.
            most: more are not asked for.
            taken: bytes that something else holds.
        """
        fitting = (n for n in range(most, 0, -1) if self.needed(n, slots) + taken <= self.limit)
        return next(fitting, 0)


def limit_or_device(limit: int | None) -> int:
    """The limit asked for, or the device's. Raises UsageError: less than a byte."""
    if limit is not None and limit < 1:
        raise UsageError(f"The memory limit is {limit}.", "Give a number of bytes.")
    return limit or device_limit()


def device_limit() -> int:
    """Bytes a model may take here: the GPU's recommended working set, or all RAM on the CPU."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended is not None:
        return int(recommended)
    return ram_bytes()


def ram_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
