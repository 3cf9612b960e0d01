"""One model of a pair as it will be written. Owns: which tensor gets which fate, the shards and the
sums. Made from configs and safetensors headers alone; reads and writes no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_mtp.convert.layout import (
    DTYPES,
    SPELLED,
    Dropped,
    Layout,
    Rows,
    parameters,
    quantizable_modules,
    quantized_modules,
)
from mlx_mtp.convert.recipes import DEQUANTIZE, GRID, Options, Params, Recipe, block_of
from mlx_mtp.convert.sources import Source
from mlx_mtp.convert.tensors import TOWERS, Planned, Shard, TensorPlan
from mlx_mtp.errors import IncompatibleError
from mlx_mtp.files import TensorInfo

_PARTS = {
    "embed_tokens_per_layer": "per-layer embeddings",
    "per_layer": "per-layer embeddings",
    "embed_tokens": "embeddings",
    "lm_head": "embeddings",
    "self_attn": "attention",
    "experts": "experts",
    "router": "router",
    "mlp": "dense MLP",
}


@dataclass(frozen=True)
class PartPlan:
    """A target or a drafter to be written.

    Attributes:
        source, label, revision: see `Source`; ``source`` does not enter what is written.
        identity: the checkpoint's, see `Source`.
        config: its config.json, but for dtype and quantization complete.
        dtype: of what is not quantized.
        quantization: the config's block, or None.
        shards: what is written, every tensor in one of them.
        dropped: what is not.
    """

    source: Source
    label: str
    revision: str | None
    identity: str
    config: dict[str, Any]
    dtype: str
    quantization: Params | None
    shards: tuple[Shard, ...]
    dropped: tuple[Dropped, ...]

    @property
    def tensors(self) -> Iterator[TensorPlan]:
        return (tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def parameter_count(self) -> int:
        """Trained weights, a tied table counted once; towers and buffers are not among them."""
        return sum(
            tensor.elements
            for tensor in self.tensors
            if tensor.part != TOWERS and not is_buffer(tensor.name)
        )

    @property
    def unquantized(self) -> dict[str, str]:
        """Matrices that the recipe asked to quantize and that are not: name -> why."""
        return {_path(t.name): t.reason for t in self.tensors if t.reason}

    @property
    def source_bytes(self) -> int:
        """Of all that is stored, dropped tensors included."""
        return sum(t.source_bytes for t in self.tensors) + self.dropped_bytes

    @property
    def dropped_bytes(self) -> int:
        return sum(dropped.stored.info.nbytes for dropped in self.dropped)

    @property
    def bytes(self) -> int:
        """Of the weight files."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def working_bytes(self) -> int:
        """The most that writing one tensor takes."""
        return max((tensor.working_bytes for tensor in self.tensors), default=0)


def plan_part(
    source: Source,
    layout: Layout,
    recipe: Recipe,
    options: Options,
    config: dict[str, Any],
    *,
    is_drafter: bool,
    dtype: mx.Dtype,
) -> PartPlan:
    """Plan a target or a drafter.

    Args:
        layout: of its checkpoint.
        recipe: the part's own.
        config: what its config.json will say, but for dtype and quantization.
        dtype: of all that is not quantized.
    """
    stored = quantized_modules(layout.modules)
    dequantize = options.name == DEQUANTIZE
    maker = _Maker(layout, recipe, SPELLED[dtype], is_drafter)
    tensors = list(maker.tensors({} if not dequantize else stored))
    formats = {} if dequantize else dict(stored)
    formats |= {_path(t.name): t.params for t in tensors if t.action == "quantize" and t.params}
    block = block_of(formats)
    dropped = list(layout.dropped)
    if options.towers == "keep":
        tensors += [_copied(tower.name, TOWERS, Rows.all_of(tower)) for tower in layout.towers]
    else:
        dropped += [Dropped(tower, "vision or audio") for tower in layout.towers]
    config = config | {"dtype": str(dtype).rpartition(".")[2]}
    if block is not None:
        # the second name is what the hub looks for
        config |= {"quantization": block, "quantization_config": block}
    return PartPlan(
        source=source,
        label=source.label,
        revision=source.revision,
        identity=source.identity(),
        config=config,
        dtype=str(dtype).rpartition(".")[2],
        quantization=block,
        shards=tuple(_sharded(tensors, options.shard_bytes)),
        dropped=tuple(dropped),
    )


class _Maker:
    """Decides on one parameter after the other."""

    def __init__(self, layout: Layout, recipe: Recipe, dtype: str, is_drafter: bool) -> None:
        self._layout = layout
        self._recipe = recipe
        self._dtype = dtype
        self._is_drafter = is_drafter
        self._matrices = quantizable_modules(layout.modules)
        self._expected = parameters(layout.modules)

    def tensors(self, dequantized: dict[str, Params]) -> Iterator[TensorPlan]:
        for name, rows in self._layout.rows.items():
            path, leaf = _path(name), name.rpartition(".")[2]
            if path in dequantized and leaf == "global_scale":
                raise IncompatibleError(
                    f"{path} has a scale for the whole tensor, so it cannot be dequantized.",
                    "Convert the original checkpoint.",
                )
            if path in dequantized and leaf in ("weight", "scales", "biases"):
                if leaf == "weight":
                    yield self._dequantized(path, rows, dequantized[path])
            elif path in self._matrices and leaf == "weight":
                yield self._matrix(name, path, rows)
            else:
                yield self._plain(name, rows)

    def _matrix(self, name: str, path: str, rows: Rows) -> TensorPlan:
        choice = self._recipe.choose(path, rows.shape[-1], self._matrices[path])
        if not isinstance(choice, dict):
            return replace(self._plain(name, rows), reason=choice or "")
        bits, group = choice["bits"], choice["group_size"]
        lead, width = rows.shape[:-1], rows.shape[-1]
        affine = choice["mode"] == "affine"
        scales = (*lead, width // group)
        kind = self._dtype if affine else "U8"
        outputs = [_planned(name, "U32", (*lead, width * bits // 32))]
        outputs.append(_planned(f"{path}.scales", kind, scales))
        if affine:
            outputs.append(_planned(f"{path}.biases", kind, scales))
        on_grid = self._recipe.on_grid and choice == GRID
        return TensorPlan(
            name,
            part_of(name, is_drafter=self._is_drafter),
            "quantize",
            rows,
            tuple(outputs),
            params=choice,
            cast_to=DTYPES[self._dtype],
            on_grid=on_grid,
        )

    def _dequantized(self, path: str, rows: Rows, params: Params) -> TensorPlan:
        width = rows.shape[-1] * 32 // params["bits"]
        companions = tuple(
            self._layout.rows[name].stored
            for name in (f"{path}.scales", f"{path}.biases")
            if name in self._layout.rows
        )
        name = f"{path}.weight"
        output = _planned(name, self._dtype, (*rows.shape[:-1], width))
        part = part_of(name, is_drafter=self._is_drafter)
        return TensorPlan(name, part, "dequantize", rows, (output,), companions, params=params)

    def _plain(self, name: str, rows: Rows) -> TensorPlan:
        stored = rows.stored.info.dtype
        floating = mx.issubdtype(DTYPES[stored], mx.floating) and not name.endswith(".global_scale")
        part = part_of(name, is_drafter=self._is_drafter)
        if not floating or stored == self._dtype:
            return _copied(name, part, rows)
        output = _planned(name, self._dtype, rows.shape)
        return TensorPlan(name, part, "cast", rows, (output,))


def part_of(name: str, *, is_drafter: bool) -> str:
    """What kind of parameter one is, by its name: "attention", "drafter head" and so on."""
    if is_drafter:
        head = name.startswith(("model.embed_tokens.", "masked_embedding."))
        return "drafter head" if head else "drafter body"
    return next((part for piece, part in _PARTS.items() if f".{piece}" in name), "norms")


def _copied(name: str, part: str, rows: Rows) -> TensorPlan:
    return TensorPlan(
        name, part, "copy", rows, (_planned(name, rows.stored.info.dtype, rows.shape),)
    )


def _planned(name: str, dtype: str, shape: tuple[int, ...]) -> Planned:
    return Planned(name, TensorInfo(dtype, shape, math.prod(shape) * DTYPES[dtype].size))


def is_buffer(name: str) -> bool:
    """Whether a parameter is stored, but was not trained."""
    return name.endswith((".layer_scalar", ".token_ordering"))


def _path(name: str) -> str:
    return name.rpartition(".")[0]


def _sharded(tensors: list[TensorPlan], limit: int) -> Iterator[Shard]:
    groups: list[list[TensorPlan]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        yield Shard(file if len(groups) > 1 else "model.safetensors", tuple(_placed(group)))


def _placed(tensors: list[TensorPlan]) -> Iterator[TensorPlan]:
    """With offsets: wide dtypes first, as the format's own writers do, so that all are aligned."""
    outputs = [output for tensor in tensors for output in tensor.outputs]
    offsets, position = {}, 0
    for output in sorted(outputs, key=lambda output: -DTYPES[output.info.dtype].size):
        offsets[output.name] = position
        position += output.info.nbytes
    for tensor in tensors:
        placed = tuple(output._replace(offset=offsets[output.name]) for output in tensor.outputs)
        yield replace(tensor, outputs=placed)
