"""Which stored tensor becomes which parameter. Owns: the names and layouts that checkpoints come
in, what of them a text model does not need, and their check against the modules.

Works on headers alone: the modules are mlx-lm's and the drafter's own, filled with arrays that
are never evaluated, and checked by the same code that loads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4

from mlx_mtp.convert.sources import Source, Stored
from mlx_mtp.errors import IncompatibleError
from mlx_mtp.model.drafter import AssistantModel
from mlx_mtp.model.load import (
    match_weights,
    stored_dtype,
    target_name,
    unused_by_drafter,
)
from mlx_mtp.pair import DrafterConfig, TargetConfig
from mlx_mtp.quantization import overrides_of

DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16,
    "U32": mx.uint32, "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64,
    "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
}  # fmt: skip
"""Safetensors' dtypes that MLX reads."""
SPELLED = {dtype: name for name, dtype in DTYPES.items()}
"""How safetensors spells MLX's dtypes."""

_NOT_WEIGHTS = ("self_attn.rotary_emb", "input_max", "input_min", "output_max", "output_min")
_KEYS_VALUES = (".self_attn.k_proj", ".self_attn.v_proj", ".self_attn.k_norm")
_FUSED = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"


class Rows(NamedTuple):
    """Rows of a stored tensor, a row being its last dimension.

    Of every `period` rows those from `start` on are meant, `taken` of them: gate and up of fused
    experts lie in turn.
    """

    stored: Stored
    start: int
    taken: int
    period: int

    @classmethod
    def all_of(cls, stored: Stored) -> Rows:
        rows = math.prod(stored.info.shape[:-1])
        return cls(stored, 0, rows, rows)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored.info.shape
        return shape if self.taken == self.period else (*shape[:-2], self.taken, shape[-1])

    @property
    def total(self) -> int:
        """Rows in all."""
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """In the checkpoint."""
        info = self.stored.info
        return info.nbytes * self.taken // self.period if self.period else 0

    def segments(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        """(first row in the stored tensor, rows) of the rows [begin, end) that are meant."""
        while begin < end:
            group, within = divmod(begin, self.taken)
            length = min(self.taken - within, end - begin)
            yield group * self.period + self.start + within, length
            begin += length


class Dropped(NamedTuple):
    """A stored tensor that is not written, and why."""

    stored: Stored
    why: str


@dataclass(frozen=True)
class Layout:
    """A checkpoint's tensors by the parameter they become.

    Attributes:
        modules: with quantized modules where the checkpoint is quantized; never evaluated.
        rows: parameter's name -> its rows in the checkpoint, in stored order.
        towers: vision and audio tensors.
        dropped: all others that are not needed.
        dtype: of the checkpoint's activations.
    """

    modules: nn.Module
    rows: dict[str, Rows]
    towers: list[Stored]
    dropped: list[Dropped]
    dtype: mx.Dtype


def target_layout(source: Source, config: TargetConfig) -> Layout:
    """Lay out a target. Raises IncompatibleError, as loading it would, and ModelNotFoundError."""
    model = gemma4.Model(gemma4.ModelArgs.from_dict(config.mlx_lm_config))
    rows: dict[str, Rows] = {}
    towers: list[Stored] = []
    dropped: list[Dropped] = []
    tied = config.text["tie_word_embeddings"]
    for stored in source.tensors():
        name = target_name(stored.name)
        if name is None:
            towers.append(stored)
        elif any(part in name for part in _NOT_WEIGHTS):
            dropped.append(Dropped(stored, "not a weight"))
        elif tied and name.startswith("language_model.lm_head"):
            dropped.append(Dropped(stored, "the tied head, stored once more"))
        elif _shares_kv(name, config):
            dropped.append(Dropped(stored, "K and V of a layer that reads another's"))
        else:
            for own, part in _parameters(name, stored):
                if own in rows:
                    raise _twice(source, own)
                rows[own] = part
    formats = overrides_of(config.quantization, target_name)
    return _laid_out(model, source, rows, formats, towers, dropped)


def drafter_layout(source: Source, config: DrafterConfig) -> Layout:
    """Lay out a drafter under its own names. Raises as `target_layout`."""
    model = AssistantModel(config)
    rows: dict[str, Rows] = {}
    dropped: list[Dropped] = []
    for stored in source.tensors():
        if unused_by_drafter(stored.name, config.use_ordered_embeddings):
            dropped.append(Dropped(stored, "not needed by a drafter"))
        else:
            rows[stored.name] = Rows.all_of(stored)
    return _laid_out(model, source, rows, overrides_of(config.quantization), [], dropped)


def _laid_out(
    model: nn.Module,
    source: Source,
    rows: dict[str, Rows],
    formats: dict[str | None, Any],
    towers: list[Stored],
    dropped: list[Dropped],
) -> Layout:
    unread = {name: _unread(part, source) for name, part in rows.items()}
    match_weights(model, unread, formats, source.where)
    return Layout(model, rows, towers, dropped, stored_dtype(unread))


def quantized_modules(modules: nn.Module) -> dict[str, dict[str, Any]]:
    """Path -> parameters of every quantized module."""
    return {
        path: {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        for path, module in modules.named_modules()
        if "scales" in module
    }


def quantizable_modules(modules: nn.Module) -> dict[str, bool]:
    """Path of every unquantized matrix -> whether rows are looked up in it."""
    return {
        path: isinstance(module, nn.Embedding)
        for path, module in modules.named_modules()
        if hasattr(module, "to_quantized") and "scales" not in module
    }


def parameters(modules: nn.Module) -> dict[str, mx.array]:
    """Name -> array of all parameters."""
    return dict(tree_flatten(modules.parameters()))


def _parameters(name: str, stored: Stored) -> Iterable[tuple[str, Rows]]:
    """The parameters that a target's tensor holds; see mlx_lm.models.gemma4_text, sanitize."""
    if name.endswith(_FUSED):
        base, shape = name.removesuffix("gate_up_proj"), stored.info.shape
        if len(shape) != 3 or shape[1] % 2:
            raise IncompatibleError(
                f"{stored.name} has shape {list(shape)}, which holds no gate and up projections.",
                "Use the checkpoint that belongs to this config.json.",
            )
        half = shape[1] // 2
        yield f"{base}switch_glu.gate_proj.weight", Rows(stored, 0, half, shape[1])
        yield f"{base}switch_glu.up_proj.weight", Rows(stored, half, half, shape[1])
    elif name.endswith(_DOWN):
        base = name.removesuffix("down_proj")
        yield f"{base}switch_glu.down_proj.weight", Rows.all_of(stored)
    else:
        yield name, Rows.all_of(stored)


def _shares_kv(name: str, config: TargetConfig) -> bool:
    if not any(part in name for part in _KEYS_VALUES):
        return False
    layer = name.partition("layers.")[2].partition(".")[0]
    return layer.isdigit() and int(layer) >= config.num_kv_layers


def _unread(rows: Rows, source: Source) -> mx.array:
    """An array of that shape and dtype, for its shape and dtype."""
    dtype = DTYPES.get(rows.stored.info.dtype)
    if dtype is None:
        raise IncompatibleError(
            f"{source.name}: {rows.stored.name} is of dtype {rows.stored.info.dtype}, which MLX "
            "cannot read.",
            "Use a checkpoint in bfloat16, float16 or float32, or an MLX conversion.",
        )
    return mx.zeros(rows.shape, dtype=dtype)


def _twice(source: Source, name: str) -> IncompatibleError:
    return IncompatibleError(
        f"{source.name} holds {name} under two names.",
        "Use the checkpoint that belongs to this config.json.",
    )
